"""Whether a model ignores padding: a check on a few rows, each alone beside itself padded."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from psgrad.engine.execution.buckets import positions_of
from psgrad.engine.gradients.per_sample import per_sample_gradients
from psgrad.engine.gradients.queries import PerSampleGradients
from psgrad.ragged import Block

# Rows that are compared, and by how much a loss and a gradient may differ, as kernels sum in another order. A
# model that reads padding is off by far more.
_ROWS = 2
_TOLERANCE = {torch.float64: (1e-10, 1e-9), torch.float32: (1e-5, 1e-4)}
_TOLERANCE_OF_HALVES = 2e-2, 5e-2


def padding_is_masked(
    loss: Callable[..., Any],
    params: Mapping[str, torch.Tensor],
    block: Block,
    *,
    halves: bool = False,
) -> bool:
    """Whether the shortest rows of a block have the same loss and gradient alone as padded to its longest.

    Args:
        loss: (params, inputs, target) of one sample to (loss, aux); see Objective.
        block: rows on the device; True where they are all as long.
        halves: whether products run in half precision.

    True also where a row fails alone: a pass over the rows reports it.
    """
    if block.ragged is None or block.lengths is None:
        return True
    positions = positions_of(block.lengths.cpu().numpy(), block.ragged)
    kind = next(iter(params.values())).dtype
    tolerances = _TOLERANCE_OF_HALVES if halves else _TOLERANCE.get(kind, _TOLERANCE_OF_HALVES)

    def of(inputs: tuple[torch.Tensor, ...], target: torch.Tensor | None) -> PerSampleGradients:
        dims = (0, None if target is None else 0)
        return per_sample_gradients(loss, params, inputs, target, in_dims=dims, has_aux=True)

    shorter = [row for row in positions.argsort(kind="stable").tolist() if positions[row] < positions.max()]
    for row in shorter[:_ROWS]:
        alone, some = block.at([row]), slice(row, row + 1)
        try:
            own = of(alone.inputs, alone.target)
        except Exception:
            return True
        try:
            padded = of(
                tuple(x[some] for x in block.inputs), None if block.target is None else block.target[some]
            )
        except Exception:
            return False
        if not _same(own, padded, *tolerances):
            return False
    return True


def _same(own: PerSampleGradients, padded: PerSampleGradients, of_loss: float, of_gradient: float) -> bool:
    """Whether losses and gradients of one sample agree, of which one parameter is materialised at a time."""
    losses = [float(each.losses[0]) for each in (own, padded)]
    if not all(map(math.isfinite, losses)):
        return losses[0] == losses[1] or all(map(math.isnan, losses))
    if abs(losses[0] - losses[1]) > of_loss * max(1.0, abs(losses[0])):
        return False
    apart = 0.0
    for name, gradient in own.gradients.items():
        values = [
            each.new_zeros(1) if each.is_zero else each.materialise()
            for each in (gradient, padded.gradients[name])
        ]
        apart += float((values[0].double() - values[1].double()).square().sum())
    return math.sqrt(apart) <= of_gradient * max(float(own.square_norms()[0].sqrt()), 1e-30)
