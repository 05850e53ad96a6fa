"""Linear maps of placed terms, applied to the factors: slices, sums over axes, products with shared tensors.

Each function returns the terms of the result, an empty list if it is zero, or None if the value would have to
be materialised. If a term is placed in a window of the parameter, the map is applied to the window only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch

from psgrad.engine.gradients.layout import AxisLayout, AxisSlice
from psgrad.engine.gradients.terms.numerics import samples_to_recompute
from psgrad.engine.gradients.terms.term import Multiply, Placed


def narrowed(placed: Placed, dim: int, start: int, step: int, length: int) -> list[Placed] | None:
    """`length` places of an axis, from `start` on."""
    layout = placed.layout
    if layout.window is None:
        inner = placed.term.narrow(layout, dim, start, step, length) if length else None
        return None if inner is None else [inner]
    overlap = layout.window[dim].narrow(layout.inner[dim], start, step, length)
    if overlap is None:
        return None
    at, run = overlap
    count = len(range(at.start, at.stop, at.step or 1))
    if not count:
        return []
    bare = layout.bare
    inner = (
        Placed(placed.term, bare)
        if count == layout.inner[dim]
        else placed.term.narrow(bare, dim, at.start, at.step or 1, count)
    )
    return None if inner is None else [_in_window(inner, layout, {dim: run})]


def summed(placed: Placed, dims: set[int]) -> list[Placed] | None:
    """The sum over some axes, which stay with length one."""
    if not _has_finite_factors(placed):
        return None
    inner = placed.term.sum(placed.layout.bare, dims)
    return (
        None if inner is None else [_in_window(inner, placed.layout, dict.fromkeys(dims, AxisSlice(0, 1, 1)))]
    )


def times(
    placed: Placed, by: torch.Tensor, product: Multiply = torch.mul, *, each: bool = False
) -> list[Placed] | None:
    """Element by element times (or over) a tensor that broadcasts to the parameter's shape; each: with a
    sample axis in front.
    """
    layout = placed.layout
    lead = int(each)
    rank = len(layout.inner)
    if by.dim() - lead > rank:
        return None
    by = by.reshape([*by.shape[:lead], *(1,) * (rank + lead - by.dim()), *by.shape[lead:]])
    strides = by.stride()
    at = [
        slice(0, 1) if size != 1 and stride == 0 else slice(None)
        for size, stride in zip(by.shape, strides, strict=True)
    ]
    if each:
        at[0] = slice(None)
    by = by[tuple(at)]
    if layout.window is not None:
        inside = [
            part if size != 1 else slice(None)
            for part, size in zip(layout.slices, by.shape[lead:], strict=True)
        ]
        by = by[(slice(None),) * lead + tuple(inside)]
    if not _is_finite(product(torch.zeros((), dtype=by.dtype, device=by.device), by)):
        return None  # zeros of the value times infinity are NaN, and factors would not give this NaN
    inner = placed.term.times(layout.bare, by, product, each=each)
    if inner is None or not _has_finite_factors(inner):
        return None
    return [_in_window(inner, layout)]


def _has_finite_factors(placed: Placed) -> bool:
    """Whether all factors are finite. Only then zeros and sums within a factor give zeros and sums of the
    value: zero times NaN or infinity is NaN, and infinities may cancel in the value. The result of a product
    is checked, because a factor may overflow.
    """
    shared_once = (factor if factor.stride(0) else factor[:1] for factor in placed.term.factors)
    return _is_finite(*(narrow(factor) for factor in shared_once))


def _is_finite(*values: torch.Tensor) -> bool:
    infinite = torch.stack([~value.isfinite().all() for value in values])
    return not len(samples_to_recompute(infinite))


def contracted(placed: Placed, dim: int, matrix: torch.Tensor) -> list[Placed] | None:
    """An axis contracted with the first of a matrix's two, [size, k]; or, with [*lead, size, k], each place
    in front with its own.
    """
    layout, whole = placed.layout, matrix
    if layout.window is not None:
        slices = layout.slices
        matrix = matrix[(*slices[: matrix.dim() - 2], slices[dim])]
    inner = placed.term.contract(layout.bare, dim, matrix)
    if inner is None or not _is_finite(whole) or not _has_finite_factors(inner):
        return None
    return [_in_window(inner, layout, {dim: AxisSlice(0, 1, matrix.shape[-1])})]


def expanded(placed: Placed, shape: Sequence[int]) -> list[Placed] | None:
    """Repeated along axes of length one, or along new axes in front, of a parameter of this shape."""
    result = placed.term.expand(placed.layout, shape) if placed.layout.window is None else None
    return None if result is None else [result]


def reshaped(placed: Placed, shape: Sequence[int]) -> Placed | None:
    """The term under another shape. If a window is not possible there, the factors are padded with zeros."""
    layout = placed.layout.reshape(shape)
    if layout is not None or placed.layout.window is None:
        return None if layout is None else Placed(placed.term, layout)
    for dim, run in enumerate(placed.layout.window):
        if not run.covers(placed.layout.inner[dim]):
            bare = Placed(placed.term, replace(placed.layout, window=None))
            index = torch.arange(
                run.start, run.end(bare.layout.inner[dim]), run.step, device=placed.term.device
            )
            filled = scattered(bare, dim, index, run.size)
            if filled is None:
                return None
            whole = _in_window(filled[0], placed.layout, {dim: AxisSlice(0, 1, run.size)})
            return reshaped(whole, shape)
    return None


def scattered(placed: Placed, dim: int, index: torch.Tensor, size: int) -> list[Placed] | None:
    """The entries of an axis, added at an index [length] in an axis of length `size`: zero elsewhere."""
    if not _has_finite_factors(placed):
        return None
    if placed.layout.window is not None:
        index = index[placed.layout.slices[dim]]
    inner = placed.term.scatter(placed.layout.bare, dim, index, size)
    return None if inner is None else [_in_window(inner, placed.layout, {dim: AxisSlice(0, 1, size)})]


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
    if all(run.covers(length) for run, length in zip(window, layout.inner, strict=True)):
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
