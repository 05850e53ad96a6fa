"""The operators that make deferred values, because they would materialise the gradient of a weight for each
sample.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from psgrad.engine.gradients.deferral.images import image_of_product
from psgrad.engine.gradients.deferred import DeferredGradient, Placed
from psgrad.engine.gradients.layout import AxisLayout
from psgrad.engine.gradients.terms import (
    Convolution,
    Dense,
    GroupedProduct,
    Lookup,
    Product,
    narrow,
)
from psgrad.engine.transforms.batch_values import Batch
from psgrad.engine.transforms.operators import Op
from psgrad.engine.transforms.rules.convolution_weights import Geometry
from psgrad.engine.transforms.rules.families import wrap_dim
from psgrad.engine.transforms.rules.grouped_matmul import group_of_rows, grouped_outer

aten = torch.ops.aten


def _mm(batch: Batch, op: Op, a: torch.Tensor, b: torch.Tensor) -> Any:
    left, right = batch.physical(a).transpose(1, 2), batch.physical(b)  # [n, t, rows], [n, t, columns]
    if left.dtype != right.dtype or left.dtype.is_complex:
        return NotImplemented
    return DeferredGradient.of(
        Product(left.unsqueeze(1), right.unsqueeze(1)), (left.shape[2], right.shape[2])
    )


def _bmm(batch: Batch, op: Op, a: torch.Tensor, b: torch.Tensor) -> Any:
    left, right = batch.physical(a).transpose(2, 3), batch.physical(b)
    if left.dtype != right.dtype or left.dtype.is_complex:
        return NotImplemented
    term = Product(left, right)
    return DeferredGradient.of(term, term.shape)


def _grouped_outer(batch: Batch, op: Op, a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor) -> Any:
    left, right = batch.physical(a), batch.physical(b)
    if left.dtype != right.dtype or left.dtype.is_complex:
        return NotImplemented
    count = ends.shape[0]
    index = group_of_rows(batch.physical(ends), left.shape[1])
    left = left.masked_fill((index == count).unsqueeze(2), 0)  # rows behind the last group
    term = GroupedProduct(index.clamp(max=count - 1), left, right, count)
    return DeferredGradient.of(term, term.shape)


def _convolution_backward(
    batch: Batch, op: Op, g: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias_sizes: Any, *args: Any
) -> Any:
    if list(args[-1]) != [False, True, False] or g.dtype != x.dtype or g.dtype.is_complex:
        return NotImplemented
    geometry = Geometry.of(args[:-1], weight.dim() - 2)
    term = Convolution(batch.physical(g), batch.physical(x), torch.Size(weight.shape), geometry)
    return None, DeferredGradient.of(term, term.shape), None


def _embedding_backward(
    batch: Batch, op: Op, g: torch.Tensor, index: torch.Tensor, count: int, padding_idx: int, scale: bool
) -> Any:
    if g.dtype.is_complex:
        return NotImplemented
    rows, places = batch.physical(g), batch.physical(index)
    n, width = rows.shape[0], rows.shape[-1]
    rows, places = rows.reshape(n, index.numel(), width), places.reshape(n, index.numel())
    if padding_idx >= 0:
        rows = rows.masked_fill((places == padding_idx).unsqueeze(-1), 0)
    term = Lookup(places, rows, count)
    return DeferredGradient.of(term, term.shape)


# -- parts of a parameter, whose gradient is zero elsewhere --------------------------------------------------


def _in_part(batch: Batch, g: torch.Tensor, dim: int, start: int, size: int) -> Any:
    """A stored value in a window, unless it is a vector."""
    shape = list(g.shape)
    if not batch.is_mapped(g) or len(shape) < 2 or shape[dim] == size or not g.numel() or g.dtype.is_complex:
        return NotImplemented
    shape[dim] = size
    if sum(length > 1 for length in shape) < 2:
        return NotImplemented
    term = Dense(batch.physical(g))
    layout = AxisLayout.identity(term.shape).embed(dim, start, size)
    return DeferredGradient((Placed(term, layout),), torch.Size(shape), g.dtype, g.device)


def _slice_backward(
    batch: Batch, op: Op, g: torch.Tensor, shape: Sequence[int], dim: int, start: int, end: int, step: int
) -> Any:
    dim = wrap_dim(dim, len(shape))
    return NotImplemented if step != 1 else _in_part(batch, g, dim, start, shape[dim])


def _select_backward(
    batch: Batch, op: Op, g: torch.Tensor, shape: Sequence[int], dim: int, index: int
) -> Any:
    dim = wrap_dim(dim, len(shape))
    return _in_part(batch, aten.unsqueeze.default(g, dim), dim, index % shape[dim], shape[dim])


def _index_select_backward(
    batch: Batch, op: Op, g: torch.Tensor, shape: Sequence[int], dim: int, index: torch.Tensor
) -> Any:
    """Slices of a weight at an index of each sample, or at a shared index that is shorter than the axis."""
    if not shape or not g.numel() or g.dtype.is_complex or not (batch.is_mapped(g) or batch.is_mapped(index)):
        return NotImplemented
    dim = wrap_dim(dim, len(shape))
    if not batch.is_mapped(index) and index.numel() >= shape[dim]:
        return NotImplemented
    n, order = batch.size, [dim, *(d for d in range(len(shape)) if d != dim)]
    rows = batch.physical(g).permute(0, *(d + 1 for d in order))
    places = batch.physical(index).reshape(n, index.numel())
    term = Lookup(places, rows.reshape(n, places.shape[1], math.prod(rows.shape[2:])), shape[dim])
    layout = AxisLayout.identity(term.shape).reshape([shape[d] for d in order])
    layout = layout.permute([order.index(d) for d in range(len(shape))]) if layout is not None else None
    return (
        NotImplemented
        if layout is None
        else DeferredGradient((Placed(term, layout),), torch.Size(shape), g.dtype, g.device)
    )


# -- products, element by element ----------------------------------------------------------------------------


def _times(batch: Batch, op: Op, a: Any, b: Any) -> Any:
    """An elementwise product in which one value is constant along some axes (such as a sum's cotangent)."""
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)) or (a.dim() < 2 and b.dim() < 2):
        return NotImplemented
    if a.dtype != b.dtype or a.dtype.is_complex or not a.is_floating_point():
        return NotImplemented
    if batch.is_mapped(a) and batch.is_mapped(b):
        return _outer(batch, a, b) if op is not aten.div.Tensor else NotImplemented
    if op is aten.div.Tensor and not batch.is_mapped(a):
        return NotImplemented
    own, shared = (a, b) if batch.is_mapped(a) else (b, a)
    shape = torch.broadcast_shapes(a.shape, b.shape)
    coefficients = narrow(batch.aligned(own, len(shape)))
    if shared.shape != shape or coefficients[:1].numel() >= math.prod(shape):
        return NotImplemented
    return image_of_product(op, (a, b), 0 if own is a else 1, coefficients, shape)


