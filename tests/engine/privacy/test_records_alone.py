"""`records: alone`: no record's numbers depend on the other records of a batch, to the last bit, also where
the last digit decides a gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from psgrad.engine.execution.objective import Objective
from psgrad.engine.execution.streaming import Stream
from psgrad.engine.privacy.batches import ClippedSum, RecordStreams, batch_source, stream_source
from psgrad.engine.privacy.clipping import Clipping
from psgrad.engine.privacy.records import Records
from psgrad.ragged import Block
from tests.architectures import ARCHITECTURES
from tests.engine.privacy.clipped_loop import distance
from tests.small_models import Architecture


class Split(nn.Module):
    """A network with a branch on which records disagree."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 32), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        return self.second(x if x.sum() > 8 else x * 0.5)  # type: ignore[no-any-return]


# Each begins with the weights of units that are put at a kink.
KINKED: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "relu": (lambda: nn.Sequential(nn.Linear(64, 32, bias=False), nn.ReLU(), nn.Linear(32, 3)), (64,)),
    "relu and bias": (lambda: nn.Sequential(nn.Linear(40, 20), nn.ReLU(), nn.Linear(20, 3)), (40,)),
    "hardshrink": (lambda: nn.Sequential(nn.Linear(24, 12), nn.Hardshrink(0.0), nn.Linear(12, 3)), (24,)),
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


def sum_of(objective: Objective, inputs: tuple[Tensor, ...], target: Tensor, how: str) -> ClippedSum:
    """The clipped sum of these records, each alone, from memory or from a stream."""
    clipping = Clipping.flat(objective.params, 1.0)
    if how == "in memory":
        source = batch_source(
            objective.loss,
            objective.params,
            inputs,
            target,
            has_aux=True,
            randomness="different",
            samples=1,
        )
        return source(clipping)

    stream = Stream(objective.loss, objective.params, Block(inputs, target))
    return stream_source(stream, len(target), alone=True)(clipping)


@pytest.mark.parametrize("how", ["in memory", "in a stream"])
@pytest.mark.parametrize("name", KINKED)
def test_records_alone_at_a_kink_add_at_most_the_bound(name: str, how: str) -> None:
    """The last digit of a unit's argument decides a gradient as long as the bound."""
    build, shape = KINKED[name]
    for seed in range(3):
        torch.manual_seed(seed)
        model, count = build(), 2 + seed
        inputs, target = at_kinks(model, shape, count), torch.randint(3, (count,))
        objective = Objective(model, nn.functional.cross_entropy)
        whole = sum_of(objective, (inputs,), target, how)
        for left_out in range(count):
            others = [row for row in range(count) if row != left_out]
            rest = sum_of(objective, (inputs[others],), target[others], how)
            assert distance(whole.sums, rest.sums) <= 1
            assert torch.equal(whole.records.norms[others], rest.records.norms)


def test_users_alone_at_a_kink_add_at_most_the_bound() -> None:
    """Users of one row to five, who are read in streams by their number of rows."""
    torch.manual_seed(0)
    model, sizes = KINKED["relu"][0](), np.array([1, 2, 5, 1, 2, 4])
    rows = int(sizes.sum())
    inputs, target = at_kinks(model, (64,), rows), torch.randint(3, (rows,))
    objective = Objective(model, nn.functional.cross_entropy)
    streams = RecordStreams(
        Records(np.arange(rows), np.cumsum(sizes) - sizes, sizes),
        Block((inputs,), target),
        objective.loss,
        objective.params,
        lambda loss, read: Stream(loss, objective.params, read),
        alone=True,
    )
    clipping = Clipping.flat(objective.params, 1.0)
    for left_out in range(len(sizes)):
        others = [user for user in range(len(sizes)) if user != left_out]
        sums = [streams.source(drawn)(clipping).sums for drawn in (range(len(sizes)), others)]
        assert distance(*sums) <= 1


@pytest.mark.long
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda a: a.name)
def test_records_alone_of_architectures_have_the_bits_of_any_company(architecture: Architecture) -> None:
    """Also where a model seeds the generator that it draws from in each call."""
    inputs, target = architecture.batch(3)
    objective = Objective(architecture.build().eval(), architecture.loss)
    whole = sum_of(objective, inputs, target, "in memory").records
    for place in range(3):
        some = tuple(x[place : place + 1] for x in inputs)
        alone = sum_of(objective, some, target[place : place + 1], "in memory").records
        assert torch.equal(whole.norms[place : place + 1], alone.norms)
        assert torch.equal(whole.losses[place : place + 1], alone.losses)
