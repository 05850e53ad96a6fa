"""Datasets chunk by chunk: the same numbers for every chunk size, through want of memory, rows that fail, and
more rows than fit.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from psgrad.data.rows import Block
from psgrad.engine.execution.chunk_memory import peak_bytes
from psgrad.engine.execution.objective import Objective
from psgrad.engine.execution.streaming import Stream
from psgrad.engine.gradients import PerSampleGradients
from psgrad.engine.gradients.per_sample import per_sample_square_norms
from psgrad.engine.measures.builtin.norms import GradientNorms
from psgrad.errors import ModelError
from tests.oracles import one_sample_gradients

ROWS = 37


class Table:
    """Rows in memory that remember which of them were asked for together."""

    def __init__(self, count: int = ROWS) -> None:
        self.inputs, self.target = torch.randn(count, 6), torch.randint(3, (count,))
        self.asked: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self.inputs)

    def take(self, rows: Sequence[int]) -> Block:
        self.asked.append((rows[0], rows[-1] + 1))
        return Block((self.inputs,), self.target).take(rows)


OUT_OF_MEMORY = {
    "cuda": lambda: torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB"),
    "cpu": lambda: RuntimeError(
        "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried to"
        " allocate 1"
    ),
    "numpy": lambda: MemoryError("Unable to allocate 1.00 TiB"),
    "cublas": lambda: RuntimeError(
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"
    ),
}


@pytest.fixture
def model(device: torch.device) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double().to(device)


def limited(table: Table, room: int, error: Callable[[], Exception]) -> Any:
    """The rows on a machine with memory for `room` of them at a time."""

    def checked(rows: Sequence[int]) -> Block:
        if len(rows) > room:
            raise error()
        return table.take(rows)

    return SimpleNamespace(take=checked)


def stream_of(model: nn.Module, rows: Any, **options: Any) -> Stream:
    objective = Objective(model, F.cross_entropy)
    return Stream(objective.loss, objective.params, rows, **options)


def columns_of(stream: Stream, count: int = ROWS, measures: list[Any] | None = None) -> dict[str, Tensor]:
    """All the columns of a run, whose chunks must follow each other without a gap."""
    chunks = list(stream.run(count, [GradientNorms()] if measures is None else measures))
    assert [0, *(chunk.stop for chunk in chunks)] == [*(chunk.start for chunk in chunks), count]
    return {name: torch.cat([chunk.values[name] for chunk in chunks]) for name in chunks[0].values}


@pytest.mark.parametrize("chunk_size", [1, 3, 32, ROWS, 1000, "auto"])
def test_columns_of_every_chunk_size_are_those_of_one_sample_at_a_time(
    model: nn.Module, device: torch.device, chunk_size: Any
) -> None:
    table = Table()
    found = columns_of(stream_of(model, table, chunk_size=chunk_size))
    inputs, target = table.inputs.double().to(device), table.target.to(device)
    gradients = one_sample_gradients(model, F.cross_entropy, (inputs,), target)
    norms = torch.cat([value.flatten(1) for value in gradients.values()], 1).norm(dim=1)
    losses = F.cross_entropy(model(inputs), target, reduction="none")
    torch.testing.assert_close(found["grad_norm"], norms.cpu(), rtol=1e-10, atol=0)
    torch.testing.assert_close(found["loss"], losses.detach().cpu(), rtol=1e-10, atol=0)


def test_an_automatic_chunk_follows_from_the_first_rows(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = Table()
    stream = stream_of(model, table)
    columns_of(stream)
    assert table.asked == [(0, 8), (0, ROWS)]
    assert stream.chunk_size > ROWS

    monkeypatch.setattr("psgrad.engine.execution.memory.free_memory", lambda device: 20_000)
    scarce = Table()
    columns_of(stream_of(model, scarce))
    sizes = [stop - start for start, stop in scarce.asked]
    assert sizes[0] == 8
    assert 1 <= sizes[1] < ROWS


@pytest.mark.long
@pytest.mark.every(2)
@pytest.mark.parametrize("kind", OUT_OF_MEMORY)
@pytest.mark.parametrize("chunk_size", [20, "auto"])
def test_want_of_memory_halves_the_rows_that_failed_and_changes_nothing_else(
    model: nn.Module, kind: str, chunk_size: Any
) -> None:
    table, said = Table(), list[str]()
    expected = columns_of(stream_of(model, table, chunk_size=ROWS))
    table.asked.clear()
    stream = stream_of(model, limited(table, 6, OUT_OF_MEMORY[kind]), chunk_size=chunk_size, say=said.append)
    torch.testing.assert_close(columns_of(stream), expected, rtol=1e-10, atol=0)
    assert [row for start, stop in table.asked for row in range(start, stop)] == list(range(ROWS))
    assert len(said) == stream.retries
    if chunk_size == 20:
        assert said == [
            "out of memory on rows 0 to 19; trying them in halves",
            "out of memory on rows 0 to 9; trying them in halves",
            "out of memory on rows 10 to 19, again; going on with 5 at a time",
        ]
    else:
        assert said == [
            "out of memory on rows 0 to 7; trying them in halves",
            "out of memory on rows 8 to 15, again; going on with 4 at a time",
        ]


@pytest.mark.long
def test_an_automatic_chunk_is_the_largest_whose_memory_fits(model: nn.Module) -> None:
    table, budget = Table(1000), 40_000
    stream = stream_of(model, table, memory=budget)
    found = columns_of(stream, 1000)

    def way(params: Any, inputs: Any, target: Any) -> Any:
        return per_sample_square_norms(stream.loss, params, inputs, target, in_dims=(0, 0), has_aux=True)

    def takes(size: int) -> int:
        inputs, target = stream.load(range(size))
        return peak_bytes(way, stream.params, inputs, target) + inputs[0].nbytes + target.nbytes

    assert 8 < stream.chunk_size < 1000
    assert table.asked[:2] == [(0, 8), (0, stream.chunk_size)]
    assert takes(stream.chunk_size) <= budget < takes(stream.chunk_size + stream.chunk_size // 10 + 1)
    torch.testing.assert_close(
        found, columns_of(stream_of(model, table, chunk_size=1000), 1000), rtol=1e-10, atol=0
    )


class Room:
    """A loss on a machine with memory for `room(first row)` samples at a time, if the first input says which
    row it is.
    """

    def __init__(
        self, table: Table, room: Callable[[int], int], error: Callable[[], Exception] = OUT_OF_MEMORY["cpu"]
    ) -> None:
        table.inputs[:, 0] = torch.arange(len(table.inputs))
        self.room, self.error = room, error
        self.tried: list[tuple[int, int]] = []

    needs_factors = True

    def columns(self, gradients: PerSampleGradients) -> dict[str, Tensor]:
        rows = gradients.aux["row"]
        self.tried.append((int(rows[0]), int(rows[-1]) + 1))
        if len(rows) > self.room(int(rows[0])):
            raise self.error()
        return {"row": rows}

    def keep(self) -> None:
        pass


def in_a_room(
    model: nn.Module, table: Table, room: Room, chunk_size: int, count: int = ROWS
) -> tuple[Stream, dict[str, Tensor]]:
    """A run whose chunks fail where the room says so."""

    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Any:
            return self.model(x), x[:, 0]

    objective = Objective(
        Looks(),
        lambda output, target: F.cross_entropy(output[0], target),
        lambda output, target: {"row": output[1]},
    )
    stream = Stream(objective.loss, objective.params, table, chunk_size=chunk_size)
    return stream, columns_of(stream, count, [room])


class Counted(Stream):
    """A stream whose pass takes no time: its gradients are the rows."""

    def pass_of(self, how: Any) -> Any:
        return lambda params, inputs, target: inputs[0][:, 0].long()


@given(data=st.data(), count=st.integers(1, 60), chunk_size=st.integers(1, 70))
def test_wherever_memory_runs_out_every_row_is_done_once_and_in_order(
    data: st.DataObject, count: int, chunk_size: int
) -> None:
    """Some rows have room for few beside them, and some failures come and go."""
    room = data.draw(st.lists(st.integers(1, 12), min_size=count, max_size=count))
    passing = data.draw(st.sets(st.integers(0, 10)))
    tried: list[tuple[int, int]] = []
    tries = iter(range(100_000))

    class Rows:
        needs_factors = False

        def columns(self, gradients: Tensor) -> dict[str, Tensor]:
            first, last = int(gradients[0]), int(gradients[-1]) + 1
            tried.append((first, last))
            if last - first > min(room[first:last]) or (next(tries) in passing and last - first > 1):
                raise torch.OutOfMemoryError("CUDA out of memory")
            return {"row": gradients}

        def keep(self) -> None:
            kept.append(tried[-1])

    def read(rows: Sequence[int]) -> Block:
        asked.append((rows[0], rows[-1] + 1))
        return Block((torch.as_tensor(rows).unsqueeze(1),), None)

    kept: list[tuple[int, int]] = []
    asked: list[tuple[int, int]] = []
    stream = Counted(
        lambda *_: None,
        {"w": torch.zeros(1)},
        SimpleNamespace(take=read),
        chunk_size=chunk_size,
        capture="off",
    )  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patched:
        # slow, and nothing to be found
        patched.setattr("psgrad.engine.execution.row_computation.gc.collect", lambda: 0)
        found = columns_of(stream, count, [Rows()])
    assert found["row"].tolist() == list(range(count))
    assert [row for start, stop in asked for row in range(start, stop)] == list(range(count))
    assert [row for start, stop in kept for row in range(start, stop)] == list(range(count))
    assert stream.retries == len(tried) - len(kept)
    assert max(stop - start for start, stop in tried) <= chunk_size


def test_one_chunk_that_fails_leaves_the_next_ones_as_large_as_before(model: nn.Module) -> None:
    table = Table()
    room = Room(table, lambda row: 4 if row == 8 else 100)
    stream, found = in_a_room(model, table, room, 8)
    assert room.tried == [(0, 8), (8, 16), (8, 12), (12, 16), (16, 24), (24, 32), (32, 37)]
    assert found["row"].tolist() == list(range(ROWS))
    assert (stream.chunk_size, stream.retries) == (8, 1)


@pytest.mark.long
def test_a_row_that_fails_alone_has_one_more_try(model: nn.Module) -> None:
    table = Table()
    room = Room(table, lambda row: 1)
    failures = iter([True])
    room.room = lambda row: 0 if row == 5 and next(failures, False) else 1
    stream, found = in_a_room(model, table, room, 1)
    assert found["row"].tolist() == list(range(ROWS))
    assert room.tried[4:8] == [(4, 5), (5, 6), (5, 6), (6, 7)]
    assert stream.retries == 1
    room.room = lambda row: 0 if row == 5 else 1
    with pytest.raises(ModelError, match=r"memory ran out on row 5 alone: .*can't allocate memory"):
        in_a_room(model, table, room, 1)


class Failing:
    """A measure that finds no memory on its first `times` chunks, after the measures before it are
    through.
    """

    needs_factors = False

    def __init__(self, times: int) -> None:
        self.times = times
        self.kept = 0

    def columns(self, gradients: Any) -> dict[str, Tensor]:
        if self.times:
            self.times -= 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return {}

    def keep(self) -> None:
        self.kept += 1


def test_a_chunk_that_is_tried_again_counts_once_in_every_measure(model: nn.Module) -> None:
    table, norms, failing = Table(), GradientNorms(), Failing(2)
    stream = stream_of(model, table, chunk_size=20)
    found = columns_of(stream, measures=[norms, failing])
    assert stream.retries == 2
    assert norms.distributions.found().count == ROWS
    assert failing.kept == 4  # 0 to 4, 5 to 9, 10 to 19, 20 to 36
    expected = GradientNorms()
    torch.testing.assert_close(
        found, columns_of(stream_of(model, table), measures=[expected]), rtol=1e-10, atol=0
    )
    np.testing.assert_allclose(
        norms.distributions.found().mean, expected.distributions.found().mean, rtol=1e-12
    )


@pytest.mark.parametrize("kind", OUT_OF_MEMORY)
def test_a_row_that_is_too_large_by_itself_is_named(model: nn.Module, kind: str) -> None:
    table = Table()

    def read(rows: Sequence[int]) -> Block:
        if rows[-1] > 10:
            raise OUT_OF_MEMORY[kind]()
        return table.take(rows)

    with pytest.raises(ModelError, match="memory ran out on row 11 alone") as failure:
        columns_of(stream_of(model, SimpleNamespace(take=read), chunk_size=4))
    assert "bfloat16" in str(failure.value)
    assert table.asked[-1] == (10, 11)


class Fussy(nn.Module):
    """A lookup that fails beyond its table, as any embedding does."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table(tokens).mean(1)


