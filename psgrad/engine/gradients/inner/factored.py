"""Inner products of products and rows by their factors: two Gram matrices between all positions of two blocks of samples, multiplied.

    <sum_t l_t r_t^T, sum_s l'_s r'_s^T> = sum_ts (l_t . l'_s) (r_t . r'_s)

For rows of a table l_t is one-hot: (l_t . l'_s) asks whether two indices are the same, or picks from the other side's factor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from psgrad.engine.gradients.inner.balance import Balanced, balanced
from psgrad.engine.gradients.inner.indexed import by_matches
from psgrad.engine.gradients.inner.tiles import SIDE_BYTES, budget, halves, steps
from psgrad.engine.gradients.terms import BLOCK_BYTES, Product, Rows, Term

# A tile is as wide as may be, but not less high than this: measured, matrix products like it better than squares.
_TALL = 256


@dataclass(frozen=True)
class Sides:
    """The terms of two sets of samples that have factors to meet, and by which of the ways two tables do."""

    left: Sequence[Term]
    right: Sequence[Term]
    match_tables: bool


def have_factors(left: Sequence[Term], right: Sequence[Term]) -> bool:
    """Whether every two terms of aligned sides can be contracted factor by factor."""
    return all(_go_together(x, y) for x in left for y in right)


def _go_together(x: Term, y: Term) -> bool:
    if isinstance(x, Product) and isinstance(y, Product):
        return x.shape == y.shape
    if isinstance(x, Rows) and isinstance(y, Rows):
        return x.shape == y.shape
    if isinstance(x, Product) and isinstance(y, Rows):
        x, y = y, x
    return isinstance(x, Rows) and isinstance(y, Product) and y.shape == (1, *x.shape)


def add_factored(out: torch.Tensor, sides: Sides, dtype: torch.dtype, *, symmetric: bool) -> None:
    """Add the inner products of `sides` to out [n, m] float64, of which the lower half is left alone where it is symmetric.

    Factors are multiplied in `dtype`. A sample with a factor that is not finite has NaN in its row or column.
    """
    n, m = out.shape
    device = out.device
    large = budget(SIDE_BYTES, device)
    for one in steps(n, large // max(_bytes(sides.left, dtype), 1)):
        x = balanced([term.at(one) for term in sides.left], dtype)
        for other in steps(m, large // max(_bytes(sides.right, dtype), 1)):
            if symmetric and other.stop <= one.start:
                continue
            same = symmetric and one == other
            y = x if same else balanced([term.at(other) for term in sides.right], dtype)
            _add_blocks(out[one, other], x, y, sides.match_tables, same)


def _bytes(terms: Sequence[Term], dtype: torch.dtype) -> int:
    """Of one sample's factors in another precision."""
    return sum(math.prod(f.shape[1:]) * dtype.itemsize for term in terms for f in term.factors if f.is_floating_point())


def _add_blocks(out: torch.Tensor, x: Balanced, y: Balanced, match_tables: bool, symmetric: bool) -> None:
    scales = x.scale(), y.scale()
    for a in x.terms:
        for b in y.terms:
            if match_tables and isinstance(a, Rows) and isinstance(b, Rows):
                part = by_matches(a, b)
                out += _scaled(part, scales, slice(None), slice(None))
            else:
                _add_pair(out, a, b, scales, symmetric)
    if not bool(x.finite.all() & y.finite.all()):
        out.masked_fill_(~(x.finite.unsqueeze(1) & y.finite.unsqueeze(0)), math.nan)


Scales = tuple[torch.Tensor | None, torch.Tensor | None]


