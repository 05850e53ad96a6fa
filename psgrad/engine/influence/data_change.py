"""What a change of the training data does to queries: rows are added, and rows are removed (a changed row is
both). The weights take Newton steps on the objective of the changed data, and the queries are measured at
the output that these lead to.

    The first step is -(H + n decay I)^-1 (sum of the added rows' gradients - sum of the removed rows')

with H the curvature of the changed data: the block update of the inverse that all changed rows make together,
where a sum of single influences leaves out what they do to the curvature. The output along the step is to
first order in the parameters: exact for a model that is affine in them.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from psgrad.engine.execution.chunk_replay import replayable
from psgrad.engine.execution.examples import Examples
from psgrad.engine.gradients.flat import Vectors, as_gradients
from psgrad.engine.influence.amounts import flat_params, objective_slope
from psgrad.engine.influence.method import Preconditioned
from psgrad.engine.transforms import jvp, vmap
from psgrad.engine.transforms.private_torch import tree_map

Scalar = Callable[[Any, Any], torch.Tensor]
Fit = Callable[[Examples], Preconditioned]

STEPS = 20
"""Newton steps at most, for a model that is affine in its parameters."""
# How long a step must be, relative to the first one, for another to follow it; halvings of a step at most;
# and by how much rounding may raise an objective.
_SHORT, _HALVINGS, _ROUNDING = 1e-3, 12, 1e-9


@dataclass(frozen=True)
class DataChange:
    """A change of the training data, as the model of one checkpoint sees it.

    before, after: the training examples. added: rows of `after` that `before` does not have; removed: rows of
    `before` that `after` does not have; None where there are none. weight_decay: of training, on the mean
    loss.
    """

    before: Examples
    after: Examples
    added: Examples | None
    removed: Examples | None
    weight_decay: float = 0.0

    @property
    def signed_parts(self) -> list[tuple[Examples, float]]:
        """The rows that are added, +1, and those that are removed, -1."""
        return [(rows, sign) for rows, sign in ((self.added, 1.0), (self.removed, -1.0)) if rows is not None]

    def slope(self) -> torch.Tensor:
        """[p] float64: the gradient of the objective of the changed data, less that of the data before.
        Objectives are sums of losses, and n decay / 2 |theta|^2.
        """
        more = len(self.after) - len(self.before)
        total = more * self.weight_decay * flat_params(self.after)
        for rows, sign in self.signed_parts:
            total = total + sign * objective_slope(rows)
        return total

    def row_effects(self, directions: torch.Tensor) -> torch.Tensor:
        """[k, d] float64, on the CPU: how much each of the k added and then the removed rows alone changes d
        numbers whose gradients, times the inverse of the curvature, are `directions` [d, p]; to first order.
        """
        prepared = as_gradients(self.after.flat.split(directions.to(self.after.device)))
        # a row brings its share of the penalty, too, which is n decay / 2 |theta|^2
        penalty = self.weight_decay * (directions @ flat_params(self.after)).cpu()
        found = [torch.zeros(0, len(directions), dtype=torch.float64)]
        for rows, sign in self.signed_parts:
            chunks = rows.each(lambda gradients: {"": gradients.inner(prepared)})
            found += [-sign * (part[""].double() + penalty) for _, part in chunks]
        return torch.cat(found)


@dataclass(frozen=True)
class DataStep:
    """How far a change moves the weights. moved: [p] float64. fitted: the curvature of the changed data, as
    the first step took it. steps: Newton steps. converged: whether the last one was short beside the first.
    """

    moved: torch.Tensor
    fitted: Preconditioned
    steps: int
    converged: bool


def data_step(change: DataChange, fit: Fit, steps: int = 1) -> DataStep:
    """Newton steps on the objective of the changed data.

    fit: the curvature of examples, with an inverse. steps: at most. Only for a model that is affine in its
    parameters are further steps worth their time: each has the curvature at the weights that the one before
    led to, and is halved until it does not raise the objective. What is left of the gradient at the start is
    no effect of the change, and is taken out of the objective.
    """
    after, here = change.after, flat_params(change.after)
    fitted, slope = fit(after), change.slope()
    first, moved = fitted, torch.zeros_like(slope)
    if steps == 1:
        return DataStep(_newton(fitted, slope), first, 1, False)
    start = objective_slope(after, change.weight_decay) - slope

    def value(moved: torch.Tensor) -> float:
        there = here + moved
        losses = sum(float(part["loss"].sum()) for _, part in at_weights(after, there).losses())
        penalty = len(after) * change.weight_decay / 2 * there.square().sum()
        return losses + float(penalty - start @ moved)

    lowest, length = value(moved), 0.0
    for taken in range(1, steps + 1):
        step = _newton(fitted, slope)
        for _ in range(_HALVINGS):
            if (found := value(moved + step)) <= lowest + _ROUNDING * abs(lowest):
                break
            step = step / 2
        moved, lowest, length = moved + step, found, length or float(step.norm())
        if float(step.norm()) <= _SHORT * length:
            return DataStep(moved, first, taken, True)
        there = at_weights(after, here + moved)
        fitted, slope = fit(there), objective_slope(there, change.weight_decay) - start
    return DataStep(moved, first, steps, False)


def _newton(fitted: Preconditioned, slope: torch.Tensor) -> torch.Tensor:
    """[p] float64: minus the inverse of the curvature times a gradient."""
    flat = fitted.training.flat
    return -flat.join(fitted.precondition(flat.split(slope.unsqueeze(0)))).double()[0].to(slope)


def at_weights(examples: Examples, weights: torch.Tensor) -> Examples:
    """The examples as the model with other parameters [p] sees them."""
    objective, params = copy(examples.objective), examples.params
    split = examples.flat.split(weights.unsqueeze(0).to(examples.device))
    objective.params = {name: value[0].to(params[name]) for name, value in split.items()}
    return replace(examples, objective=objective)


def changed_scalars(
    queries: Examples, step: torch.Tensor, scalars: dict[str, Scalar]
) -> dict[str, torch.Tensor]:
    """name -> [m, 2] float64: each scalar of (output, target) of the queries now, and at the output that a
    step [p] of the parameters leads to, to first order.
    """
    flat, like = queries.flat, queries.params
    along = {
        name: value[0].to(like[name])
        for name, value in flat.split(step.unsqueeze(0).to(queries.device)).items()
    }
    compute = replayable("rows")(partial(_scalars_along, queries.objective, scalars, along))
    chunks = [part for _, part in queries.each(lambda found: found, compute=compute)]
    return {name: torch.cat([part[name] for part in chunks]).double() for name in scalars}


def _scalars_along(
    objective: Any,
    scalars: dict[str, Scalar],
    along: Vectors,
    loss: Any,
    params: Vectors,
    inputs: Any,
    target: Any,
    *,
    randomness: str,
    **_: Any,
) -> dict[str, torch.Tensor]:
    def both(inputs: Any, target: Any) -> dict[str, torch.Tensor]:
        output, moved = jvp(lambda params: objective.predict(params, inputs), (params,), (along,))
        there = tree_map(lambda x, change: x + change, output, moved)
        return {
            name: torch.stack([scalar(output, target), scalar(there, target)])
            for name, scalar in scalars.items()
        }

    return vmap(both, in_dims=(0, None if target is None else 0), randomness=randomness)(inputs, target)
