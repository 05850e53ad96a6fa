"""Chunks replayed from a record: the same numbers as each chunk by itself gives, whatever happens on
the way.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from psgrad.data.rows import Block
from psgrad.engine.execution import chunk_replay
from psgrad.engine.execution.chunk_replay import NOT_REPLAYED, PAYS_FROM
from psgrad.engine.execution.objective import Objective
from psgrad.engine.execution.streaming import Stream
from psgrad.engine.gradients import per_sample_square_norms
from psgrad.engine.measures.builtin.norms import GradientNorms
from psgrad.engine.transforms.capture import agree

ROWS = 50


class Tied(nn.Module):
    """A table that is looked up and multiplied with."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 5)
        self.mix = nn.Linear(5, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        return (torch.tanh(self.mix(self.table(tokens))) @ self.table.weight.t()).sum(1)


def perceptron(dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Dropout(dropout), nn.Linear(5, 3))


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, 3)),
        nn.Conv2d(1, 4, 2),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8, 3),
    ).eval()


def vectors() -> Block:
    torch.manual_seed(1)
    return Block((torch.randn(ROWS, 6),), torch.randint(3, (ROWS,)))


def tokens() -> Block:
    torch.manual_seed(1)
    return Block((torch.randint(7, (ROWS, 4)),), torch.randint(7, (ROWS,)))


class Cells(nn.Module):
    """A matrix that is used twice: the square norm of its gradient is computed in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(3, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x.unflatten(-1, (2, 3))).sum(-2)


class Factors(GradientNorms):
    """The norms, and a sum that only factors give."""

    needs_factors = True

    def columns(self, gradients: Any) -> dict[str, Tensor]:
        direction = {name: torch.ones(shape) for name, shape in gradients.shapes.items()}
        return {**super().columns(gradients), "sum": gradients.dot(direction)}


class Run:
    """A dataset's columns, with the stream that made them and what it said."""

    def __init__(
        self,
        model: nn.Module,
        rows: Block,
        measure: Any = None,
        *,
        loss: Any = F.cross_entropy,
        **options: Any,
    ) -> None:
        self.said: list[str] = []
        objective = Objective(model, loss)
        self.stream = Stream(objective.loss, objective.params, rows, say=self.said.append, **options)
        torch.manual_seed(7)
        chunks = list(self.stream.run(ROWS, [measure or GradientNorms()]))
        self.columns = {
            name: torch.cat([chunk.values[name] for chunk in chunks]) for name in chunks[0].values
        }

    @property
    def replayed(self) -> int:
        return self.stream.counts.replayed

    @property
    def reasons(self) -> list[str]:
        return self.stream.counts.reasons


def both(model: nn.Module, rows: Block, measure: Any = GradientNorms, **options: Any) -> tuple[Run, Run]:
    """The run, which must have the numbers of one without replays."""
    run, plain = Run(model, rows, measure(), **options), Run(model, rows, measure(), capture="off", **options)
    torch.testing.assert_close(run.columns, plain.columns, rtol=1e-6, atol=0)
    assert plain.replayed == 0
    return run, plain


@pytest.mark.long
@pytest.mark.every(2)
@pytest.mark.parametrize("measure", [GradientNorms, Factors])
@pytest.mark.parametrize("chunk_size", [1, 3, 8])
@pytest.mark.parametrize(("build", "rows"), [(perceptron, vectors), (convolutional, vectors), (Tied, tokens)])
def test_replayed_chunks_have_the_same_numbers(build: Any, rows: Any, chunk_size: int, measure: Any) -> None:
    torch.manual_seed(0)
    run, _ = both(build(), rows(), measure, chunk_size=chunk_size)
    assert run.replayed == ROWS // chunk_size - NOT_REPLAYED
    assert run.stream.counts.facts() == {
        "chunks": -(-ROWS // chunk_size),
        "chunks_replayed": run.replayed,
        "replayed_by": "kernel by kernel",
        "not_replayed": None,
    }
    assert not run.said


@pytest.mark.long
@pytest.mark.parametrize("measure", [GradientNorms, Factors])
def test_dropout_draws_what_it_would_have_drawn(measure: Any) -> None:
    run, plain = both(
        perceptron(dropout=0.5).train(), vectors(), measure, chunk_size=4, randomness="different"
    )
    assert run.replayed == ROWS // 4 - NOT_REPLAYED
    assert torch.equal(run.columns["loss"], plain.columns["loss"])


@pytest.mark.parametrize("start", [21, 42, 49])
@pytest.mark.parametrize(("build", "rows"), [(perceptron, vectors), (convolutional, vectors), (Tied, tokens)])
def test_a_run_that_goes_on_has_the_bits_of_the_whole_run(build: Any, rows: Any, start: int) -> None:
    """Also of its last chunk, of one row: there may be no program yet."""
    torch.manual_seed(0)
    model = build()
    whole = Run(model, rows(), chunk_size=7)
    plain = Run(model, rows(), chunk_size=7, capture="off")
    later = list(plain.stream.run(ROWS, [GradientNorms()], start=start))
    rest = list(whole.stream.run(ROWS, [GradientNorms()], start=start))
    assert whole.replayed
    for name, values in whole.columns.items():
        for chunks in (later, rest):
            assert torch.equal(values[start:], torch.cat([chunk.values[name] for chunk in chunks])), name


def test_chunks_that_come_one_by_one_are_recorded_once_many_came() -> None:
    run, _ = both(perceptron(), vectors(), chunk_size=50)
    assert run.replayed == 0
    run.stream.fix_chunk_size(4)
    for start in range(0, 48, 4):
        list(run.stream.run(start + 4, [GradientNorms()], start=start))
    assert run.replayed == 12 - PAYS_FROM - (NOT_REPLAYED - 1)


@pytest.mark.parametrize(("chunk_size", "replayed"), [(10, 2), (12, 0)])
def test_few_chunks_are_not_recorded(chunk_size: int, replayed: int) -> None:
    run, _ = both(perceptron(), vectors(), chunk_size=chunk_size)
    assert run.replayed == replayed


@pytest.mark.parametrize("row", [5, 20, 49])
def test_what_is_in_doubt_is_taken_again(row: int) -> None:
    rows = vectors()
    rows.inputs[0][row] *= 1e-25  # the square of its gradient is no float32
    model = Cells()
    run, _ = both(model, rows, chunk_size=5)
    assert run.columns["grad_norm"][row] > 0
    assert run.replayed == ROWS // 5 - NOT_REPLAYED - (row != 5)  # row 5 is in the recorded chunk


def test_flags_in_many_chunks_end_the_replay() -> None:
    rows = vectors()
    rows.inputs[0][20::5] *= 1e-25
    run, _ = both(Cells(), rows, chunk_size=5)
    used = run.stream.replays[per_sample_square_norms]
    assert (run.replayed, used._captured.flags) == (1, 3)  # the last three chunks run once
    assert run.reasons == ["sums that cancel are computed again in too many chunks"]


class Weighted(nn.Linear):
    """A model that reads the largest number of a chunk."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * float(x.detach().amax())


def test_values_that_differ_from_chunk_to_chunk_are_a_reason() -> None:
    run = Run(Weighted(6, 3), vectors(), chunk_size=1)
    assert run.replayed == 0
    assert run.reasons == ["values that it reads differ from chunk to chunk"]


def test_a_doubt_does_not_change_what_is_drawn_later() -> None:
    rows = vectors()
    rows.inputs[0][22] *= 1e-25
    model = nn.Sequential(Cells(), nn.Dropout(0.3)).train()
    run, _ = both(model, rows, chunk_size=4, randomness="different")
    assert run.replayed == ROWS // 4 - NOT_REPLAYED - 1


class Masked(nn.Module):
    """A model that reads whether a chunk has negative rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x if bool((x[..., 0] > -1e3).all()) else x.clamp(min=0))