def _add_pair(out: torch.Tensor, x: Term, y: Term, scales: Scales, symmetric: bool) -> None:
    """One pair of terms, in tiles of samples, and of positions where two samples have too many for a tile."""
    n, m = out.shape
    room = max(1, budget(BLOCK_BYTES, out.device) // (2 * x.dtype.itemsize))
    longest = max(1, math.isqrt(room))
    t, s = (min(_positions(term), longest) for term in (x, y))
    if not t or not s:
        return
    groups = max((term.shape[0] for term in (x, y) if isinstance(term, Product)), default=1)
    tile = max(1, room // (t * s * groups))  # pairs of samples
    wide = max(math.isqrt(tile), tile // _TALL)
    for rows in steps(n, halves(n, symmetric, max(1, tile // min(m, wide)))):
        right = slice(rows.start if symmetric else 0, m)  # of the diagonal
        for columns in steps(m, tile // (rows.stop - rows.start), right):
            for a in _pieces(x.at(rows), t):
                for b in _pieces(y.at(columns), s):
                    out[rows, columns] += _scaled(tile_products(a, b), scales, rows, columns)


def _scaled(part: torch.Tensor, scales: Scales, rows: slice, columns: slice) -> torch.Tensor:
    part = part.double() if any(scale is not None for scale in scales) else part
    if scales[0] is not None:
        part = part * scales[0][rows].unsqueeze(1)
    if scales[1] is not None:
        part = part * scales[1][columns].unsqueeze(0)
    return part


def _positions(term: Term) -> int:
    return term.left.shape[2] if isinstance(term, Product) else term.factors[1].shape[1]


def _pieces(term: Term, positions: int) -> Iterator[Term]:
    for piece in steps(_positions(term), positions):
        if isinstance(term, Product):
            yield Product(term.left[:, :, piece], term.right[:, :, piece])
        elif isinstance(term, Rows):
            yield Rows(term.index[:, piece], term.rows[:, piece], term.count)


def tile_products(x: Term, y: Term) -> torch.Tensor:
    """[n, m]: the inner products of n samples of one term and m of another."""
    if isinstance(x, Product) and isinstance(y, Product):
        return _products(x, y)
    if isinstance(x, Rows) and isinstance(y, Rows):
        return _tables(x, y)
    if isinstance(x, Rows) and isinstance(y, Product):
        return _table_and_product(x, y)
    assert isinstance(x, Product)
    assert isinstance(y, Rows)
    return _table_and_product(y, x).t()


def _products(x: Product, y: Product) -> torch.Tensor:
    (n, groups, t, _), (m, _, s, _) = x.left.shape, y.left.shape
    if groups == 1:
        pairs = (x.left.flatten(0, 2) @ y.left.flatten(0, 2).t()).mul_(x.right.flatten(0, 2) @ y.right.flatten(0, 2).t())
    else:
        flat = [factor.transpose(0, 1).flatten(1, 2) for factor in (x.left, y.left, x.right, y.right)]  # [g, n * t, a]
        pairs = torch.bmm(flat[0], flat[1].transpose(1, 2)).mul_(torch.bmm(flat[2], flat[3].transpose(1, 2)))
    if groups == t == s == 1:
        return pairs
    return pairs.reshape(groups, n, t, m, s).sum((0, 2, 4))


def _tables(x: Rows, y: Rows) -> torch.Tensor:
    (n, t, _), (m, s, _) = x.rows.shape, y.rows.shape
    alike = x.index.reshape(-1, 1) == y.index.reshape(1, -1)
    pairs = (x.rows.flatten(0, 1) @ y.rows.flatten(0, 1).t()).masked_fill_(~alike, 0)
    return pairs.reshape(n, t, m, s).sum((1, 3))


def _table_and_product(x: Rows, y: Product) -> torch.Tensor:
    (n, t, _), (m, _, s, _) = x.rows.shape, y.left.shape
    picked = y.left.flatten(0, 2).index_select(1, x.index.reshape(-1)).t()  # [n * t, m * s]
    pairs = (x.rows.flatten(0, 1) @ y.right.flatten(0, 2).t()).mul_(picked)
    return pairs.reshape(n, t, m, s).sum((1, 3))
