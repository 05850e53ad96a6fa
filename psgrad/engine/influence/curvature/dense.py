"""Curvature matrices written out, [p, p] in float64, of the sum of the losses. For models with some thousands of parameters."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from psgrad.engine.gradients import PerSampleGradients
from psgrad.engine.influence.examples import Examples
from psgrad.engine.influence.flat import Flat, Vectors
from psgrad.engine.transforms import grad, linearize, vmap

# Columns of a product of a matrix with itself that are computed at once: only what lies on or below the diagonal is.
_PANEL = 512
# Numbers that a block of Hessian columns may take on the way, at a guess: as many a sample as the model has parameters.
_BLOCK = 1 << 25


def sum_of_outer_products(rows: Examples) -> torch.Tensor:
    """[p, p], on the rows' device: the sum of g g' over the rows' gradients.

    Of a training set it is the empirical Fisher; of `gauss_newton_rows` the Gauss-Newton matrix. Products and sums are float64.
    """

    def below_the_diagonal(gradients: PerSampleGradients) -> list[torch.Tensor]:
        written = rows.flat.join(gradients.materialise()).double()
        return [written[:, start : start + _PANEL].t() @ written[:, start:] for start in range(0, rows.flat.size, _PANEL)]

    panels = rows.fold(below_the_diagonal)
    whole = torch.zeros(rows.flat.size, rows.flat.size, dtype=torch.float64, device=rows.device)
    for number, panel in enumerate(panels):
        start = number * _PANEL
        whole[start:, start : start + _PANEL] = panel.t()
        whole[start : start + _PANEL, start:] = panel
    return whole


def loss_hessian(training: Examples) -> torch.Tensor:
    """[p, p], on the rows' device: the second derivatives of the sum of the losses.

    One pass over the rows; of each chunk the gradient is linearised, and the columns come in blocks.
    """
    flat = training.flat
    total: torch.Tensor = training.fold(lambda found: found, partial(_of_chunk, flat))
    return 0.5 * (total + total.t())


def _of_chunk(
    flat: Flat, loss: Any, params: Vectors, inputs: tuple[torch.Tensor, ...], target: torch.Tensor | None, **options: Any
) -> torch.Tensor:
    dims = (None, 0, None if target is None else 0)
    each = vmap(lambda *arguments: loss(*arguments)[0], in_dims=dims, randomness=options["randomness"])
    _, along = linearize(grad(lambda params: each(params, inputs, target).sum()), params)
    reference = next(iter(params.values()))
    columns = []
    step = max(1, _BLOCK // max(1, flat.size * len(inputs[0])))
    for start in range(0, flat.size, step):
        stop = min(start + step, flat.size)
        basis = torch.zeros(stop - start, flat.size, dtype=reference.dtype, device=reference.device)
        basis[:, start:stop] = torch.eye(stop - start, dtype=reference.dtype, device=reference.device)
        columns.append(flat.join(vmap(along)(flat.split(basis))).double())
    return torch.cat(columns)
