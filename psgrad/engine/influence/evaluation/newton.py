"""Newton's method for many copies of one convex objective, which differ in their rows.

The copies have nearly the same Hessian, so that one factorisation serves all: each takes steps with the last
Hessian that was good for it, and gets one of its own only where its gradient no longer falls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from psgrad.engine.execution.objective import Criterion
from psgrad.engine.gradients.flat import Flat
from psgrad.engine.influence.evaluation.jobs import Job, LoadedRows, Recipe
from psgrad.engine.transforms import capture, functional_call, grad_and_value, hessian, vmap
from psgrad.errors import InfluenceError

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

    def objective(
        theta: torch.Tensor,
        fixed: dict[str, torch.Tensor],
        inputs: tuple[torch.Tensor, ...],
        target: torch.Tensor | None,
        decay: float,
    ) -> torch.Tensor:
        values = {name: value[0] for name, value in flat.split(theta.unsqueeze(0)).items()}
        output = functional_call(model, {**values, **fixed}, inputs)
        losses = vmap(criterion, in_dims=(0, None if target is None else 0))(output, target)
        return losses.mean() + decay / 2 * theta.square().sum()

    search = _NewtonSearch(objective, recipe.tolerance, captured=len(jobs) >= _CAPTURED_FROM)
    at, minima, losses = flat.join(params)[0], [], []
    for number, job in enumerate(jobs):  # a convex objective has one minimum: each begins at the last one's
        taken = torch.as_tensor(job.rows, device=rows.inputs[0].device)
        state = {name: value[number] for name, value in fixed.items()}
        inputs = tuple(x[taken] for x in rows.inputs)
        target = None if rows.target is None else rows.target[taken]
        decay = recipe.weight_decay * len(rows) / len(job.rows)
        at = search.minimum(job.name, at, (state, inputs, target, decay))
        minima.append(at)
        losses.append(float(objective(at, state, inputs, target, 0.0)))
    found = {name: value.to(params[name].dtype) for name, value in flat.split(torch.stack(minima)).items()}
    return {name: value.contiguous() for name, value in found.items()}, np.array(losses)


class _NewtonSearch:
    """Minima of objectives (parameters [p], *arguments) with nearly the same Hessian, one after another."""

    def __init__(self, objective: Callable[..., torch.Tensor], tolerance: float, *, captured: bool) -> None:
        slope = grad_and_value(objective)
        self._slope = capture(slope, say=lambda why: None) if captured else slope
        self._hessian, self._tolerance = hessian(objective), tolerance
        self._factor: torch.Tensor | None = None  # of the last Hessian that was good

    def minimum(self, name: str, at: torch.Tensor, arguments: tuple[Any, ...]) -> torch.Tensor:
        """The minimum with these arguments, from `at` on. Steps that raise the objective are halved."""
        gradient, value = self._slope(at, *arguments)
        stalled = 0
        for _ in range(_MOST_STEPS):
            size = gradient.abs().max()
            if size <= self._tolerance:
                return at
            if not bool(size.isfinite()) or stalled > _MOST_STALLED:
                break
            stalled = 0 if self._factor is not None else stalled + 1
            if self._factor is None:
                self._factor = self._factorised(name, at, arguments)
            step = torch.cholesky_solve(gradient.unsqueeze(1).to(self._factor), self._factor).squeeze(1)
            rounding = 16 * torch.finfo(at.dtype).eps * value.abs()
            for halvings in range(_HALVINGS):
                there = at - step.to(at) / 2**halvings
                gradient, after = self._slope(there, *arguments)
                if bool(after <= value + rounding):
                    break
            at, value = there, after
            if halvings or bool(gradient.abs().max() > _WORTH * size):
                self._factor = None
        raise InfluenceError(
            f"newton did not find the minimum of {name}: an entry of the gradient is still"
            f" {float(gradient.abs().max()):.3g}, and the tolerance {self._tolerance:g}",
            hint="set engine.dtype: float64, or a larger train.weight_decay",
        )

    def _factorised(self, name: str, at: torch.Tensor, arguments: tuple[Any, ...]) -> torch.Tensor:
        """The Cholesky factor of the Hessian here, in float64."""
        factor, failed = torch.linalg.cholesky_ex(self._hessian(at, *arguments).double())
        if int(failed):
            raise InfluenceError(
                f"newton can't train {name}: its Hessian is not positive definite, and the objective not"
                " strictly convex",
                hint="set a train.weight_decay, or influence.evaluate.train.optimizer: adam",
            )
        return factor
