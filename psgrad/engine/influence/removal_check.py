"""What removals do when training goes on from the given weights without the row: what predicted amounts are held against."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from psgrad.engine.examples import Examples
from psgrad.engine.flat import Vectors
from psgrad.engine.influence.method import Preconditioned
from psgrad.engine.transforms import grad_and_value, vmap

# Steps at most, and halvings of a step that raises the objective.
STEPS, _HALVINGS = 10, 8
# The decrement of a step, relative to the first one's, below which the minimum is reached.
_CONVERGED = 1e-12
# What an objective may rise by in rounding.
_ROUNDING = 1e-7


@dataclass(frozen=True)
class Continued:
    """Weights after training went on from the same weights with all rows, and without each of k rows.

    params: name -> [1 + k, *shape], those with all rows first. steps: how many were taken. converged: whether the objectives are at
    their minima. length: of the steps taken, as a mean share of the full ones.
    """

    params: Vectors
    steps: int
    converged: bool
    length: float

    def changes(self, examples: Examples, row: int) -> torch.Tensor:
        """[k] float64: how much larger the scalar of one row of `examples` is with the weights of each removal than with all rows."""
        inputs, target = examples.stream.load(row, row + 1)
        over = (None, 0, None if target is None else 0)
        found = [_values(examples, params, inputs, target, over) for params in _each(self.params, examples)]
        values = torch.stack(found)
        return (values[1:] - values[0]).cpu()


def continued(
    fitted: Preconditioned, rows: Sequence[int], weight_decay: float, *, steps: int = STEPS, seconds: float | None = None
) -> Continued:
    """Train on from the fit's weights with all rows, and without each of `rows`: steps of the full gradient times the fit's inverse.

    Args:
        fitted: multiplies with an inverse of the summed training loss's curvature.
        rows: [k] places in the training set. weight_decay: of training, on the mean loss.
        steps: at most. seconds: after the first step so many more are taken as fit into these, by the time that one took.

    All 1 + k trainings take the same steps, so that the weights differ by the row alone. A step that raises an objective is halved, and the
    next one is tried at twice its length; where no length lowers the objectives, or they are not finite, training ends there.
    The first step of a removal is the influence function's own; repeated, steps lead to the minimum without the row where the training
    objective is convex. A step takes a pass over the training set for each training, and one product with the inverse.
    """
    training = fitted.training
    search = _Search(training, rows, weight_decay)
    here = training.flat.join({name: value.unsqueeze(0) for name, value in training.params.items()}).double().repeat(1 + len(rows), 1)
    values, gradients = search.at(here, same=True)
    size, lengths, first, taken, converged = 1.0, 0.0, 0.0, 0, False
    while taken < steps:
        begun = time.perf_counter()
        step = training.flat.join(fitted.precondition(training.flat.split(gradients))).double().to(here)
        decrement = float((step * gradients).sum(1).abs().max())
        first = first or decrement
        converged = decrement <= _CONVERGED * first
        if converged or not math.isfinite(decrement):
            break
        for _ in range(_HALVINGS):
            there = here - size * step
            after, slopes = search.at(there)
            if bool((after <= values + _ROUNDING * values.abs()).all()):
                break
            size /= 2
        else:
            break
        here, values, gradients, taken, lengths = there, after, slopes, taken + 1, lengths + size
        size = min(1.0, 2 * size)
        if taken == 1 and seconds is not None:
            steps = min(steps, 1 + int(seconds / max(time.perf_counter() - begun, 1e-9)))
    return Continued(training.flat.split(here), taken, converged, lengths / max(taken, 1))


def slopes_without(training: Examples, rows: Sequence[int], weight_decay: float, weights: torch.Tensor) -> torch.Tensor:
    """[k, p] float64, on the CPU: the gradients of the training objectives without each of `rows` [k], at weights [k, p] of its own."""
    search = _Search(training, rows, weight_decay)
    return search.at(torch.cat([torch.zeros_like(weights[:1]), weights]))[1][1:]


class _Search:
    """The training objectives with all rows, and without each of some."""

    def __init__(self, training: Examples, rows: Sequence[int], weight_decay: float) -> None:
        self.training, self.rows, self.decay = training, rows, len(training) * weight_decay

    def at(self, weights: torch.Tensor, same: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Values [1 + k] and gradients [1 + k, p] of the objectives, at weights [1 + k, p] each. same: whether all of these are one."""
        whole: Any = None
        found, weights = [], weights.to(self.training.device)
        for place, params in enumerate(_each(self.training.flat.split(weights), self.training)):
            if whole is None or not same:
                whole = self._sums(params)
            value, slope = whole
            if place:
                row_value, row_slope = self._row(params, self.rows[place - 1])
                value, slope = value - row_value, slope - row_slope
            own = weights[place]
            found.append((value.cpu() + self.decay / 2 * own.square().sum(), slope.cpu() + self.decay * own))
        return torch.stack([value for value, _ in found]), torch.stack([slope for _, slope in found])

    def _sums(self, params: Vectors) -> tuple[torch.Tensor, torch.Tensor]:
        def way(loss: Any, _: Vectors, inputs: Any, target: Any, *, randomness: str, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
            return self._slope(params, inputs, target, randomness)

        found: tuple[torch.Tensor, torch.Tensor] = self.training.fold(lambda sums: sums, way)
        return found

    def _row(self, params: Vectors, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, target = self.training.stream.load(row, row + 1)
        return self._slope(params, inputs, target, self.training.stream.randomness)

    def _slope(self, params: Vectors, inputs: Any, target: Any, randomness: str) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of some rows' losses, and its gradient [p], both float64."""
        loss, over = self.training.objective.loss, (0, None if target is None else 0)

        def total(params: Vectors) -> torch.Tensor:
            return vmap(lambda *sample: loss(params, *sample)[0], over, randomness=randomness)(inputs, target).double().sum()

        gradients, value = grad_and_value(total)(params)
        return value, self.training.flat.join({name: gradient.unsqueeze(0) for name, gradient in gradients.items()})[0].double()


def _each(stacked: Vectors, examples: Examples) -> list[Vectors]:
    """The weights of each training, in the type and on the device of the model's."""
    count = len(next(iter(stacked.values())))
    return [{name: stacked[name][place].to(value) for name, value in examples.params.items()} for place in range(count)]


def _values(examples: Examples, params: Vectors, inputs: Any, target: Any, over: Any) -> torch.Tensor:
    losses, _ = vmap(examples.objective.loss, over, randomness=examples.stream.randomness)(params, inputs, target)
    return losses[0].double()
