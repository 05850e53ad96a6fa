"""Coins of private steps: secret, of each record's own place, and the same where a chunk runs again."""

from __future__ import annotations

import random
from collections import deque
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import scipy.stats
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from psgrad.data.rows import Block
from psgrad.engine.execution.objective import Objective
from psgrad.engine.execution.streaming import Stream
from psgrad.engine.privacy.batches import ClippedSum, RecordStreams, batch_source
from psgrad.engine.privacy.clipping import Clipping
from psgrad.engine.privacy.coins import Coins, generators_of
from psgrad.engine.privacy.generators import make_generator
from psgrad.engine.privacy.records import Records
from psgrad.engine.privacy.sum_programs import SumPrograms
from psgrad.errors import ModelError
from tests.engine.privacy.drawing_models import CLASSES, FEATURES, MODELS

RECORDS = 8
SHARED = ("OutsideOfTorch", "OnlyOutsideOfTorch", "OwnOutsideOfTorch")
OF_PYTORCH = [name for name in MODELS if name not in (*SHARED, "SeedsItself")]


def secret(seed: int = 5, *roots: object) -> Coins:
    return Coins(make_generator(seed=seed), *roots)


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]()


def rows(seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(RECORDS, FEATURES, generator=generator)
    return inputs, torch.randint(CLASSES, (RECORDS,), generator=generator)


def summed(model: nn.Module, inputs: Tensor, target: Tensor, coins: Coins, **options: Any) -> ClippedSum:
    objective = Objective(model, F.cross_entropy)
    source = batch_source(
        objective.loss,
        objective.params,
        (inputs,),
        target,
        has_aux=True,
        randomness="different",
        coins=coins,
        **options,
    )
    return source(Clipping.flat(objective.params, 0.3))


@pytest.mark.parametrize("name", OF_PYTORCH)
def test_coins_of_a_record_do_not_depend_on_other_records(name: str) -> None:
    """With the same secret, another record at one place changes no other record's loss and norm."""
    inputs, target = rows()
    other = inputs.clone()
    other[3] *= -2.0
    model = built(name)
    one, two = (summed(model, x, target, secret()).records for x in (inputs, other))
    same = torch.arange(RECORDS) != 3
    torch.testing.assert_close(one.losses[same], two.losses[same], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(one.norms[same], two.norms[same], rtol=1e-4, atol=1e-6)
    assert one.losses[3] != two.losses[3]


@pytest.mark.parametrize("name", OF_PYTORCH)
def test_coins_differ_by_place_and_by_chunk(name: str) -> None:
    inputs = rows()[0][:1].expand(RECORDS, FEATURES)
    found = summed(built(name), inputs, torch.zeros(RECORDS, dtype=torch.long), secret(), samples=4)
    assert len(found.records.norms.unique()) > RECORDS // 2


@pytest.mark.parametrize("name", OF_PYTORCH)
def test_coins_are_the_secret_streams_and_leave_other_generators_alone(name: str) -> None:
    model, batch = built(name), rows()
    found = []
    for known, seed in ((0, 5), (1, 5), (0, 6)):
        torch.manual_seed(known)
        before = torch.get_rng_state(), random.getstate()
        found.append(summed(model, *batch, secret(seed)).records.norms)
        assert torch.equal(torch.get_rng_state(), before[0])
        assert random.getstate() == before[1]
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


@pytest.mark.parametrize("name", SHARED)
def test_coins_that_records_share_are_refused_unless_records_are_alone(name: str) -> None:
    model, batch = built(name), rows()
    with pytest.raises(ModelError, match="the records of a chunk share such a number"):
        summed(model, *batch, secret(5, model))
    alone = summed(model, *batch, secret(5, model), samples=1).records.losses
    changed = batch[0].clone()
    changed[3] *= -2.0
    other = summed(model, changed, batch[1], secret(5, model), samples=1).records.losses
    assert torch.equal(alone[:3], other[:3])
    assert torch.equal(alone[4:], other[4:])


class Seeding(nn.Module):
    """A model that seeds PyTorch's generator before it draws, and may put its state back."""

    def __init__(self, seed: Any, put_back: bool) -> None:
        super().__init__()
        self.last, self.seed, self.put_back = nn.Linear(FEATURES, CLASSES), seed, put_back

    def forward(self, x: Tensor) -> Tensor:
        before = torch.get_rng_state()
        self.seed()
        x = F.dropout(x, 0.5)
        if self.put_back:
            torch.set_rng_state(before)
        return self.last(x)  # type: ignore[no-any-return]


SEEDS = {
    "manual_seed": lambda: torch.manual_seed(0),
    "of the generator": lambda: torch.default_generator.manual_seed(0),
    "set_rng_state": lambda: torch.set_rng_state(torch.Generator().manual_seed(0).get_state()),
}


@pytest.mark.parametrize("seed", SEEDS.values(), ids=SEEDS)
@pytest.mark.parametrize("put_back", [False, True])
def test_coins_of_a_model_that_seeds_pytorch_are_refused(seed: Any, put_back: bool) -> None:
    with pytest.raises(ModelError, match="seeds PyTorch's random generator while records are computed"):
        summed(Seeding(seed, put_back), *rows(), secret())


class WithGenerator(nn.Module):
    """A model that draws from a generator in an attribute, or from a new one, and may seed it first."""

    def __init__(self, kept: bool, seeds: bool) -> None:
        super().__init__()
        self.last, self.seeds = nn.Linear(FEATURES, CLASSES), seeds
        self.generator = torch.Generator() if kept else None

    def forward(self, x: Tensor) -> Tensor:
        generator = self.generator or torch.Generator()
        if self.seeds:
            generator.manual_seed(0)
        return self.last(x * torch.rand(FEATURES, generator=generator))  # type: ignore[no-any-return]


def test_coins_of_a_generator_that_the_model_seeds_or_makes_are_refused() -> None:
    """Its numbers would be those of a record's place, and the same in each chunk."""
    for kept, seeds in ((True, True), (False, True), (False, False)):
        model = WithGenerator(kept, seeds)
        with pytest.raises(ModelError, match="or draws from one that it has made there"):
            summed(model, *rows(), Coins(make_generator(seed=5), model))
    model = WithGenerator(kept=True, seeds=False)
    assert len(summed(model, *rows(), Coins(make_generator(seed=5), model)).records.norms) == RECORDS


class Drop(nn.Module):
    """A model that is zero for half of the records, by a drawn branch."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x) * 0.0 if torch.rand([]) < 0.5 else self.last(x)  # type: ignore[no-any-return]


def test_coins_of_records_that_disagree_on_a_drawn_branch_stay() -> None:
    """Whether a chunk runs again depends on all records' coins: new ones would be of another distribution."""
    coins = secret()
    with coins.seeded():
        expected = torch.rand(RECORDS) < 0.5
    torch.manual_seed(0)
    losses = summed(Drop(), rows()[0], torch.zeros(RECORDS, dtype=torch.long), secret()).records.losses
    dropped = (losses - torch.log(torch.tensor(3.0))).abs() < 1e-6
    assert dropped.tolist() == expected.tolist()
    assert 0 < int(expected.sum()) < RECORDS


def test_coins_of_replayed_chunks_are_those_of_the_computation() -> None:
    model = built("Dropout")
    programs, coins, plain = SumPrograms(), secret(), secret()
    for step in range(8):
        batch = rows(step)
        found, expected = (
            summed(model, *batch, own, programs=used) for own, used in ((coins, programs), (plain, None))
        )
        for name, value in expected.sums.items():
            assert torch.equal(found.sums[name], value), (step, name)
    assert programs.chunks == 5


def test_coins_of_steps_and_ranks_differ() -> None:
    coins, seeds = secret(), []
    for place in ((0, 0), (0, 1), (1, 0), (0, 0)):
        coins.begin(*place)
        seeds.append(coins.next().tobytes())
    assert seeds[0] == seeds[3]
    assert len(set(seeds)) == 3
    assert Coins().next().tobytes() != Coins().next().tobytes()


def test_coins_of_pytorch_depend_on_more_than_a_seed_of_32_bits() -> None:
    """PyTorch's generator of the CPU takes no more of a seed, and so many seeds could be tried."""
    coins = secret()
    seeds = coins.next()
    drawn = []
    for word in (0, 1, 150, 312):
        other = seeds.copy()
        other[word] ^= np.uint64(1 << 40)
        with coins.kept():
            coins.seed(other)
            drawn.append(torch.rand(2000))
    with coins.kept():
        coins.seed(seeds)
        plain = torch.rand(2000)
        assert torch.default_generator.initial_seed() == int(seeds[0])
    assert torch.equal(drawn[0], plain)  # the first number names the seed, for a model that sets another
    assert not any(torch.equal(each, plain) for each in drawn[1:])


def test_coins_of_pytorch_are_uniform_and_independent_from_chunk_to_chunk() -> None:
    coins, drawn = secret(), []
    for _ in range(200):
        with coins.seeded():
            drawn.append(torch.rand(500, dtype=torch.float64))
    values = torch.stack(drawn)
    assert scipy.stats.kstest(values.flatten().numpy(), "uniform").pvalue > 1e-4
    between = np.corrcoef(values.numpy())[np.triu_indices(200, 1)]
    assert abs(between).max() < 6 / np.sqrt(500)


class Reader:
    """Numbers from this generator, in an attribute of an attribute."""

    def __init__(self, own: Any) -> None:
        self.parts = {"noise": [own]}

    def noise(self) -> float:
        own = self.parts["noise"][0]
        return float(torch.rand((), generator=own) if isinstance(own, torch.Generator) else own.random())


GENERATORS = {
    "torch": lambda: torch.Generator().manual_seed(0),
    "numpy": lambda: np.random.default_rng(0),
    "numpy, another kind": lambda: np.random.Generator(np.random.MT19937(0)),
    "numpy, the old one": lambda: np.random.RandomState(0),
    "python": lambda: random.Random(0),
}


@pytest.mark.parametrize("make", GENERATORS.values(), ids=GENERATORS)
def test_generators_in_attributes_are_seeded_from_the_secret_stream(make: Any) -> None:
    drawn = []
    for seed in (5, 5, 6):
        reader = Reader(make())
        assert len(generators_of(partial(reader.noise))) == 1
        coins = Coins(make_generator(seed=seed), reader)
        with coins.seeded():
            drawn.append(reader.noise())
        assert reader.noise() == Reader(make()).noise()  # where it was before
    assert drawn[0] == drawn[1] != drawn[2]


class WithSlots:
    __slots__ = ("own",)


def test_generators_in_slots_and_queues_are_found() -> None:
    inside, own = WithSlots(), random.Random(0)
    inside.own = own  # type: ignore[attr-defined]
    assert generators_of(Reader(deque([inside]))) == [own]


def test_generator_that_cannot_be_seeded_is_refused() -> None:
    class Own(np.random.SFC64):
        def __init__(self) -> None:
            super().__init__(0)

    with pytest.raises(ModelError, match="can't be seeded"):
        generators_of(Reader(np.random.Generator(Own())))


def test_coins_of_a_dataset_follow_from_the_secret_and_the_step() -> None:
    inputs, target = rows()
    model = nn.Linear(FEATURES, CLASSES)
    objective = Objective(model, F.cross_entropy)

    def read(places: npt.NDArray[np.int64]) -> Block:
        return Block((inputs * float(np.random.rand()),), target).at(places)

    def losses(seed: int, step: int) -> Tensor:
        np.random.seed(0)
        streams = RecordStreams(
            Records.of_rows(RECORDS),
            SimpleNamespace(take=read),  # type: ignore[arg-type]
            objective.loss,
            objective.params,
            lambda loss, read: Stream(loss, objective.params, read, chunk_size=3),
            coins=secret(seed),
            reads_by_code=True,
        )
        return streams.source(np.arange(RECORDS), step)(Clipping.flat(objective.params, 1.0)).records.losses

    assert torch.equal(losses(5, 0), losses(5, 0))
    assert not torch.equal(losses(5, 0), losses(5, 1))
    assert not torch.equal(losses(5, 0), losses(6, 0))


class DrawsInABranch(nn.Module):
    """Records draw in a branch: those of negative numbers so many numbers, and others one."""

    def __init__(self, negative: int) -> None:
        super().__init__()
        self.last, self.negative = nn.Linear(FEATURES, CLASSES), negative

    def forward(self, x: Tensor) -> Tensor:
        drawn = torch.rand(self.negative if x[0, 0] < 0 else 1)
        return self.last(x * drawn[0])  # type: ignore[no-any-return]


def test_coins_of_branches_that_draw_other_shapes_are_refused() -> None:
    """The first number of a record at place p is number 2 p of the stream in one branch, p in the other."""
    inputs, target = rows()
    inputs[:, 0] = torch.tensor([-1.0, -1.0, -1.0, -1.0, 1.0, 1.0, 1.0, 1.0])
    assert len(summed(DrawsInABranch(1), inputs, target, secret()).records.norms) == RECORDS
    with pytest.raises(ModelError, match="take several branches"):
        summed(DrawsInABranch(2), inputs, target, secret())
    assert len(summed(DrawsInABranch(2), inputs[:4], target[:4], secret()).records.norms) == 4
    assert len(summed(DrawsInABranch(2), inputs, target, secret(), samples=1).records.norms) == RECORDS