@pytest.mark.parametrize("chunk_size", [1, 4, 100, "auto"])
def test_the_first_row_on_which_the_model_raises_is_named(chunk_size: Any) -> None:
    tokens = torch.randint(5, (ROWS, 2))
    tokens[[13, 14, 30]] = 7

    rows = Block((tokens,), torch.zeros(ROWS, dtype=torch.int64))
    with pytest.raises(ModelError, match="raised IndexError on row 13: index out of range") as failure:
        columns_of(stream_of(Fussy(), rows, chunk_size=chunk_size))
    assert "int64 [1, 2]" in str(failure.value)
    assert "vocabulary" in str(failure.value)


class StopsTheGpu(Fussy):
    """As a kernel of a GPU does that meets an index out of range: no call works after it."""

    def forward(self, tokens: Tensor) -> Tensor:
        raise RuntimeError("CUDA error: device-side assert triggered")


@pytest.mark.parametrize("chunk_size", [1, 4])
def test_no_row_is_blamed_where_the_gpu_stopped(chunk_size: int) -> None:
    """After it each row fails, also those that are right."""
    tokens = torch.zeros(ROWS, 2, dtype=torch.int64)
    which = "row 0" if chunk_size == 1 else "one of the rows 0 to 3"
    with pytest.raises(ModelError, match=f"the GPU stopped on {which}: CUDA error: device-side") as failure:
        columns_of(stream_of(StopsTheGpu(), Block((tokens,), tokens[:, 0]), chunk_size=chunk_size))
    assert "engine.device: cpu" in str(failure.value)


