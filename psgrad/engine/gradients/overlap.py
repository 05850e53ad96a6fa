"""Where two terms of one parameter meet, if they stand in parts of it.

Inner products of pairs of terms of one parameter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from psgrad.engine.gradients.deferral import oriented
from psgrad.engine.gradients.deferral.term_maps import labelled, narrowed, times
from psgrad.engine.gradients.deferred import Placed
from psgrad.engine.gradients.layout import Run
from psgrad.engine.gradients.terms import (
    Convolution,
    Dense,
    Multiples,
    Product,
    Rows,
    Term,
    accumulating,
    accumulating_dtype,
    blocks,
    sum_of_products,
)


def meet(a: Placed, b: Placed) -> list[tuple[Placed, Placed]] | None:
    """Both terms within the window that they share, of its shape; an empty list where they share none; None
    where it would take writing a term out to see.
    """
    if a.layout.window is None and b.layout.window is None:
        return [(a, b)]
    runs = [_runs(placed) for placed in (a, b)]
    if any(
        _miss(one, one_length, other, length)
        for (one, one_length), (other, length) in zip(*runs, strict=True)
    ):
        return []
    found = [_within(placed, other) for placed, other in zip((a, b), reversed(runs), strict=True)]
    if None in found:
        return None
    return [(one, other) for one in found[0] or [] for other in found[1] or []]


def _runs(placed: Placed) -> list[tuple[Run, int]]:
    layout = placed.layout
    window = layout.window if layout.window is not None else [Run(0, 1, size) for size in layout.inner]
    return list(zip(window, layout.inner, strict=True))


def _miss(one: Run, one_length: int, other: Run, length: int) -> bool:
    """Whether two runs surely have no place in common."""
    if one.end(one_length) <= other.start or other.end(length) <= one.start:
        return True
    return one.step == other.step and (one.start - other.start) % one.step != 0


def _within(placed: Placed, runs: Sequence[tuple[Run, int]]) -> list[Placed] | None:
    """The part of a term that lies within a window, with no window of its own."""
    for dim, (run, length) in enumerate(runs):
        own, count = _runs(placed)[dim]
        if own == run and count == length:
            continue
        if own.step == run.step != 1:  # of steps that go together those that both have
            first, last = max(own.start, run.start), min(own.end(count), run.end(length))
            places = (first, own.step, len(range(first, last, own.step)))
        else:
            places = (run.start, run.step, length)
        found = narrowed(placed, dim, *places)
        if not found:
            return found
        (placed,) = found
    return [Placed(placed.term, placed.layout.bare)]


def cross_products(a: Placed, b: Placed) -> torch.Tensor:
    """[n] float64: each sample's inner product of two terms of one parameter."""
    common = meet(a, b) if a.term.samples else []
    if common is None:
        return _written_out(a, b)
    if not common:
        return torch.zeros(a.term.samples, dtype=torch.float64, device=a.term.device)
    ((a, b),) = common
    if a.term.dtype != b.term.dtype:  # a weight that is used in two precisions
        kind = torch.promote_types(accumulating_dtype(a.term.dtype), accumulating_dtype(b.term.dtype))
        a, b = (Placed(placed.term.at(slice(None), kind), placed.layout) for placed in (a, b))
    if isinstance(b.term, Multiples) and not isinstance(a.term, Multiples):
        a, b = b, a
    if isinstance(a.term, Multiples) and (found := _with_multiples(a, a.term, b)) is not None:
        return found
    x, y = (_as_product(oriented(placed)) for placed in (a, b))
    if isinstance(x, Product) and isinstance(y, Rows):
        x, y = y, x
    if isinstance(x, Rows) and isinstance(y, Product) and y.shape == (1, *x.shape):
        return _rows_with_product(x, y)
    if isinstance(x, Product) and isinstance(y, Product) and x.shape == y.shape and _gram_is_cheaper(x, y):
        return _products(x, y)
    return _written_out(a, b)


def _as_product(term: Term | None) -> Term | None:
    """A convolution with windows of one element has its patches there."""
    if isinstance(term, Convolution) and math.prod(term.shape[2:]) == 1 and term.geometry.groups == 1:
        return term.as_product()
    return term


def _with_multiples(a: Placed, multiples: Multiples, b: Placed) -> torch.Tensor | None:
    """<c * u, value> = <u, c * value>: the coefficients go into a factor of the other term."""
    own = labelled(multiples, a.layout)
    if own is None or isinstance(b.term, Dense):
        return None
    wide = accumulating_dtype(own.dtype)
    found = times(Placed(b.term.at(slice(None), wide), b.layout), own.coefficients.to(wide), each=True)
    if found is None:
        return None
    return found[0].term.dot(found[0].layout.invert(own.shared, found[0].term.shape)).double()


def _gram_is_cheaper(x: Product, y: Product) -> bool:
    t, s, rows, columns = x.left.shape[2], y.left.shape[2], *x.shape[1:]
    return t * s * (rows + columns) <= (t + s) * rows * columns


def _products(x: Product, y: Product) -> torch.Tensor:
    """Sum over positions t, s of <left[t], left'[s]> * <right[t], right'[s]>."""
    kind = torch.promote_types(accumulating_dtype(x.dtype), accumulating_dtype(y.dtype))
    groups, t, s = x.left.shape[1], x.left.shape[2], y.left.shape[2]
    out = torch.empty(x.samples, dtype=torch.float64, device=x.device)
    for block in blocks(x.samples, 2 * groups * t * s * kind.itemsize, x.device):
        one, other = x.at(block, kind), y.at(block, kind)
        left = torch.matmul(one.left, other.left.transpose(2, 3))
        out[block] = sum_of_products(left, torch.matmul(one.right, other.right.transpose(2, 3))).double()
    return out


def _rows_with_product(table: Rows, product: Product) -> torch.Tensor:
    """A tied table: sum over positions t, s of left[t, index[s]] * <right[t], rows[s]>, in which no
    table-sized value appears.
    """
    out = torch.empty(table.samples, dtype=torch.float64, device=table.device)
    left, right, rows = (
        accumulating(product.left).squeeze(1),
        accumulating(product.right).squeeze(1),
        accumulating(table.rows),
    )
    positions, looked_up = left.shape[1], rows.shape[1]
    for block in blocks(table.samples, 2 * positions * looked_up * left.element_size(), table.device):
        picked = torch.gather(
            left[block], 2, table.index[block].unsqueeze(1).expand(-1, positions, -1)
        )  # [n, t, s]
        inner = torch.bmm(right[block], rows[block].transpose(1, 2))  # [n, t, s]
        out[block] = sum_of_products(picked, inner).double()
    return out


def _written_out(a: Placed, b: Placed) -> torch.Tensor:
    """Terms of unlike kinds: both are made real, a block of samples at a time."""
    kind = accumulating_dtype(a.term.dtype)
    size = 2 * kind.itemsize * math.prod(a.layout.shape)
    out = torch.empty(a.term.samples, dtype=torch.float64, device=a.term.device)
    for block in blocks(a.term.samples, size, a.term.device):
        found = [p.layout.apply(p.term.at(block, kind).materialise(), lead=1) for p in (a, b)]
        x, y = (value.reshape(len(value), a.layout.size) for value in found)
        out[block] = sum_of_products(x, y).double()
    return out
