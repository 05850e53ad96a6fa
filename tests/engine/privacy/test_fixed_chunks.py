"""No record's numbers depend on the other records of a batch, to the last bit: not by the size of a chunk, by
the place in it, or by what the others are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from psgrad.engine.execution.objective import Objective
from psgrad.engine.execution.streaming import Stream
from psgrad.engine.privacy import batches, clipped_sums, fixed_chunks
from psgrad.engine.privacy.batches import ClippedSum, RecordStreams, batch_source, stream_source
from psgrad.engine.privacy.clipping import Clipping
from psgrad.engine.privacy.fixed_chunks import independent_samples
from psgrad.engine.privacy.generators import make_generator
from psgrad.engine.privacy.rank_steps import share_of
from psgrad.engine.privacy.record_draws import RecordDraws
from psgrad.engine.privacy.records import Records
from psgrad.ragged import Block
from tests.architectures import ARCHITECTURES
from tests.engine.privacy.clipped_loop import distance
from tests.models import Architecture

RECORDS = 7


class Split(nn.Module):
    """A network with a branch on which records disagree."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 32), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        return self.second(x if x.sum() > 8 else x * 0.5)


def network(*layers: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*layers)


# Each begins with the weights of units that are put at a kink.
KINKED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "relu": (lambda: nn.Sequential(nn.Linear(64, 32, bias=False), nn.ReLU(), nn.Linear(32, 3)), (64,)),
    "relu and bias": (lambda: nn.Sequential(nn.Linear(40, 20), nn.ReLU(), nn.Linear(20, 3)), (40,)),
    "hardtanh": (lambda: nn.Sequential(nn.Linear(24, 12), nn.Hardshrink(0.0), nn.Linear(12, 3)), (24,)),
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(3, 16, 4, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)),
        (3, 8, 8),
    ),
    "positions": (
        lambda: nn.Sequential(nn.Linear(40, 20), nn.ReLU(), nn.Flatten(), nn.Linear(100, 3)),
        (5, 40),
    ),
    "branch": (Split, (64,)),
}


def at_kinks(model: nn.Module, shape: tuple[int, ...], count: int) -> Tensor:
    """[count, *shape] float32: inputs for which all units of the first layer are zero but for rounding."""
    first = next(module for module in model.modules() if isinstance(module, nn.Linear | nn.Conv2d))
    weight = first.weight.detach().double().flatten(1)
    offset = 0 if first.bias is None else first.bias.detach().double()
    drawn = 10 * torch.randn(count, *shape, dtype=torch.float64)
    if isinstance(first, nn.Conv2d):
        drawn = nn.functional.unfold(drawn, 4, stride=4).transpose(1, 2)
    away = torch.linalg.solve(weight @ weight.T, (drawn @ weight.T + offset).unsqueeze(-1)).squeeze(-1)
    drawn = drawn - away @ weight
    if isinstance(first, nn.Conv2d):
        drawn = nn.functional.fold(drawn.transpose(1, 2), shape[1:], 4, stride=4)
    return drawn.float()


def loss_of(model: nn.Module, reduce: Callable[[Tensor], Tensor] = lambda x: x) -> Objective:
    return Objective(model, lambda output, target: nn.functional.cross_entropy(reduce(output), target))


def sum_of(objective: Objective, inputs: Tensor, target: Tensor, how: Any, bound: float = 1.0) -> ClippedSum:
    """The clipped sum of these records: in memory, in a stream with this chunk size, or as units of one row
    or more.
    """
    clipping = Clipping.flat(objective.params, bound)
    if how == "in memory":
        return batch_source(objective.loss, objective.params, (inputs,), target, has_aux=True)(clipping)
    read = lambda start, stop: Block((inputs[start:stop],), target[start:stop])
    stream = Stream(objective.loss, objective.params, read, chunk_size=how)
    return stream_source(stream, len(target))(clipping)


@pytest.mark.every(3)
@pytest.mark.parametrize("how", ["in memory", "auto", 1, 3, 16])
@pytest.mark.parametrize("name", KINKED)
def test_records_at_a_kink_add_at_most_the_bound(name: str, how: Any) -> None:
    """The last digit of a unit's argument decides a gradient as long as the bound."""
    build, shape = KINKED[name]
    for seed in range(3):
        torch.manual_seed(seed)
        model, count = build(), 2 + seed % 3
        inputs, target = at_kinks(model, shape, count), torch.randint(3, (count,))
        objective = loss_of(model)
        whole = sum_of(objective, inputs, target, how)
        for left_out in range(count):
            others = [row for row in range(count) if row != left_out]
            rest = sum_of(objective, inputs[others], target[others], how)
            assert distance(whole.sums, rest.sums) <= 1
            assert torch.equal(whole.records.norms[others], rest.records.norms)


@pytest.mark.long
def test_users_at_a_kink_add_at_most_the_bound() -> None:
    """Users of one row to five, who are read in streams by their number of rows."""
    torch.manual_seed(0)
    model, sizes = KINKED["relu"][0](), np.array([1, 2, 5, 1, 2, 4])
    rows = int(sizes.sum())
    inputs, target = at_kinks(model, (64,), rows), torch.randint(3, (rows,))
    objective = loss_of(model)
    streams = RecordStreams(
        Records(np.arange(rows), np.cumsum(sizes) - sizes, sizes),
        lambda numbers: Block((inputs[numbers],), target[numbers]),
        objective.loss,
        objective.params,
        lambda loss, read: Stream(loss, objective.params, read),
        expected=4,
    )
    clipping = Clipping.flat(objective.params, 1.0)
    for left_out in range(len(sizes)):
        others = [user for user in range(len(sizes)) if user != left_out]
        sums = [streams.source(drawn)(clipping).sums for drawn in (range(len(sizes)), others)]
        assert distance(*sums) <= 1


