"""Curvature matrices written out, [p, p] in float64, of the sum of the losses. For models with some thousands of parameters."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from psgrad.engine.examples import Examples
from psgrad.engine.flat import Flat, Vectors
from psgrad.engine.influence.curvature.outer_products import own_products, sum_over_rows
from psgrad.engine.influence.curvature.rows import OutputRows
from psgrad.engine.transforms import grad, linearize, vmap

# Numbers that a block of Hessian columns may take on the way, at a guess: as many a sample as the model has parameters.
_BLOCK = 1 << 25


def sum_of_outer_products(rows: Examples) -> torch.Tensor:
    """[p, p], on the rows' device: the sum of g g' over the rows' gradients.

    Of a training set it is the empirical Fisher; of `gauss_newton_rows` the Gauss-Newton matrix. Products and sums are float64.
    """
    flat = rows.flat
    if isinstance(rows, OutputRows):
        return replace(rows, settle=False).fold(lambda gradients: sum_over_rows(gradients, flat, rows.per_sample))
    return rows.fold(lambda gradients: own_products(flat.join(gradients.materialise()).double()))


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
