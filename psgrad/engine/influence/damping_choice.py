"""The damping of a network, where the options name none: the least of some, from a default on, with which the
removal of parts of the training set changes the losses of other rows as predicted.

A step that is too long for its quadratic model does not do what it predicts. At weights that are far from a
minimum that is so with a damping that serves trained weights well (decision 0018).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from psgrad.engine.execution.chunk_replay import replayable
from psgrad.engine.execution.examples import Examples, losses_of
from psgrad.engine.gradients.flat import Vectors, as_gradients
from psgrad.engine.influence.amounts import objective_slope
from psgrad.engine.influence.continued import each_model
from psgrad.engine.influence.damping import Damping
from psgrad.engine.influence.method import Preconditioned
from psgrad.engine.influence.solvers.dense_solve import DenseSolve

AGREES = 0.95
"""The correlation of predicted and actual changes that is enough."""
_TRIED = tuple(10 ** (half / 2) for half in range(5))
"""The dampings, as multiples of the default."""
# Parts of the training set that are removed; the rows of a part, as a share and at most; and the rows whose
# losses are compared.
_PARTS, _PART_SHARE, _PART_ROWS, _OTHER_SHARE, _OTHERS = 8, 16, 128, 8, 64
# Vectors of all parameters that are alive at once, for each of the 1 + _PARTS steps.
_ALIVE = 4


def with_chosen_damping(fitted: DenseSolve, default: float) -> DenseSolve:
    """The fit with the damping that is chosen. Its facts have `damping_agreement`, the correlation with each
    damping that was tried, in mean eigenvalues, and `damping_because`.

    fitted: with a damping of `default` mean eigenvalues; no smaller one is tried.

    The default is tried first, which takes a pass over the training set and products of the inverse with nine
    vectors. It is kept untried for few rows or without room for nine models, and kept where none agrees.
    """
    why_not = _why_untried(fitted.training)
    if why_not is not None:
        fitted.said = replace(fitted.said, damping_because=f"the default, untried: {why_not}")
        return fitted
    trial, found, tried = RemovalTrial(fitted.training, fitted.weight_decay), dict[str, float](), fitted
    for multiple in _TRIED:
        relative = default * multiple
        if found:
            tried = fitted.damped(Damping(None, relative))
        agreement = trial.agreement(tried)
        found[f"{relative:.3g}"] = agreement
        if agreement >= AGREES:
            because = _AGREES
            break
    else:
        tried, relative, because = fitted, default, _NONE_AGREES
    tried.said = replace(
        tried.said, relative_damping=relative, damping_agreement=found, damping_because=because
    )
    return tried


_CHANGES = "removals change other rows as predicted (a correlation of at least"
_AGREES = f"the least that was tried with which {_CHANGES} {AGREES})"
_NONE_AGREES = f"the default: with none that was tried {_CHANGES} {AGREES})"


def _why_untried(training: Examples) -> str | None:
    """Why the default is kept as it is; None where it is tried."""
    if len(training) < _PART_SHARE:
        return f"the training set has fewer than {_PART_SHARE} rows"
    if _ALIVE * (1 + _PARTS) * 8 * training.flat.size > training.free_bytes():
        return f"the weights of {1 + _PARTS} models do not fit in memory"
    return None


class RemovalTrial:
    """The removal of some random parts of the training set by one step, and what it does to some random
    rows.
    """

    def __init__(self, training: Examples, weight_decay: float) -> None:
        count, generator = len(training), torch.Generator().manual_seed(0)

        def drawn(rows: int) -> list[int]:
            return torch.randperm(count, generator=generator)[:rows].sort().values.tolist()

        self.training = training
        whole = objective_slope(training, weight_decay)  # first: it finds how many rows a chunk has
        parts = [drawn(min(count // _PART_SHARE, _PART_ROWS)) for _ in range(_PARTS)]
        sums = [objective_slope(_rows_of(training, part)) for part in parts]
        self.slopes = training.flat.split(torch.stack([whole, *sums]))
        self.others = _rows_of(training, drawn(max(_PARTS, min(count // _OTHER_SHARE, _OTHERS))))

    def agreement(self, fitted: Preconditioned) -> float:
        """The correlation, over the removals, of predicted changes of the rows' losses with actual ones: of a
        step of the training objective without the part, against a step with all rows. 0 where a loss is not
        finite then, or nothing changes.
        """
        steps = fitted.precondition(self.slopes)
        removed = as_gradients({name: value[1:] for name, value in steps.items()})
        predicted = self._column(lambda gradients: {"found": gradients.inner(removed)})
        ends = {}
        for name, step in steps.items():
            step = step.double()
            step[0] = self.training.params[name].double() - step[0]
            step[1:] += step[0]
            ends[name] = step
        losses = self._losses(each_model(ends, self.training))
        actual = losses[:, 1:] - losses[:, :1]
        one, other = (each - each.mean(1, keepdim=True) for each in (predicted, actual))
        found = float((one * other).sum() / (one.norm() * other.norm()))
        return found if math.isfinite(found) else 0.0

    def _losses(self, models: Sequence[Vectors]) -> torch.Tensor:
        """[rows, k] of k models' weights."""
        return self._column(lambda losses: {"found": losses}, partial(_losses_of_models, models))

    def _column(self, query: Any, compute: Any = None) -> torch.Tensor:
        return torch.cat([part["found"] for _, part in self.others.each(query, compute=compute)])


@replayable("rows")
def _losses_of_models(
    models: Sequence[Vectors], loss: Any, params: Vectors, inputs: Any, target: Any, **options: Any
) -> torch.Tensor:
    """[k, models]: the losses of a chunk's samples."""
    each = [losses_of(loss, model, inputs, target, **options)[0].double() for model in models]
    return torch.stack(each, 1)


def _rows_of(training: Examples, rows: Sequence[int]) -> Examples:
    """Some of the rows, as many at a time as of all of them."""
    some = replace(training.at(torch.tensor(rows)), watch=lambda rows, of: None)
    return some.sized(training.stream.chunk_size)
