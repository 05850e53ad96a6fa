"""Newton's method for many copies of one convex objective, which differ in their rows.

The copies have nearly the same Hessian, so that one factorisation serves all: each takes steps with the last
Hessian that was good for it, and gets one of its own only where its gradient no longer falls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from psgrad.engine.execution.objective import Criterion
from psgrad.engine.gradients.flat import Flat
from psgrad.engine.influence.evaluation.jobs import Job, LoadedRows, Recipe
from psgrad.engine.transforms import capture, functional_call, grad_and_value, hessian, vmap
from psgrad.errors import InfluenceError

Arguments = tuple[dict[str, torch.Tensor], tuple[torch.Tensor, ...], torch.Tensor | None, float]

_MOST_PARAMETERS = 5000
# From this many jobs on, capturing a gradient and replaying it saves time.
_CAPTURED_FROM = 4
_MOST_STEPS = 500
# After this many steps in a row, each with its own Hessian, that do not halve the gradient, rounding is the
# limit.
_MOST_STALLED = 20
_HALVINGS = 30
# A step with a borrowed Hessian must take away this share of the gradient, or the next one has its own.
_WORTH = 0.5


def minimise(
    model: nn.Module,
    params: dict[str, torch.Tensor],
    fixed: dict[str, torch.Tensor],
    rows: LoadedRows,
    jobs: Sequence[Job],
    criterion: Criterion,
    recipe: Recipe,
) -> tuple[dict[str, torch.Tensor], np.ndarray[Any, Any]]:
    """The minimum of (1/k) (sum of the losses of k rows + n * weight_decay / 2 * |theta|^2), for each job.

    Args:
        params: name -> [K, *shape], where the search begins.
        fixed: the rest of the models' state, name -> [K, ...].

    Returns the parameters, and the mean loss [K] there. Raises InfluenceError where the objective is not
    strictly convex, has too many parameters for a Hessian, or is not minimised to the recipe's tolerance.
    """
    flat = Flat({name: value[0] for name, value in params.items()})
    if flat.size > _MOST_PARAMETERS:
        raise InfluenceError(
            f"newton was asked to train {flat.size:,} parameters; expected at most {_MOST_PARAMETERS:,}",
            hint="set influence.evaluate.train.optimizer: adam",
        )
    search = _NewtonSearch(model, flat, fixed, rows, jobs, criterion, recipe)
    start = flat.join(params)
    minima = torch.stack([search.solve(number, start) for number in range(len(jobs))])
    losses = np.array([float(search.loss(number, minima[number])) for number in range(len(jobs))])
    return {
        name: value.to(params[name].dtype).contiguous() for name, value in flat.split(minima).items()
    }, losses


class _NewtonSearch:
    """One objective for each job, over flat parameters [p]."""

    def __init__(
        self,
        model: nn.Module,
        flat: Flat,
        fixed: dict[str, torch.Tensor],
        rows: LoadedRows,
        jobs: Sequence[Job],
        criterion: Criterion,
        recipe: Recipe,
    ) -> None:
        self.model, self.flat, self.fixed, self.rows, self.jobs = model, flat, fixed, rows, jobs
        self.criterion, self.recipe = criterion, recipe
        slope = grad_and_value(self._objective)
        # Jobs with as many rows differ in their tensors only.
        self._slope = capture(slope, say=lambda why: None) if len(jobs) >= _CAPTURED_FROM else slope
        self._factor: torch.Tensor | None = None
        self._last: torch.Tensor | None = None

    def solve(self, number: int, start: torch.Tensor) -> torch.Tensor:
        """The minimum for one job. A convex objective has one, so the search begins at the last minimum."""
        at = start[number] if self._last is None else self._last
        arguments = self._arguments(number)
        gradient, value = self._slope(at, *arguments)
        size, stalled = gradient.abs().max(), 0
        for _ in range(_MOST_STEPS):
            if size <= self.recipe.tolerance:
                self._last = at
                return at
            if not bool(size.isfinite()) or stalled > _MOST_STALLED:
                break
            if self._factor is None:
                self._factor = self._factorised(number, at, arguments)
                stalled += 1
            else:
                stalled = 0
            at, gradient, value, after, short = self._step(arguments, at, gradient, value)
            if short or bool(after > _WORTH * size):
                self._factor = None
            size = after
        raise InfluenceError(
            f"newton did not find the minimum of {self.jobs[number].name}: an entry of the gradient is"
            f" still {float(size):.3g}, and the tolerance {self.recipe.tolerance:g}",
            hint="set engine.dtype: float64, a larger train.weight_decay or a larger train.tolerance",
        )

    def _step(
        self, arguments: Arguments, at: torch.Tensor, gradient: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, bool]:
        """One step, halved until the objective does not rise: (where, gradient, value, its largest entry,
        whether it was halved).
        """
        assert self._factor is not None
        direction = (
            torch.cholesky_solve(gradient.unsqueeze(1).to(self._factor), self._factor).squeeze(1).to(at)
        )
        rounding = 16 * torch.finfo(at.dtype).eps * value.abs()
        for halvings in range(_HALVINGS):
            there = at - direction / 2**halvings
            new_gradient, new_value = self._slope(there, *arguments)
            if bool(new_value <= value + rounding):
                break
        return there, new_gradient, new_value, new_gradient.abs().max(), halvings > 0

    def _factorised(self, number: int, at: torch.Tensor, arguments: Arguments) -> torch.Tensor:
        """The Cholesky factor of the Hessian here, in float64."""
        factor, failed = torch.linalg.cholesky_ex(hessian(self._objective)(at, *arguments).double())
        if int(failed):
            raise InfluenceError(
                f"newton can't train {self.jobs[number].name}: its Hessian is not positive definite, and the"
                " objective not strictly convex",
                hint="set a train.weight_decay, or influence.evaluate.train.optimizer: adam",
            )
        return factor

    def loss(self, number: int, theta: torch.Tensor) -> torch.Tensor:
        """The mean loss of the job's rows."""
        state, inputs, target, _ = self._arguments(number)
        return self._objective(theta, state, inputs, target, 0.0)

    def _arguments(self, number: int) -> Arguments:
        """(the rest of the model's state, inputs, target, weight decay) of a job."""
        job = self.jobs[number]
        taken = torch.as_tensor(job.rows, device=self.rows.inputs[0].device)
        return (
            {name: value[number] for name, value in self.fixed.items()},
            tuple(x[taken] for x in self.rows.inputs),
            None if self.rows.target is None else self.rows.target[taken],
            self.recipe.weight_decay * len(self.rows) / len(job.rows),
        )

    def _objective(
        self,
        theta: torch.Tensor,
        fixed: dict[str, torch.Tensor],
        inputs: tuple[torch.Tensor, ...],
        target: torch.Tensor | None,
        decay: float,
    ) -> torch.Tensor:
        values = {name: value[0] for name, value in self.flat.split(theta.unsqueeze(0)).items()}
        output = functional_call(self.model, {**values, **fixed}, inputs)
        losses = vmap(self.criterion, in_dims=(0, None if target is None else 0))(output, target)
        return losses.mean() + decay / 2 * theta.square().sum()
