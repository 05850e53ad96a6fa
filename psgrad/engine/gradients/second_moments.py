"""Sums over samples of the elementwise squares of their gradients.

Of one outer product a sample the sum of squares is a product of squared factors, sum_n (l_n r_n^T)^2 =
(L^2)^T (R^2); of a table it is made of rows, those of one sample and index added first. Everything else is
written out, a block of samples at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from psgrad.engine.gradients.deferral import DeferredGradient, Placed
from psgrad.engine.gradients.inner.regions import apart, entries
from psgrad.engine.gradients.terms import Product, Rows, accumulating_dtype, blocks


def sum_of_squares(gradient: DeferredGradient) -> torch.Tensor:
    """[*shape] float64: the sum over samples of the squares of the gradient's elements."""
    total = torch.zeros(gradient.shape, dtype=torch.float64, device=gradient.device)
    for places in apart(gradient.terms):
        side = [gradient.terms[place] for place in places]
        term, layout = side[0].term, side[0].layout
        if len(side) == 1 and isinstance(term, Product) and term.left.shape[2] == 1:
            total += layout.apply(_outer_products(term))
        elif len(side) == 1 and isinstance(term, Rows):
            total += layout.apply(_table(term))
        else:
            _add_written_out(total, side)
    return total


def _outer_products(term: Product) -> torch.Tensor:
    """[g, a, b]"""
    n, groups, _, rows = term.left.shape
    columns = term.right.shape[3]
    total = torch.zeros(groups, rows, columns, dtype=torch.float64, device=term.device)
    for block in blocks(n, 16 * groups * (rows + columns), term.device):
        left, right = (
            factor[block].double().square().squeeze(2).transpose(0, 1) for factor in (term.left, term.right)
        )
        total.baddbmm_(left.transpose(1, 2), right)
    return total


def _table(term: Rows) -> torch.Tensor:
    """[count, b]"""
    _, positions, columns = term.rows.shape
    total = torch.zeros(term.count, columns, dtype=torch.float64, device=term.device)
    for block in blocks(term.samples, 24 * positions * columns, term.device):
        found = entries(term.at(block, torch.float64))
        total.index_add_(0, found.index, found.rows.square())
    return total


def _add_written_out(total: torch.Tensor, side: Sequence[Placed]) -> None:
    kind = accumulating_dtype(side[0].term.dtype)
    for block in blocks(side[0].term.samples, 16 * math.prod(total.shape), total.device):
        parts = [placed.layout.apply(placed.term.at(block, kind).materialise(), lead=1) for placed in side]
        value = parts[0].double() if len(parts) == 1 else torch.stack(parts).sum(0).double()
        total += value.square().sum(0)
