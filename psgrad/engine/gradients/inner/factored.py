"""Inner products of products and rows by their factors: two Gram matrices between all positions of two blocks
of samples, multiplied.

    <sum_t l_t r_t^T, sum_s l'_s r'_s^T> = sum_ts (l_t . l'_s) (r_t . r'_s)

For rows of a table l_t is one-hot: (l_t . l'_s) compares two indices, or selects from the other side's
factor.

First the factors are scaled to sizes near one, so that products of four of them stay inside the range of
float32. Powers of two are moved between the two factors of each position. If a whole gradient is far from
one, a power of two of the sample is stored separately. Only digits that are negligible compared with the same
sample's other positions are lost.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from psgrad.engine.gradients.inner.regions import SIDE_BYTES, budget, halves, steps
from psgrad.engine.gradients.terms import BLOCK_BYTES, Term
from psgrad.engine.gradients.terms.numerics import OF_ZERO

# Sums of products of four factors whose sizes are within these powers of two of one are far from float32's
# limits, 2^-126 and 2^127.
_COMFORTABLE = 40


@dataclass(frozen=True)
class Balanced:
    """Terms in the requested precision, times 2^-exponents.

    Attributes:
        terms: products and rows.
        exponents: [n]; None where they are all zero.
        finite: [n], whether all of a sample's factors are.
    """

    terms: list[Term]
    exponents: torch.Tensor | None
    finite: torch.Tensor

    def scale(self) -> torch.Tensor | None:
        """[n] float64: the factors by which a sample's balanced terms are multiplied to restore their
        size.
        """
        return None if self.exponents is None else torch.exp2(self.exponents.double())


def balanced(terms: Sequence[Term], dtype: torch.dtype) -> Balanced:
    """Products and rows of the same samples in `dtype`, balanced if it is float32. The range of float64 is
    large enough.
    """
    exponents_and_finite = [term.exponents() for term in terms]
    finite = torch.stack([finite for *_, finite in exponents_and_finite]).all(0)
    wide = [term.at(slice(None), dtype) for term in terms]
    if dtype == torch.float64:
        return Balanced(wide, None, finite)
    bounds = torch.stack(
        [
            _bound(term, first, second)
            for term, (first, second, _) in zip(terms, exponents_and_finite, strict=True)
        ]
    ).amax(0)
    bounds = bounds.where(bounds > OF_ZERO // 2, 0)
    if not bounds.numel() or int(bounds.abs().max()) <= _COMFORTABLE:
        taken, target = None, torch.zeros_like(bounds)
    else:
        taken = target = bounds
    spread = [
        term.spread(first, second, target)
        for term, (first, second, _) in zip(wide, exponents_and_finite, strict=True)
    ]
    return Balanced(spread, taken, finite)


def _bound(term: Term, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """[n]: the exponent of a sample's largest position."""
    positions = (first + second).flatten(1)
    if not positions.shape[1]:
        return positions.new_full((term.samples,), OF_ZERO)
    return positions.amax(1)


# A tile is as wide as possible, but at least this high: matrix products of this shape were measured to be
# faster than squares.
_TALL = 256


@dataclass(frozen=True)
class Sides:
    """The terms of two sets of samples with factors, and the order of contraction for two tables."""

    left: Sequence[Term]
    right: Sequence[Term]
    match_tables: bool


def have_factors(left: Sequence[Term], right: Sequence[Term]) -> bool:
    """Whether every two terms of aligned sides can be contracted factor by factor."""
    return all(x.has_tile_products_with(y) or y.has_tile_products_with(x) for x in left for y in right)


def add_factored(out: torch.Tensor, sides: Sides, dtype: torch.dtype, *, symmetric: bool) -> None:
    """Add the inner products of `sides` to out [n, m] float64; if it is symmetric, not to its lower half.

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
    """The bytes of one sample's factors in another precision."""
    return sum(
        math.prod(f.shape[1:]) * dtype.itemsize
        for term in terms
        for f in term.factors
        if f.is_floating_point()
    )


def _add_blocks(out: torch.Tensor, x: Balanced, y: Balanced, match_tables: bool, symmetric: bool) -> None:
    scales = x.scale(), y.scale()
    for a in x.terms:
        for b in y.terms:
            if match_tables and a.matches_with(b):
                part = a.match_products(b)
                out += _scaled(part, scales, slice(None), slice(None))
            else:
                _add_pair(out, a, b, scales, symmetric)
    if not bool(x.finite.all() & y.finite.all()):
        out.masked_fill_(~(x.finite.unsqueeze(1) & y.finite.unsqueeze(0)), math.nan)


Scales = tuple[torch.Tensor | None, torch.Tensor | None]


def _add_pair(out: torch.Tensor, x: Term, y: Term, scales: Scales, symmetric: bool) -> None:
    """One pair of terms, in tiles of samples, and of positions where two samples have too many for a tile."""
    n, m = out.shape
    limit = max(1, budget(BLOCK_BYTES, out.device) // (2 * x.dtype.itemsize))
    longest = max(1, math.isqrt(limit))
    t, s = (min(term.sizes[1], longest) for term in (x, y))
    if not t or not s:
        return
    groups = max(x.sizes[0], y.sizes[0])
    tile = max(1, limit // (t * s * groups))  # pairs of samples
    wide = max(math.isqrt(tile), tile // _TALL)
    for rows in steps(n, halves(n, symmetric, max(1, tile // min(m, wide)))):
        right = slice(rows.start if symmetric else 0, m)  # of the diagonal
        for columns in steps(m, tile // (rows.stop - rows.start), right):
            for a in _pieces(x.at(rows), t):
                for b in _pieces(y.at(columns), s):
                    out[rows, columns] += _scaled(_tile_products(a, b), scales, rows, columns)


def _scaled(part: torch.Tensor, scales: Scales, rows: slice, columns: slice) -> torch.Tensor:
    part = part.double() if any(scale is not None for scale in scales) else part
    if scales[0] is not None:
        part = part * scales[0][rows].unsqueeze(1)
    if scales[1] is not None:
        part = part * scales[1][columns].unsqueeze(0)
    return part


def _pieces(term: Term, positions: int) -> Iterator[Term]:
    for piece in steps(term.sizes[1], positions):
        yield term.at_positions(piece)


def _tile_products(x: Term, y: Term) -> torch.Tensor:
    """[n, m]: the inner products of n samples of one term and m of another."""
    tile = x.tile_products(y)
    if tile is not None:
        return tile
    tile = y.tile_products(x)
    assert tile is not None, "have_factors"
    return tile.t()
