"""Inner products of products and rows by their factors: two Gram matrices between all positions of two blocks
of samples, multiplied.

    <sum_t l_t r_t^T, sum_s l'_s r'_s^T> = sum_ts (l_t . l'_s) (r_t . r'_s)

For rows of a table l_t is one-hot: (l_t . l'_s) compares two indices, or selects from the other side's
factor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from psgrad.engine.gradients.inner.regions import SIDE_BYTES, budget, halves, steps
from psgrad.engine.gradients.terms import BLOCK_BYTES, Lookup, OuterProducts, Product, Term

# A tile is as wide as possible, but at least this high: matrix products of this shape were measured to be
# faster than squares.
_TALL = 256


def outer_products(terms: Sequence[Term]) -> list[OuterProducts]:
    """The terms that are sums of outer products of stored factors."""
    return [term for term in terms if isinstance(term, OuterProducts)]


def have_factors(terms: Sequence[Term]) -> bool:
    """Whether every two of these aligned terms can be contracted factor by factor."""
    found = outer_products(terms)
    return len(found) == len(terms) and len({term.matrix_shape for term in found}) == 1


def add_factored(
    out: torch.Tensor,
    left: Sequence[OuterProducts],
    right: Sequence[OuterProducts],
    dtype: torch.dtype,
    *,
    symmetric: bool,
) -> None:
    """Add the inner products of the sums of terms of both sides to out [n, m] float64; if it is symmetric,
    not to its lower half. Factors are multiplied in `dtype`.
    """
    n, m = out.shape
    device = out.device
    large = budget(SIDE_BYTES, device)
    for one in steps(n, large // max(_bytes(left, dtype), 1)):
        x = [term.at(one, dtype) for term in left]
        for other in steps(m, large // max(_bytes(right, dtype), 1)):
            if symmetric and other.stop <= one.start:
                continue
            same = symmetric and one == other
            y = x if same else [term.at(other, dtype) for term in right]
            for a in x:
                for b in y:
                    _add_pair(out[one, other], a, b, same)


def _bytes(terms: Sequence[Term], dtype: torch.dtype) -> int:
    """The bytes of one sample's factors in another precision."""
    return sum(
        math.prod(f.shape[1:]) * dtype.itemsize
        for term in terms
        for f in term.factors
        if f.is_floating_point()
    )


def _add_pair(out: torch.Tensor, x: OuterProducts, y: OuterProducts, symmetric: bool) -> None:
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
                    out[rows, columns] += _tile_products(a, b)


def _pieces(term: OuterProducts, positions: int) -> Iterator[OuterProducts]:
    for piece in steps(term.sizes[1], positions):
        yield term.at_positions(piece)


def _tile_products(x: OuterProducts, y: OuterProducts) -> torch.Tensor:
    """[n, m]: the inner products of n samples of one term and m of another."""
    if isinstance(x, Product):
        return x.tile_products(y) if isinstance(y, Product) else _tile_products(y, x).t()
    assert isinstance(x, Lookup)
    assert isinstance(y, Lookup | Product)
    return x.tile_products(y)