def _outer(batch: Batch, a: torch.Tensor, b: torch.Tensor) -> Any:
    """An outer product by broadcasting: axes of both operands are groups, others are rows or columns."""
    rank = max(a.dim(), b.dim())
    left, right = narrow(batch.aligned(a, rank)), narrow(batch.aligned(b, rank))
    n = left.shape[0]
    sizes = list(torch.broadcast_shapes(a.shape, b.shape))
    lefts = [d for d in range(rank) if sizes[d] > 1 and right.shape[d + 1] == 1]
    rights = [d for d in range(rank) if sizes[d] > 1 and left.shape[d + 1] == 1]
    both = [d for d in range(rank) if left.shape[d + 1] == right.shape[d + 1] > 1]
    ones = [d for d in range(rank) if sizes[d] == 1]
    rows, columns, groups = (math.prod(sizes[d] for d in some) for some in (lefts, rights, both))
    if rows * columns < 2 * (rows + columns) or set(lefts) & set(rights):
        return NotImplemented
    order = [*both, *lefts, *rights, *ones]
    left, right = (x.permute(0, *(d + 1 for d in order)) for x in (left, right))
    term = Product(left.reshape(n, groups, 1, rows), right.reshape(n, groups, 1, columns))
    layout = AxisLayout.identity(term.shape).reshape([sizes[d] for d in order])
    layout = layout.permute([order.index(d) for d in range(rank)]) if layout is not None else None
    if layout is None:
        return NotImplemented
    return DeferredGradient((Placed(term, layout),), torch.Size(sizes), a.dtype, a.device)


ENTRY_RULES: dict[Op, Any] = {
    aten.mm.default: _mm,
    aten.bmm.default: _bmm,
    grouped_outer: _grouped_outer,
    aten.convolution_backward.default: _convolution_backward,
    aten.embedding_dense_backward.default: _embedding_backward,
    aten.slice_backward.default: _slice_backward,
    aten.select_backward.default: _select_backward,
    aten.index_select_backward.default: _index_select_backward,
    aten.mul.Tensor: _times,
    aten.div.Tensor: _times,
}
