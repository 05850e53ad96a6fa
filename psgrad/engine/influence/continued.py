"""Training that goes on from the given weights with all rows, and without each of some: what predicted
amounts are compared with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from psgrad.engine.execution.buckets import SumOverSamples
from psgrad.engine.execution.chunk_replay import replayable
from psgrad.engine.execution.examples import Examples
from psgrad.engine.gradients.flat import Vectors
from psgrad.engine.influence.method import Preconditioned
from psgrad.engine.transforms import grad_and_value, vmap

# Steps at most, and halvings of a step that raises the objective.
STEPS, _HALVINGS = 10, 8
# The decrement of a step, relative to the first one's, below which the minimum is reached.
_CONVERGED = 1e-12
# By how much rounding may raise an objective.
_LOSS_ROUNDING = 1e-7
AT_MINIMUM = 0.95
"""The cosine of the mean loss's gradient and minus the weights above which they are at a minimum with a
weight decay.
"""
_LEFT = math.sqrt(1 - AT_MINIMUM**2)  # the share of the gradient that the decay leaves at this cosine


@dataclass(frozen=True)
class Continued:
    """Weights after training went on from the same weights with all rows, and without each of k rows.

    params: name -> [1 + k, *shape], those with all rows first. steps: how many were taken. converged: whether
    the objectives are at their minima. length: of the steps taken, as a mean share of the full ones. excess:
    how much further the first step with all rows lowers the objective than the removal of one of the rows
    does, on average: zero at a minimum. at_minimum: whether training began at one; no step is taken
    elsewhere. seconds: that the next step is predicted to take, where the time did not allow it; None where
    it did.
    """

    params: Vectors
    steps: int
    converged: bool
    length: float
    excess: float = 0.0
    at_minimum: bool = True
    seconds: float | None = None

    def changes(self, examples: Examples, row: int) -> torch.Tensor:
        """[k] float64: how much larger the scalar of one row of `examples` is with the weights of each
        removal than with all rows.
        """
        inputs, target = examples.stream.load([row])
        over = (None, 0, None if target is None else 0)
        results = [
            _values(examples, params, inputs, target, over) for params in each_model(self.params, examples)
        ]
        values = torch.stack(results)
        return (values[1:] - values[0]).cpu()


@dataclass
class Budget:
    """The time that training may go on for. clock: in seconds, the same on all processes. tell: called with
    the steps taken, and how many there will be at this pace.
    """

    clock: Callable[[], float]
    seconds: float = math.inf
    tell: Callable[[int, int], None] = lambda done, of: None

    def __post_init__(self) -> None:
        self.began = self.clock()

    def left(self) -> float:
        return self.began + self.seconds - self.clock()


def continued(
    fitted: Preconditioned,
    rows: Sequence[int],
    weight_decay: float,
    *,
    steps: int = STEPS,
    budget: Budget | None = None,
) -> Continued:
    """Train on from the fit's weights with all rows, and without each of `rows`: steps of the full gradient
    times the fit's inverse.

    Args:
        fitted: multiplies with an inverse of the summed training loss's curvature.
        rows: [k] places in the training set.
        weight_decay: of training, on the mean loss.
        steps: at most.
        budget: no step is begun whose passes over the training set, at the pace of the last ones, would end
            after its time; None for all steps.

    All 1 + k trainings take the same steps, so that the weights differ by the row alone. A step that raises
    an objective is halved, and the next one is tried at twice its length; where no length lowers the
    objectives, or they are not finite, training ends there. The first step of a removal is the influence
    function's own; repeated, steps lead to the minimum without the row where the training objective is
    convex. A step takes a pass over the training set for each training, and one product with the inverse.

    Where the weights are at no minimum, what all rows still do to them would hide what one of them does, and
    no step is taken. They are at one if the step with all rows is shorter than those that remove a row,
    measured through the inverse; or if the weight decay cancels most of the loss's gradient.
    """
    training, search = fitted.training, _Objectives(fitted.training, rows, weight_decay)
    run = _Steps(fitted, search, Budget(training.seconds) if budget is None else budget)
    excess, at_minimum, fits = 0.0, True, run.budget.left() > 0
    if fits:
        run.solve()
        run.first, excess = run.decrement, run.excess()
        at_minimum = excess <= 1 or run.decay_cancels() or math.isnan(excess)
    while fits and at_minimum and run.taken < steps:
        fits = run.fits(steps)
        if not fits or not run.take():
            break
    return Continued(
        params=training.flat.split(run.here.to(training.device)),
        steps=run.taken,
        converged=run.converged,
        length=run.lengths / max(run.taken, 1),
        excess=excess,
        at_minimum=at_minimum,
        seconds=None if fits else run.passes,
    )


class _Steps:
    """Training with all rows, and without some, step by step."""

    def __init__(self, fitted: Preconditioned, search: _Objectives, budget: Budget) -> None:
        self.fitted, self.search, self.budget = fitted, search, budget
        self.training = fitted.training
        parameters = {name: value.unsqueeze(0) for name, value in self.training.params.items()}
        flat = self.training.flat.join(parameters).double()
        self.here = flat.repeat(1 + len(search.rows), 1).cpu()
        self.taken, self.lengths, self.size, self.converged, self.first = 0, 0.0, 1.0, False, 0.0
        self.values, self.gradients = search.at(self.here, same=True)
        # These values take one pass; all later ones take one for each training.
        self.passes = (budget.clock() - budget.began) * (1 + len(search.rows))

    def solve(self) -> None:
        """Find the next step, and the largest decrement of any training."""
        flat = self.training.flat
        slope = flat.split(self.gradients.to(self.training.device))
        self.step = flat.join(self.fitted.precondition(slope)).double().cpu()
        self.decrement = float((self.step * self.gradients).sum(1).abs().max())

    def excess(self) -> float:
        """See `Continued`."""
        rows = (self.step[:1] - self.step[1:]) * (self.gradients[:1] - self.gradients[1:])
        whole, own = float((self.step[0] * self.gradients[0]).sum()), float(rows.sum(1).mean())
        return whole / own if own > 0 else 0.0

    def decay_cancels(self) -> bool:
        """Whether the weight decay cancels most of the gradient of the loss."""
        whole = self.gradients[0]
        return bool(whole.norm() <= _LEFT * (whole - self.search.decay * self.here[0]).norm())

    def fits(self, steps: int) -> bool:
        """Whether there is time for the next of at most `steps` steps."""
        left = self.budget.left()
        more = min(steps - self.taken, left / max(self.passes, 1e-9))
        self.budget.tell(self.taken, self.taken + max(1, int(more)))
        return self.passes <= left

    def take(self) -> bool:
        """Take the step, or a half, a quarter, ... of it; False at the minimum, where no length lowers the
        objectives, and where the time is over.
        """
        if self.taken:
            self.solve()
        self.converged = self.decrement <= _CONVERGED * self.first
        if self.converged or not math.isfinite(self.decrement):
            return False
        for halving in range(_HALVINGS):
            if halving and self.budget.left() < self.passes:
                return False
            began, there = self.budget.clock(), self.here - self.size * self.step
            after, slopes = self.search.at(there)
            self.passes = self.budget.clock() - began
            if bool((after <= self.values + _LOSS_ROUNDING * self.values.abs()).all()):
                break
            self.size /= 2
        else:
            return False
        self.here, self.values, self.gradients = there, after, slopes
        self.taken, self.lengths = self.taken + 1, self.lengths + self.size
        self.size = min(1.0, 2 * self.size)
        return True


def slopes_without(
    training: Examples, rows: Sequence[int], weight_decay: float, weights: torch.Tensor
) -> torch.Tensor:
    """[k, p] float64, on the CPU: the gradients of the training objectives without each of `rows` [k], at
    weights [k, p] of its own.
    """
    search = _Objectives(training, rows, weight_decay)
    return search.at(torch.cat([torch.zeros_like(weights[:1]), weights]))[1][1:]


class _Objectives:
    """The training objectives with all rows, and without each of some."""

    def __init__(self, training: Examples, rows: Sequence[int], weight_decay: float) -> None:
        self.training, self.rows, self.decay = training, rows, len(training) * weight_decay

    def at(self, weights: torch.Tensor, same: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Values [1 + k] and gradients [1 + k, p] of the objectives, at weights [1 + k, p] each. same:
        whether the weights are all equal.
        """
        whole: Any = None
        sums, weights = [], weights.to(self.training.device)
        for place, params in enumerate(each_model(self.training.flat.split(weights), self.training)):
            if whole is None or not same:
                whole = self._sums(params)
            value, slope = whole
            if place:
                row_value, row_slope = self._row(params, self.rows[place - 1])
                value, slope = value - row_value, slope - row_slope
            own = weights[place].cpu()
            sums.append((value.cpu() + self.decay / 2 * own.square().sum(), slope.cpu() + self.decay * own))
        return torch.stack([value for value, _ in sums]), torch.stack([slope for _, slope in sums])

    def _sums(self, params: Vectors) -> tuple[torch.Tensor, torch.Tensor]:
        sums: tuple[torch.Tensor, torch.Tensor]
        sums = self.training.fold(lambda sums: sums.value, partial(self._of_chunk, params))
        return sums

    @replayable("sum")
    def _of_chunk(
        self, at: Vectors, loss: Any, params: Vectors, inputs: Any, target: Any, *, randomness: str, **_: Any
    ) -> SumOverSamples:
        return SumOverSamples(self._slope(at, inputs, target, randomness))

    def _row(self, params: Vectors, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, target = self.training.stream.load([row])
        return self._slope(params, inputs, target, self.training.stream.randomness)

    def _slope(
        self, params: Vectors, inputs: Any, target: Any, randomness: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of some rows' losses, and its gradient [p], both float64."""
        loss, over = self.training.objective.loss, (0, None if target is None else 0)

        def total(params: Vectors) -> torch.Tensor:
            return (
                vmap(lambda *sample: loss(params, *sample)[0], over, randomness=randomness)(inputs, target)
                .double()
                .sum()
            )

        gradients, value = grad_and_value(total)(params)
        return (
            value,
            self.training.flat.join({name: gradient.unsqueeze(0) for name, gradient in gradients.items()})[
                0
            ].double(),
        )


def each_model(stacked: Vectors, examples: Examples) -> list[Vectors]:
    """The weights of each of k models, name -> [k, *shape], in the type and on the device of the model's."""
    count = len(next(iter(stacked.values())))
    return [
        {name: stacked[name][place].to(value) for name, value in examples.params.items()}
        for place in range(count)
    ]


def _values(examples: Examples, params: Vectors, inputs: Any, target: Any, over: Any) -> torch.Tensor:
    losses, _ = vmap(examples.objective.loss, over, randomness=examples.stream.randomness)(
        params, inputs, target
    )
    return losses[0].double()
