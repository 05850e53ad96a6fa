"""Linear maps of placed terms that are maps of their factors: slices, products with shared tensors.

Each function returns the term of the result, or None if it is no such map. A term in a window of the
parameter has none.
"""

from __future__ import annotations

import math

import torch

from psgrad.engine.gradients.layout import AxisLayout
from psgrad.engine.gradients.terms.dense import Dense
from psgrad.engine.gradients.terms.numerics import samples_to_recompute
from psgrad.engine.gradients.terms.product import Product
from psgrad.engine.gradients.terms.term import Multiply, Placed, Term


def narrowed(placed: Placed, dim: int, start: int, length: int) -> Placed | None:
    """`length` places of an axis, from `start` on."""
    some = slice(start, start + length)
    if placed.layout.window is not None or not length:
        return None
    if isinstance(placed.term, Dense):
        value = placed.materialise()
        return Placed.plain(Dense(value[(slice(None),) * (dim + 1) + (some,)], lost_at=placed.term.lost_at))
    term, rank = _aligned(placed), len(placed.layout.inner)
    return None if term is None else _placed(term.narrow(dim + len(term.shape) - rank, some), rank)


def _aligned(placed: Placed) -> Term | None:
    """The term, where its axes are the layout's, but for one of length one before them, and this needs no
    computation; else None.
    """
    term, inner = oriented(placed), tuple(placed.layout.inner)
    return term if term is not None and term.shape in (inner, (1, *inner)) else None


def _placed(term: Term | None, rank: int) -> Placed | None:
    """A term, placed under its last axes, so many."""
    if term is None:
        return None
    layout = AxisLayout.identity(term.shape).reshape(term.shape[len(term.shape) - rank :])
    return None if layout is None else Placed(term, layout)


def times(placed: Placed, by: torch.Tensor, product: Multiply = torch.mul) -> Placed | None:
    """Element by element times (or over) a tensor that broadcasts to the parameter's shape."""
    term, rank = _aligned(placed), len(placed.layout.inner)
    if by.dim() > rank or term is None:
        return None
    by = by.reshape([*(1,) * (rank - by.dim()), *by.shape])
    by = by[tuple(slice(0, 1) if not stride else slice(None) for stride in by.stride())]
    if not are_finite(product(torch.zeros((), dtype=by.dtype, device=by.device), by)):
        return None  # zeros of the value times infinity are NaN, and factors would not give this NaN
    return _if_finite(
        _placed(term.times(by.reshape((1,) * (len(term.shape) - rank) + by.shape), product), rank)
    )


def contracted(placed: Placed, dim: int, by: torch.Tensor) -> Placed | None:
    """An axis contracted with the first of a matrix's two, [size, k]."""
    term, rank = _aligned(placed), len(placed.layout.inner)
    if term is None or not are_finite(by):
        return None
    return _if_finite(_placed(term.contract(dim + len(term.shape) - rank, by), rank))


def _if_finite(found: Placed | None) -> Placed | None:
    """The term, if all factors are finite. Only then zeros and sums within a factor give zeros and sums of
    the value: zero times NaN or infinity is NaN, and infinities may cancel in the value. The result of a
    product is checked, because a factor may overflow.
    """
    if found is None:
        return None
    shared_once = (factor if factor.stride(0) else factor[:1] for factor in found.term.factors)
    return found if are_finite(*(narrow(factor) for factor in shared_once)) else None


def are_finite(*values: torch.Tensor) -> bool:
    """Whether all numbers are finite; in a recorded program a guard."""
    infinite = torch.stack([~value.isfinite().all() for value in values])
    return not len(samples_to_recompute(infinite))


def oriented(placed: Placed) -> Term | None:
    """The term with its elements in the parameter's order, transposed if necessary; None if they are in
    another order, or in a part of the parameter.
    """
    term, layout = placed.term, placed.layout
    if layout.window is not None:
        return None
    order = [i for i in layout.order if layout.atoms[i] != 1]
    if order == sorted(order):
        return term
    if not isinstance(term, Product) or term.shape[0] != 1:
        return None
    height = term.shape[-2]
    rows = [i for i in sorted(order) if math.prod(layout.atoms[: i + 1]) <= height]
    columns = [i for i in sorted(order) if i not in rows]
    whole = order == columns + rows and math.prod(layout.atoms[i] for i in rows) == height
    return Product(term.right, term.left) if whole else None


def narrow(value: torch.Tensor) -> torch.Tensor:
    """A value [n, ...] with length one along the axes (except the first) along which it was expanded."""
    strides = value.stride()[1:]
    return (
        value[(slice(None), *(slice(0, 1) if stride == 0 else slice(None) for stride in strides))]
        if 0 in strides
        else value
    )