def test_a_chunk_that_takes_another_branch_is_computed_again() -> None:
    rows = vectors()
    rows.inputs[0][31, 0] = -1e4
    run, _ = both(Masked(), rows, chunk_size=4)
    assert run.replayed == ROWS // 4 - NOT_REPLAYED - 1


def test_a_model_whose_shapes_depend_on_data_is_not_replayed_for_that_reason() -> None:
    class Selecting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + x[0][x[0] == x[0]].sum() * 0

    rows = vectors()
    run = Run(Selecting(6, 3), rows, chunk_size=4, loss=F.cross_entropy)
    assert run.replayed == 0
    assert not run.said
    (why,) = run.reasons
    assert why.startswith("its operators depend on data, by aten.")
    assert run.stream.counts.facts()["not_replayed"] == why


class Scheduled(nn.Module):
    """A model that is another one after its third call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return self.layer(x) * self.calls


@pytest.mark.long
def test_a_model_that_keeps_a_state_is_not_replayed() -> None:
    run = Run(Scheduled(), vectors(), chunk_size=4)
    assert run.replayed == 0
    assert len(run.reasons) == 1
    model = Scheduled()
    Run(model, vectors(), chunk_size=4)
    assert float(model.calls) == ROWS // 4 + 1  # type: ignore[arg-type]


@pytest.mark.long
def test_a_record_that_gives_other_numbers_is_thrown_away(monkeypatch: pytest.MonkeyPatch) -> None:
    # one that draws as it likes, too
    monkeypatch.setitem(agree.__globals__, "agree", lambda found, again, rounding: bool(torch.rand(()) < 0))
    run, _ = both(perceptron(dropout=0.3).train(), vectors(), chunk_size=4, randomness="different")
    assert run.replayed == 0
    assert len(run.reasons) == 1
    assert "the program gave other numbers" in run.reasons[0]


def test_agreement_is_of_all_numbers() -> None:
    one = {"a": torch.tensor([1.0, 2.0, float("nan")]), "b": (torch.tensor([3]), "gram")}
    assert agree(one, {"a": one["a"] * (1 + 1e-6), "b": (torch.tensor([3]), "gram")}, 1e-3)
    assert not agree(one, {"a": one["a"] * 1.01, "b": one["b"]}, 1e-3)
    assert not agree(one, {"a": one["a"], "b": (torch.tensor([4]), "gram")}, 1e-3)
    assert not agree(one, {"a": one["a"].nan_to_num(), "b": one["b"]}, 1e-3)


@pytest.mark.long
def test_want_of_memory_in_a_replay_halves_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    class Short(chunk_replay.ChunkReplay):
        calls = 0

        def __call__(self, *args: Any) -> Any:
            self.calls += 1
            if self.calls == 5:
                assert self.chunks == 1
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().__call__(*args)

    monkeypatch.setattr("psgrad.engine.execution.streaming.ChunkReplay", Short)
    run, _ = both(perceptron(), vectors(), chunk_size=6)
    assert run.said == ["out of memory on rows 24 to 29; trying them in halves"]
    assert run.replayed == 1  # a program holds memory: it is given back, and too few chunks are left


def test_a_loss_that_looks_at_trainable_weights_is_replayed() -> None:
    model = nn.Linear(6, 3)
    weight = model.weight

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target) * (1 + weight.detach().square().sum())

    run, _ = both(model, vectors(), chunk_size=5, loss=loss)
    assert not run.reasons
    assert run.replayed == ROWS // 5 - NOT_REPLAYED
