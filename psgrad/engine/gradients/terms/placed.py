"""Linear maps of placed terms that are maps of their factors: slices, products with shared tensors.

Each function returns the terms of the result, an empty list if it is zero, or None if it is no such map. If a
term is placed in a window of the parameter, the map is applied to the window only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

import torch

from psgrad.engine.gradients.layout import AxisLayout, AxisSlice
from psgrad.engine.gradients.terms.dense import Dense
from psgrad.engine.gradients.terms.numerics import samples_to_recompute
from psgrad.engine.gradients.terms.term import Multiply, Placed, Term


def narrowed(placed: Placed, dim: int, start: int, length: int) -> list[Placed] | None:
    """`length` places of an axis, from `start` on."""
    layout = placed.layout
    if layout.window is None:
        inner = _narrowed(placed, dim, slice(start, start + length)) if length else None
        return None if inner is None else [inner]
    some, run = layout.window[dim].narrow(layout.inner[dim], start, length)
    count = some.stop - some.start
    if not count:
        return []
    bare = Placed(placed.term, layout.bare)
    inner = bare if count == layout.inner[dim] else _narrowed(bare, dim, some)
    return None if inner is None else [_in_window(inner, layout, {dim: run})]


def _narrowed(placed: Placed, dim: int, some: slice) -> Placed | None:
    if placed.term.stored_value is not None:
        value = placed.layout.apply(placed.term.stored_value, lead=1)
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


def times(placed: Placed, by: torch.Tensor, product: Multiply = torch.mul) -> list[Placed] | None:
    """Element by element times (or over) a tensor that broadcasts to the parameter's shape."""
    layout, rank = placed.layout, len(placed.layout.inner)
    if by.dim() > rank:
        return None
    by = by.reshape([*(1,) * (rank - by.dim()), *by.shape])
    by = by[tuple(slice(0, 1) if not stride else slice(None) for stride in by.stride())]
    if layout.window is not None:
        by = by[
            tuple(
                part if size != 1 else slice(None) for part, size in zip(layout.slices, by.shape, strict=True)
            )
        ]
    if not are_finite(product(torch.zeros((), dtype=by.dtype, device=by.device), by)):
        return None  # zeros of the value times infinity are NaN, and factors would not give this NaN
    term = _aligned(Placed(placed.term, layout.bare))
    if term is None:
        return None
    inner = _placed(term.times(by.reshape((1,) * (len(term.shape) - rank) + by.shape), product), rank)
    return None if inner is None or not _has_finite_factors(inner) else [_in_window(inner, layout)]


def contracted(placed: Placed, dim: int, by: torch.Tensor) -> list[Placed] | None:
    """An axis contracted with the first of a matrix's two, [size, k]."""
    layout = placed.layout
    inside = by[layout.slices[dim]] if layout.window is not None else by
    term, rank = _aligned(Placed(placed.term, layout.bare)), len(layout.inner)
    inner = None if term is None else _placed(term.contract(dim + len(term.shape) - rank, inside), rank)
    if inner is None or not are_finite(by) or not _has_finite_factors(inner):
        return None
    return [_in_window(inner, layout, {dim: AxisSlice(0, by.shape[1])})]


def _has_finite_factors(placed: Placed) -> bool:
    """Whether all factors are finite. Only then zeros and sums within a factor give zeros and sums of the
    value: zero times NaN or infinity is NaN, and infinities may cancel in the value. The result of a product
    is checked, because a factor may overflow.
    """
    shared_once = (factor if factor.stride(0) else factor[:1] for factor in placed.term.factors)
    return are_finite(*(narrow(factor) for factor in shared_once))


def are_finite(*values: torch.Tensor) -> bool:
    """Whether all numbers are finite; in a recorded program a guard."""
    infinite = torch.stack([~value.isfinite().all() for value in values])
    return not len(samples_to_recompute(infinite))


def reshaped(placed: Placed, shape: tuple[int, ...]) -> Placed | None:
    """The term under another shape; None if its window is no product of runs there."""
    layout = placed.layout.reshape(shape)
    return None if layout is None else Placed(placed.term, layout)


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
    swapped = term.transposed()
    if swapped is None:
        return None
    height = term.shape[-2]
    rows = [i for i in sorted(order) if math.prod(layout.atoms[: i + 1]) <= height]
    columns = [i for i in sorted(order) if i not in rows]
    whole = order == columns + rows and math.prod(layout.atoms[i] for i in rows) == height
    return swapped if whole else None


def _in_window(
    placed: Placed, before: AxisLayout, new: Mapping[int, AxisSlice] = MappingProxyType({})
) -> Placed:
    """A term after a map, in the window, if any, of its layout before; new: the runs of the axes that the map
    has changed.
    """
    layout = placed.layout
    if before.window is None:
        return placed
    window = tuple(new.get(dim, run) for dim, run in enumerate(before.window))
    if all(run.size == length for run, length in zip(window, layout.inner, strict=True)):
        return Placed(placed.term, layout.bare)
    return Placed(placed.term, replace(layout, window=window))


def narrow(value: torch.Tensor) -> torch.Tensor:
    """A value [n, ...] with length one along the axes (except the first) along which it was expanded."""
    strides = value.stride()[1:]
    return (
        value[(slice(None), *(slice(0, 1) if stride == 0 else slice(None) for stride in strides))]
        if 0 in strides
        else value
    )
