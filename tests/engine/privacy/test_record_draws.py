"""Random draws by (record, step): what a record adds to the clipped sum is the same in any company, in any
chunk and however often it is computed, so that neighbouring batches' sums are within the sensitivity of each
other.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from psgrad.engine.execution.objective import Objective
from psgrad.engine.execution.streaming import Stream
from psgrad.engine.privacy import batches, clipped_sums
from psgrad.engine.privacy.batches import RecordStreams, batch_source
from psgrad.engine.privacy.clipping import Clipping
from psgrad.engine.privacy.generators import make_generator
from psgrad.engine.privacy.record_draws import RecordDraws
from psgrad.engine.privacy.records import RecordReader, Records, RowNumbers
from psgrad.errors import ModelError, TransformError
from psgrad.ragged import Block
from tests.engine.privacy.drawing_models import CLASSES, FEATURES, MODELS
from tests.engine.privacy.test_records import taking

BOUND = 0.01
UNITS = np.array([0, 0, 0, 1, 2, 2, 3])
ROWS = len(UNITS)
SEEDED = make_generator("aes", seed=7)
DRAWS = RecordDraws(SEEDED)
KINDS = ["rows", "units", "copies"]
# By default each model with records of one kind; all of them take a minute.
PAIRS = [
    pytest.param(
        name, kind, marks=() if kind == KINDS[place % 3] and name != "LayerDrop" else pytest.mark.sweep
    )
    for place, name in enumerate(MODELS)
    for kind in KINDS
]


def jittered(x: Tensor) -> Tensor:
    """An augmentation that draws from all three generators."""
    return x * random.uniform(0.5, 1.5) + torch.randn(FEATURES) * float(np.random.rand())


class Run:
    """A model and records, and the clipped sums of batches of them."""

    def __init__(self, kind: str, name: str = "Dropout", draws: RecordDraws | None = DRAWS) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = MODELS[name]().double()
            self.x, self.y = torch.randn(ROWS, FEATURES, dtype=torch.float64), torch.randint(CLASSES, (ROWS,))
        self.objective = Objective(self.model, F.cross_entropy)
        self.clipping = Clipping.flat(self.objective.params, BOUND)
        self.records = Records.of_rows(ROWS) if kind == "rows" else Records.of_units(UNITS)
        self.options: dict[str, Any] = {"draws": draws}
        self.stream_options: dict[str, Any] = {}
        if kind == "copies":
            self.options |= {"augment": jittered, "copies": 2}

    def streams(self, chunk_size: Any = 100) -> RecordStreams:
        def make(loss: Callable[..., Any], read: Any) -> Stream:
            return Stream(
                loss,
                self.objective.params,
                read,
                chunk_size=chunk_size,
                randomness="different",
                **self.stream_options,
            )

        take = taking((self.x,), self.y)
        return RecordStreams(
            self.records,
            take,
            self.objective.loss,
            self.objective.params,
            make,
            randomness="different",
            **self.options,
        )

    def sum(self, batch: Sequence[int], step: int = 0, chunk_size: Any = 100) -> Tensor:
        """The clipped sum, as one row."""
        sums = self.streams(chunk_size).source(list(batch), step)(self.clipping).sums
        return torch.cat([sums[name].flatten() for name in self.objective.params])


@contextmanager
def computed_again(second_pass: bool, alone: int | None) -> Iterator[None]:
    """Clipped sums are computed in a second pass, and of so many records one is computed again, by itself."""
    with pytest.MonkeyPatch.context() as patch:
        if second_pass:
            patch.setattr(batches, "Clipper", partial(clipped_sums.Clipper, memory=0))
        if alone is not None:
            patch.setattr(
                clipped_sums._ClippedNorms,
                "cancelling",
                lambda self, absolute: torch.arange(self.norms.shape[1]) % alone == 0,
            )
        yield


@contextmanager
def memory_for(rows: int) -> Iterator[None]:
    """Where more records than that are computed together, memory runs out."""
    plain = clipped_sums.Clipper.__call__

    def computed(self: Any, loss: Any, params: Any, *batch: Any, **options: Any) -> Any:
        result = plain(self, loss, params, *batch, **options)
        if len(result.records.norms) > rows:
            raise torch.OutOfMemoryError("planted")
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clipped_sums.Clipper, "__call__", computed)
        yield


def seeded_anew() -> None:
    """The global generators are somewhere else, and have drawn since they were seeded, as those of a process
    that made a model have.
    """
    torch.seed()
    np.random.seed()
    random.seed()
    torch.rand(3)


# -- What a record adds --------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.every(3)
@pytest.mark.parametrize(("name", "kind"), PAIRS)
def test_record_draws_sum_equals_single_records(name: str, kind: str) -> None:
    run = Run(kind, name)
    everybody = range(4)
    alone = torch.stack([run.sum([record]) for record in everybody])
    assert torch.allclose(alone.norm(dim=1), torch.tensor(BOUND, dtype=torch.float64), rtol=1e-4)
    seeded_anew()
    for chunk_size, second_pass, alone_of in ((100, False, None), (2, True, None), (100, False, 2)):
        with computed_again(second_pass, alone_of):
            torch.testing.assert_close(
                run.sum(everybody, chunk_size=chunk_size), alone.sum(0), rtol=0, atol=1e-9
            )
    with memory_for(1):
        torch.testing.assert_close(run.sum(everybody), alone.sum(0), rtol=0, atol=1e-9)


@pytest.mark.sweep
@given(data=st.data())
def test_record_draws_sensitivity_of_neighbours(data: st.DataObject) -> None:
    run = Run(data.draw(st.sampled_from(KINDS)), data.draw(st.sampled_from(list(MODELS))))
    step, everybody = data.draw(st.integers(0, 10**9)), st.integers(0, len(run.records) - 1)
    batch = data.draw(st.lists(everybody, min_size=1, max_size=5, unique=True))
    gone = data.draw(st.sampled_from(batch))
    other = data.draw(everybody.filter(lambda record: record not in batch) | st.none())
    rest = [record for record in batch if record != gone]
    replaced = [record if record != gone else other for record in batch]

    def somehow(batch: Sequence[Any]) -> Tensor:
        seeded_anew()
        with computed_again(data.draw(st.booleans()), data.draw(st.none() | st.integers(1, 3))):
            return run.sum(batch, step, chunk_size=data.draw(st.integers(1, 6)))

    first = somehow(batch)
    assert (first - somehow(rest)).norm() <= BOUND * (1 + 1e-9)
    if other is not None:
        assert (first - somehow(replaced)).norm() <= 2 * BOUND * (1 + 1e-9)


@pytest.mark.every(3)
@pytest.mark.parametrize("name", MODELS)
def test_record_draws_differ_by_record_step_and_key(name: str) -> None:
    """Rows that hold the same numbers: what differs is what they draw."""
    run = Run("rows", name)
    run.x[:], run.y[:] = run.x[0], run.y[0]
    sums = [run.sum([0]), run.sum([0], step=1), Run("rows", name, RecordDraws(SEEDED)).sum([0]), run.sum([1])]
    for place, one in enumerate(sums):
        assert all((one - other).norm() > 1e-6 for other in sums[:place])


def test_record_draws_of_rows_and_copies() -> None:
    run = Run("units")
    run.x[:], run.y[:] = run.x[0], run.y[0]
    run.clipping = Clipping.flat(run.objective.params, 1e9)
    three, one = run.sum([0]), run.sum([3])
    assert (three - one).norm() > 1e-3
    reader = RecordReader(
        Records.of_rows(2), taking((run.x,), run.y), augment=jittered, copies=3, draws=DRAWS
    )
    reader.draw([0, 1])
    copies = reader(0, 2).inputs[0].flatten(0, 1)
    assert len(copies.unique(dim=0)) == 6


def test_record_draws_of_batch_in_memory() -> None:
    run = Run("rows")
    params = run.objective.params

    def summed(which: list[int], step: int = 0, **options: Any) -> Tensor:
        options = {"draws": DRAWS.at(step), "records": which, "randomness": "different"} | options
        sums = batch_source(
            run.objective.loss, params, (run.x[which],), run.y[which], has_aux=True, **options
        )(run.clipping).sums
        return torch.cat([sums[name].flatten() for name in params])

    torch.testing.assert_close(summed([3, 1, 6]), run.sum([1, 3, 6]), rtol=0, atol=1e-12)
    torch.testing.assert_close(summed([3, 1, 6], 5, memory=0.0), run.sum([6, 1, 3], 5), rtol=0, atol=1e-12)
    assert not summed([]).any()
    with pytest.raises(ValueError, match="draws go with the numbers of the records"):
        summed([1], records=None)
    with pytest.raises(ValueError, match="not with randomness='same'"):
        summed([1], randomness="same")


@pytest.mark.long
@pytest.mark.every(3)
@pytest.mark.parametrize("name", ["Noise", "AttentionDropout", "Recurrent"])
def test_record_draws_predicted_memory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(self: Stream, gradients: Any) -> None:
        raise AssertionError("the pass could not be followed without running it")

    monkeypatch.setattr(Stream, "_size_chunks", measured)
    run = Run("units", name)
    run.stream_options = {"memory": 10**7}
    result = run.sum(range(4), chunk_size="auto")
    torch.testing.assert_close(result, Run("units", name).sum(range(4)), rtol=0, atol=1e-9)


# -- How often a draw comes out ------------------------------------------------------------------------------


class OneWeight(nn.Module):
    """A weight whose gradient is 0 where its mask is, and the input where it is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.w, 0.5) * x


