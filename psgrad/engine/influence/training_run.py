"""A training run that is computed again, step by step, forward and backward.

The run is a function of its training examples' weights: step t goes along the mean over its batch of
w_i * loss_i, where all w_i are 1. `TrainingRun.weight_derivatives` is the exact derivative of a number of the
last parameters with respect to each w_i. With w_i = 0 an example is left out while all else stays: initial
weights, order, batches. Ilyas and Engstrom, "MAGIC: Near-Optimal Data Attribution for Deep Learning" (2025);
Engstrom et al., "Optimizing ML Training with Metagradient Descent" (2025).

States of the forward run, which the derivative needs in reverse order, are kept where they fit into memory.
Where they do not fit, some are kept and the steps between them are computed again, level by level.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from psgrad.engine.execution.objective import Objective
from psgrad.engine.free_memory import free_memory
from psgrad.engine.gradients.flat import Vectors
from psgrad.engine.influence.evaluation.jobs import LoadedRows, Recipe
from psgrad.engine.influence.training_steps import RecipeSteps, StepBatch, TrainingState
from psgrad.engine.transforms import capture, vmap
from psgrad.engine.transforms.private_torch import tree_map
from psgrad.errors import InfluenceError

# The share of the free memory that states of the run may take.
_SHARE = 4
# Fewer states than these at a level would compute most steps many times.
_FEWEST = 8


def training_batches(rows: int, *, epochs: int, batch_size: int, seed: int) -> list[torch.Tensor]:
    """The numbers of the rows of each step, int64 [b]: a permutation of all rows for each epoch, cut into
    batches, the last of which may be smaller.
    """
    shuffles = np.random.default_rng([seed, 1])
    found: list[torch.Tensor] = []
    for _ in range(epochs):
        found += torch.from_numpy(shuffles.permutation(rows)).split(batch_size)
    return found


@dataclass(frozen=True)
class TrainingRun:
    """A deterministic training run.

    Attributes:
        objective: model and loss. Its own parameters count for nothing.
        rows: the training set, [n, ...] each.
        recipe: how; any but newton.
        seed: of the order of the rows: that of the built-in trainer of an evaluation.
        initial: name -> parameter, where the run begins.
        kept: how many states are kept at once; None for as many as fit into a quarter of the free memory.
    """

    objective: Objective
    rows: LoadedRows
    recipe: Recipe
    seed: int
    initial: Vectors
    kept: int | None = None

    @cached_property
    def batches(self) -> list[torch.Tensor]:
        """The numbers of the rows of each step, int64 [b]."""
        epochs, size = self.recipe.epochs, self.recipe.batch_size
        found = training_batches(len(self.rows), epochs=epochs, batch_size=size, seed=self.seed)
        return [batch.to(self.device) for batch in found]

    @property
    def device(self) -> torch.device:
        return next(iter(self.initial.values())).device

    @cached_property
    def final(self) -> Vectors:
        """The parameters after the last step. Raises InfluenceError for a run that diverges."""
        point = self.start
        for step in range(len(self.batches)):
            point = self._after(point, step)
        if not all(bool(value.isfinite().all()) for value in point.params.values()):
            raise InfluenceError(
                "the training that influence.training describes diverged: its weights are not finite",
                hint="set a smaller influence.training.learning_rate",
            )
        return point.params

    def retrained(self, weights: torch.Tensor) -> Vectors:
        """name -> [K, *shape]: the parameters after the same run with other weights [K, n] of the examples,
        all K at once.
        """
        point = self._copies(len(weights))
        weights = weights.to(self._like)
        for step in range(len(self.batches)):
            own = weights[:, self.batches[step]]
            point = TrainingState(*self._stacked(point.params, point.state, self._batch(step), own))
        return point.params

    def weight_derivatives(self, cotangents: Vectors) -> torch.Tensor:
        """[m, n] float64: the derivatives of m numbers with respect to each example's weight.

        cotangents: name -> [m, *shape], the derivatives of the numbers with respect to the last parameters.
        """
        count = len(next(iter(cotangents.values())))
        found = torch.zeros(count, len(self.rows), dtype=torch.float64, device=self.device)
        of_state = tree_map(lambda leaf: leaf.new_zeros((count, *leaf.shape)), self.start.state)
        for step, point in self._backward(self.start, 0, len(self.batches)):
            cotangents, of_state, derivatives = self._pulled(
                point.params, point.state, self._batch(step), cotangents, of_state
            )
            found[:, self.batches[step]] += derivatives.double()
        return found

    @cached_property
    def steps(self) -> RecipeSteps:
        return RecipeSteps(self.objective, self.recipe)

    @cached_property
    def start(self) -> TrainingState:
        """The point before the first step."""
        return TrainingState(self.initial, self.steps.start(self.initial))

    @property
    def _like(self) -> torch.Tensor:
        return next(iter(self.initial.values()))

    def _copies(self, count: int) -> TrainingState:
        """The point before the first step, [K, ...] of all."""
        params, state = tree_map(
            lambda leaf: leaf.expand(count, *leaf.shape).clone(), (self.start.params, self.start.state)
        )
        return TrainingState(params, state)

    def _batch(self, step: int) -> StepBatch:
        rows, target = self.batches[step], self.rows.target
        return StepBatch(
            tuple(x[rows] for x in self.rows.inputs),
            None if target is None else target[rows],
            self.steps.known(step, len(self.batches), self._like),
        )

    def _after(self, point: TrainingState, step: int) -> TrainingState:
        weights = torch.ones(len(self.batches[step]), dtype=self._like.dtype, device=self.device)
        return TrainingState(*self._step(point.params, point.state, self._batch(step), weights))

    @cached_property
    def _step(self) -> Any:
        return capture(self.steps.after, say=lambda why: None)

    @cached_property
    def _stacked(self) -> Any:
        return capture(vmap(self.steps.after, in_dims=(0, 0, None, 0)), say=lambda why: None)

    @cached_property
    def _pulled(self) -> Any:
        return capture(self.steps.pulled, say=lambda why: None)

    def _backward(self, start: TrainingState, first: int, last: int) -> Iterator[tuple[int, TrainingState]]:
        """(step, the point before it) of the steps last - 1, ..., first. start: the point before `first`."""
        width = self._width(start)
        kept = [start]
        if last - first <= width:
            for step in range(first, last - 1):
                start = self._after(start, step)
                kept.append(start)
            for step in reversed(range(first, last)):
                yield step, kept.pop()
            return
        parts = _parts(first, last, width)
        for part in parts[:-1]:
            for step in range(part.start, part.stop):
                start = self._after(start, step)
            kept.append(start)
        for part in reversed(parts):
            yield from self._backward(kept.pop(), part.start, part.stop)

    def _width(self, point: TrainingState) -> int:
        """How many points are kept at one level."""
        if self.kept is not None:
            return max(self.kept, 2)
        return max(_FEWEST, free_memory(self.device) // _SHARE // max(point.bytes, 1))


def distance(one: Vectors, other: Vectors) -> float:
    """How far two sets of parameters are apart."""
    return float(
        torch.stack([(one[name] - other[name]).double().square().sum() for name in one]).sum().sqrt()
    )


def _parts(first: int, last: int, count: int) -> list[slice]:
    """Steps first, ..., last - 1 in `count` parts of about equal length."""
    ends = [first + (last - first) * number // count for number in range(count + 1)]
    return [slice(start, stop) for start, stop in pairwise(ends) if stop > start]