def of_architecture(architecture: Architecture) -> str:
    return architecture.name


@pytest.mark.every(3)
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=of_architecture)
def test_numbers_of_records_stay_when_another_one_goes(architecture: Architecture) -> None:
    """Norms, losses and factors of all other records, to the last bit."""
    model = architecture.build(dtype=torch.float32)
    inputs, target = architecture.batch(RECORDS, dtype=torch.float32)
    objective = Objective(model, architecture.loss)

    draws = RecordDraws(make_generator("aes", seed=0)).at(0)

    def records(rows: list[int]) -> clipped_sums.RecordColumns:
        source = batch_source(
            objective.loss,
            objective.params,
            tuple(x[rows] for x in inputs),
            target[rows],
            has_aux=True,
            randomness="different",
            draws=draws,
            records=rows,
        )
        return source(Clipping.flat(objective.params, 0.1)).records

    whole, rows = records(list(range(RECORDS))), [4, 1, 6, 0, 3]
    rest = records(rows)
    for name in ("norms", "losses", "factors"):
        assert torch.equal(getattr(whole, name)[rows], getattr(rest, name)), name


@pytest.mark.parametrize("planted", ["place", "others"])
def test_kernels_that_round_by_place_are_found(planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then records are computed one by one, and the run says so."""
    real = fixed_chunks.per_sample_gradients

    def rounded(*args: Any, **options: Any) -> Any:
        found = real(*args, **options)
        losses = found.losses.clone()
        if planted == "place":
            losses[-1] *= 1 + torch.finfo(losses.dtype).eps
        else:
            losses[1:] *= 1 + torch.finfo(losses.dtype).eps * (losses[1:] != losses[0])
        return clipped_sums.PerSampleGradients(found.gradients, losses, found.aux)

    torch.manual_seed(0)
    objective, inputs, target = loss_of(KINKED["relu"][0]()), torch.randn(9, 64), torch.randint(3, (9,))
    said: list[str] = []
    read = lambda start, stop: Block((inputs[start:stop],), target[start:stop])
    stream = Stream(objective.loss, objective.params, read, say=said.append)
    assert fixed_chunks.choose_samples(stream, 9, 16) > 1
    assert not said
    monkeypatch.setattr(fixed_chunks, "per_sample_gradients", rounded)
    again = Stream(objective.loss, objective.params, read, say=said.append)
    assert fixed_chunks.choose_samples(again, 9, 16) == again.chunk_size == 1
    assert "records are computed one by one" in said[0]
    assert independent_samples(objective.loss, objective.params, (inputs,), target, has_aux=True) == 1


@pytest.mark.parametrize(("how", "count", "again"), [(16, 40, 5), ("in memory", 20, 3)])
def test_memory_that_runs_out_leaves_chunks_of_one_size(
    how: Any, count: int, again: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The records before it, too, are computed again in the smaller size."""
    real, sizes = clipped_sums.per_sample_weighted_sum, list[int]()

    def limited(loss: Any, params: Any, inputs: Any, target: Tensor, **options: Any) -> Any:
        sizes.append(len(target))
        if len(sizes) == 2:
            raise MemoryError
        return real(loss, params, inputs, target, **options)

    torch.manual_seed(0)
    objective, inputs, target = (
        loss_of(KINKED["relu"][0]()),
        torch.randn(count, 64),
        torch.randint(3, (count,)),
    )
    monkeypatch.setattr(clipped_sums, "per_sample_weighted_sum", limited)
    monkeypatch.setattr(batches, "independent_samples", lambda *rest, **options: 16)
    found = sum_of(objective, inputs, target, how)
    assert sizes[:2] == [16, 16]
    assert sizes[-again:] == [8] * again
    monkeypatch.setattr(clipped_sums, "per_sample_weighted_sum", real)
    assert distance(found.sums, sum_of(objective, inputs, target, 8).sums) == 0


def test_batches_in_memory_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a loss, by name or as a method, and the shapes of a record."""
    asked: list[int] = []
    monkeypatch.setattr(batches, "independent_samples", lambda *rest, **options: asked.append(1) or 16)
    objective = loss_of(KINKED["relu"][0]())
    for count in (5, 9, 2):
        sum_of(objective, torch.randn(count, 64), torch.randint(3, (count,)), "in memory")
    assert len(asked) == 1
    sum_of(loss_of(KINKED["relu"][0]()), torch.randn(2, 64), torch.randint(3, (2,)), "in memory")
    assert len(asked) == 2


@given(most=st.integers(1, 1024), expected=st.floats(0.01, 5000))
def test_sizes_to_try_fit_the_expected_batch(most: int, expected: float) -> None:
    sizes = fixed_chunks._sizes(most, expected)
    assert all(0 < size <= most for size in sizes)
    likely = expected + 2 * math.sqrt(expected)
    chunks = math.ceil(likely / most)
    assert sizes[0] * chunks >= min(likely, most * chunks) - 1e-9
    assert sizes[0] <= likely / chunks + 8


@given(drawn=st.lists(st.integers(0, 99), unique=True, min_size=1), size=st.integers(1, 5))
def test_shares_of_ranks_do_not_depend_on_other_records(drawn: list[int], size: int) -> None:
    numbers = np.array(drawn)
    shares = [share_of(numbers, rank, size) for rank in range(size)]
    assert sorted(np.concatenate(shares).tolist()) == sorted(drawn)
    for rank, share in enumerate(shares):
        assert set(share.tolist()) == set(share_of(np.arange(100), rank, size).tolist()) & set(drawn)