@pytest.mark.long
def test_record_draws_mask_frequency_of_recomputed_records(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Records too large for a common sum whenever they are kept: by themselves they draw the same again."""
    x, count, steps = torch.full((4, 1), 1e30), 4, 60
    objective = Objective(OneWeight(), lambda output, target: output.sum())
    kept, again = 0, 0
    plain = clipped_sums._alone

    def alone(*rest: Any) -> Any:
        nonlocal again
        again += 1
        return plain(*rest)

    monkeypatch.setattr(clipped_sums, "_alone", alone)
    clipping = Clipping.flat(objective.params, 1e-3)
    for step in range(steps):
        result = batch_source(
            objective.loss,
            objective.params,
            (x,),
            None,
            in_dims=(0, None),
            has_aux=True,
            randomness="different",
            draws=DRAWS.at(step),
            records=range(count),
        )(clipping)
        kept += int((result.records.norms != 0).sum())
    assert again == kept > 0
    assert (
        abs(kept / (steps * count) - 0.5) < 4.5 * 0.5 / (steps * count) ** 0.5
    )  # beyond it once in 100,000 by chance


# -- Datasets and augmentations ------------------------------------------------------------------------------


class DrawingDataset:
    """Rows that are changed at random as they are read."""

    def __init__(self) -> None:
        self.reads = 0

    def __call__(self, rows: RowNumbers) -> Block:
        self.reads += 1
        made = [
            torch.full((2,), float(row)) + torch.rand(2) + np.random.rand() + random.random() for row in rows
        ]
        return Block((torch.stack(made),), torch.from_numpy(rows))


@pytest.mark.parametrize("augmented", [False, True])
def test_record_draws_reading_by_record_and_step(augmented: bool) -> None:
    options: dict[str, Any] = (
        {"augment": lambda x: x * torch.rand(2) + random.random(), "copies": 2} if augmented else {}
    )
    dataset = DrawingDataset()
    reader = RecordReader(Records.of_units(UNITS), dataset, draws=DRAWS, width=8, **options)
    reader.draw([0, 1, 2, 3], step=3)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    together = reader(0, 4)
    after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    for place, record in enumerate(reader.drawn):
        seeded_anew()
        alone = RecordReader(Records.of_units(UNITS), DrawingDataset(), draws=DRAWS, width=8, **options)
        alone.draw([record], step=3)
        for one, all_of_them in zip(alone(0, 1).inputs, together.inputs, strict=True):
            assert torch.equal(one[0], all_of_them[place])
    x = reader(0, 4).inputs[0]
    reader.draw([0, 1, 2, 3], step=4)
    assert not (x == reader(0, 4).inputs[0]).any()


def test_record_draws_deterministic_dataset_read_at_once() -> None:
    class Counted(DrawingDataset):
        def __call__(self, rows: RowNumbers) -> Block:
            self.reads += 1
            return Block((torch.from_numpy(rows).float(),), None)

    dataset = Counted()
    reader = RecordReader(Records.of_rows(20), dataset, draws=DRAWS)
    reader.draw(range(20))
    reader(0, 12)
    reader(12, 20)
    assert dataset.reads == 2


# -- The generators around -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Noise", "SeedsItself", "OutsideOfTorch"])
def test_record_draws_leave_global_generators(name: str) -> None:
    run = Run("copies", name)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    run.sum([0, 1, 2], chunk_size=2)
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (np.random.get_state()[1].tolist(), random.getstate())


DRAWN: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "rand": lambda x: x + torch.rand(3, dtype=x.dtype),
    "randn_like": lambda x: x + torch.randn_like(x),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.5)),
    "normal_ in place": lambda x: x + torch.empty(3, dtype=x.dtype).normal_(),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "attention": lambda x: F.scaled_dot_product_attention(*[x.reshape(1, 3, 1)] * 3, dropout_p=0.3).flatten(),
    "permutation": lambda x: x[torch.randperm(3)],
}


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize("randomness", ["different", "same"])
@pytest.mark.parametrize("kind", ["batch", "stream"])
def test_record_draws_required_for_random_loss(name: str, randomness: str, kind: str) -> None:
    """Else the sum has no bound, and nothing says so."""
    params, rows = {"w": torch.ones(3, dtype=torch.float64)}, torch.randn(4, 3, dtype=torch.float64)

    def loss(params: dict[str, Tensor], inputs: tuple[Tensor, ...], target: None = None) -> Any:
        return (params["w"] * DRAWN[name](inputs[0])).sum().sin(), {}

    clipping = Clipping.flat(params, BOUND)
    if kind == "batch":
        summed = batch_source(loss, params, (rows,), has_aux=True, randomness=randomness)
    else:
        stream = Stream(
            loss,
            params,
            lambda start, stop: Block((rows[start:stop],), None),
            randomness=randomness,
            chunk_size=2,
        )
        summed = batches.stream_source(stream, 4)
    before = torch.get_rng_state()
    with pytest.raises(ModelError, match="random numbers") as caught:
        summed(clipping)
    error = caught.value
    assert "the records have no draws of their own" in error.arrived
    assert error.expected is not None
    assert error.cause is not None
    assert "draws=RecordDraws(generator).at(step)" in str(error.next_step)
    torch.set_rng_state(before)


def test_record_draws_not_required_without_randomness() -> None:
    """Whatever the randomness says: attention without dropout, a model in evaluation mode."""
    params, rows = {"w": torch.ones(3, dtype=torch.float64)}, torch.randn(4, 3, dtype=torch.float64)
    quiet = nn.Sequential(nn.Dropout(0.5), nn.RReLU()).eval()

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        return (
            params["w"] * quiet(F.scaled_dot_product_attention(*[x.reshape(1, 3, 1)] * 3).flatten())
        ).sum()

    sums = [
        batch_source(loss, params, rows, randomness=how)(Clipping.flat(params, BOUND)).sums["w"]
        for how in ("error", "different")
    ]
    assert torch.equal(*sums)


def test_record_draws_required_for_random_reading() -> None:
    """An augmentation without them: what a record becomes depends on its place."""
    params, rows = {"w": torch.ones(3, dtype=torch.float64)}, torch.randn(4, 3, dtype=torch.float64)

    def read(start: int, stop: int) -> Block:
        return Block((rows[start:stop] + torch.rand(3, dtype=torch.float64),), None)

    stream = Stream(lambda params, inputs, target: ((params["w"] * inputs[0]).sum(), {}), params, read)
    with pytest.raises(ModelError, match="while a batch was read and summed"):
        batches.stream_source(stream, 4)(Clipping.flat(params, BOUND))


@torch.library.custom_op("psgrad_tests::shaken", mutates_args=())
def shaken(x: Tensor) -> Tensor:
    """Draws from a generator that psgrad does not watch."""
    return x + torch.rand_like(x)


@shaken.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_record_draws_unlabelled_random_operator_refused() -> None:
    run = Run("rows")
    run.model.inside = lambda x: x + torch.ops.psgrad_tests.shaken(torch.ones(8).double())  # type: ignore[method-assign]
    with pytest.raises(ModelError, match="by an operator that PyTorch doesn't say of that it draws"):
        run.sum([0, 1], chunk_size=1)


def test_record_draws_own_generator_refused() -> None:
    run, own = Run("rows"), torch.Generator()
    run.model.inside = lambda x: x + torch.rand(8, generator=own)  # type: ignore[method-assign]
    with pytest.raises(
        (ModelError, TransformError), match=r"aten::rand\.generator draws from a generator of its own"
    ):
        run.sum([0, 1])
