"""Inner products of pairs of terms of one parameter."""

from __future__ import annotations

import math

import torch

from psgrad.engine.gradients.deferral import Placed, oriented
from psgrad.engine.gradients.terms import Product, Rows, accumulating, accumulating_dtype, blocks, sum_of_products


def cross_products(a: Placed, b: Placed) -> torch.Tensor:
    """[n] float64: each sample's inner product of two terms of one parameter."""
    x, y = oriented(a), oriented(b)
    if isinstance(x, Product) and isinstance(y, Rows):
        x, y = y, x
    if isinstance(x, Rows) and isinstance(y, Product) and y.shape == (1, *x.shape):
        return _rows_with_product(x, y)
    return _written_out(a, b)


def _rows_with_product(table: Rows, product: Product) -> torch.Tensor:
    """A tied table: sum over positions t, s of left[t, index[s]] * <right[t], rows[s]>, in which no table-sized value appears."""
    out = torch.empty(table.samples, dtype=torch.float64, device=table.device)
    left, right, rows = accumulating(product.left).squeeze(1), accumulating(product.right).squeeze(1), accumulating(table.rows)
    positions, looked_up = left.shape[1], rows.shape[1]
    for block in blocks(table.samples, 2 * positions * looked_up * left.element_size(), table.device):
        picked = torch.gather(left[block], 2, table.index[block].unsqueeze(1).expand(-1, positions, -1))  # [n, t, s]
        inner = torch.bmm(right[block], rows[block].transpose(1, 2))  # [n, t, s]
        out[block] = sum_of_products(picked, inner).double()
    return out


def _written_out(a: Placed, b: Placed) -> torch.Tensor:
    """Terms of unlike kinds: both are made real, a block of samples at a time."""
    kind = accumulating_dtype(a.term.dtype)
    size = 2 * kind.itemsize * math.prod(a.layout.shape)
    out = torch.empty(a.term.samples, dtype=torch.float64, device=a.term.device)
    for block in blocks(a.term.samples, size, a.term.device):
        x, y = (p.layout.apply(p.term.at(block, kind).materialise(), lead=1).flatten(1) for p in (a, b))
        out[block] = sum_of_products(x, y).double()
    return out