def test_a_model_that_fails_on_batches_alone_is_told_so() -> None:
    calls = iter(range(1000))

    def loss(output: Tensor, target: Tensor) -> Tensor:
        if next(calls) == 0:
            raise ValueError("not the first time")
        return F.cross_entropy(output, target)

    objective = Objective(nn.Linear(6, 3), loss)
    with pytest.raises(
        ModelError, match="rows 0 to 7 together, though on none of them alone: not the first time"
    ):
        columns_of(Stream(objective.loss, objective.params, Table(), chunk_size=8))


class AsManyTimes(nn.Linear):
    """The layer is applied as often as a row's first input says."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(int(x[0, 0].long())):
            x = super().forward(x).tanh()
        return x


@pytest.mark.parametrize(("lengths", "said"), [(12, True), (4, False)])
def test_many_runs_of_the_loss_for_one_chunk_are_said_once(lengths: int, said: bool) -> None:
    table, words = Table(), []
    table.inputs[:, 0] = torch.arange(ROWS) % lengths + 1
    stream = stream_of(AsManyTimes(6, 6), table, chunk_size=ROWS, say=words.append)
    list(stream.run(ROWS, [GradientNorms()]))
    list(stream.run(ROWS, [GradientNorms()]))
    assert len(words) == int(said)
    assert not said or words[0].startswith(
        f"the loss ran 13 times for a chunk of {ROWS} rows, as they disagree"
    )


def test_rows_from_anywhere_at_once(model: nn.Module) -> None:
    table = Table()
    grads = stream_of(model, table).gradients([5, 0, 36])
    assert isinstance(grads, PerSampleGradients)
    every = columns_of(stream_of(model, table))
    torch.testing.assert_close(
        grads.square_norms().sqrt().cpu(), every["grad_norm"][[5, 0, 36]], rtol=1e-10, atol=0
    )


def test_inputs_take_the_parameters_dtype_and_whole_numbers_stay_whole() -> None:
    seen = []

    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, 3)

        def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
            seen.append((x.dtype, tokens.dtype))
            return self.table(tokens).mean(1) * x.sum()

    inputs = torch.randn(ROWS, 2), torch.randint(5, (ROWS, 2))
    rows = Block(inputs, torch.zeros(ROWS, dtype=torch.int64))
    columns_of(stream_of(Looks().bfloat16(), rows, chunk_size=10))
    assert set(seen) == {(torch.bfloat16, torch.int64)}


# -- More rows than fit --------------------------------------------------------------------------------------

WIDTH = 2048


def generated(largest: list[int]) -> Any:
    """Rows that exist only while somebody looks at them; numpy's, as tracemalloc counts those."""

    def read(rows: Sequence[int]) -> Block:
        largest.append(len(rows))
        made = np.random.default_rng(rows[0]).standard_normal((len(rows), WIDTH), dtype=np.float32)
        return Block((torch.from_numpy(made),), torch.zeros(len(rows), dtype=torch.int64))

    return SimpleNamespace(take=read)


@pytest.fixture
def _traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.long
@pytest.mark.usefixtures("_traced")
def test_memory_does_not_grow_with_the_dataset(device: torch.device) -> None:
    model, peaks = nn.Linear(WIDTH, 3).to(device), []
    for count in (640, 6400):  # both have chunks that are recorded and replayed
        sizes: list[int] = []
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        for _ in stream_of(model, generated(sizes), chunk_size=64).run(count, [GradientNorms()]):
            pass
        peaks.append(tracemalloc.get_traced_memory()[1] - before)
        assert max(sizes) == 64
    chunk = 64 * WIDTH * 4
    assert chunk < peaks[0]
    assert peaks[1] < peaks[0] + chunk


def test_settled_chunk_size_is_not_that_of_the_rows_it_was_found_by(model: nn.Module) -> None:
    """Of 5,000 rows eight are read, and a chunk may have a thousand."""
    table, objective = Table(), Objective(model, F.cross_entropy)
    table.inputs = table.inputs.double()
    stream = Stream(objective.loss, objective.params, table)
    stream.choose_chunk_size(5000)
    assert stream.chunk_size == 1024
    assert max(stop for _, stop in table.asked) <= 8
