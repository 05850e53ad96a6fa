"""Sums over samples of the elementwise squares of their gradients.

If each sample has one outer product, the sum of squares is a product of squared factors,
sum_n (l_n r_n^T)^2 = (L^2)^T (R^2). For a table, rows of one sample and index are added first, and then
squared. All other values are materialised, a block of samples at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from psgrad.engine.gradients.deferral import DeferredGradient, Placed
from psgrad.engine.gradients.inner.regions import apart
from psgrad.engine.gradients.terms import accumulating_dtype, blocks


def sum_of_squares(gradient: DeferredGradient) -> torch.Tensor:
    """[*shape] float64: the sum over samples of the squares of the gradient's elements."""
    if gradient.groups:
        return torch.stack([sum_of_squares(each) for _, each in gradient.groups]).sum(0)
    total = torch.zeros(gradient.shape, dtype=torch.float64, device=gradient.device)
    for places in apart(gradient.terms):
        side = [gradient.terms[place] for place in places]
        term, layout = side[0].term, side[0].layout
        squares = term.square_sums() if len(side) == 1 else None
        if squares is None:
            _add_values(total, side)
        else:
            total += layout.apply(squares)
    return total


def _add_values(total: torch.Tensor, side: Sequence[Placed]) -> None:
    kind = accumulating_dtype(side[0].term.dtype)
    for block in blocks(side[0].term.samples, 16 * math.prod(total.shape), total.device):
        parts = [placed.at(block, kind).materialise() for placed in side]
        value = parts[0].double() if len(parts) == 1 else torch.stack(parts).sum(0).double()
        total += value.square().sum(0)
