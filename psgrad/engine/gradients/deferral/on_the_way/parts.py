"""Parts of deferred values, and deferred values that are parts of larger ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from psgrad.engine.gradients.deferral import linear
from psgrad.engine.gradients.deferral.on_the_way.each import Waiting, embedded, narrowed, of_each, reshaped
from psgrad.engine.gradients.deferral.on_the_way.sums import terms_of
from psgrad.engine.gradients.placed import DeferredGradient, Placed
from psgrad.engine.transforms.batching import Batch
from psgrad.engine.transforms.operators import Op
from psgrad.engine.transforms.rules.families import wrap_dim

aten = torch.ops.aten


def _slice(batch: Batch, op: Op, waiting: Any, args: Any, kwargs: Any) -> Any:
    value, given = waiting[0], list(args[1:])
    dim, start, end, step = given + [0, None, None, 1][len(given) :]
    dim = wrap_dim(dim, len(value.shape))
    first, last, step = slice(start, end, step).indices(value.shape[dim])
    return narrowed(batch, value, dim, first, step, len(range(first, last, step)))


def _select(batch: Batch, op: Op, waiting: Any, args: Any, kwargs: Any) -> Any:
    value, (dim, index) = waiting[0], args[1:]
    dim = wrap_dim(dim, len(value.shape))
    part = narrowed(batch, value, dim, index % value.shape[dim], 1, 1)
    return part if part is NotImplemented else reshaped(part, [size for d, size in enumerate(value.shape) if d != dim])


def _slice_backward(batch: Batch, op: Op, waiting: Any, args: Any, kwargs: Any) -> Any:
    _, shape, dim, start, _, step = args
    return embedded(waiting[0], wrap_dim(dim, len(shape)), start, step, shape[dim])


def _select_backward(batch: Batch, op: Op, waiting: Any, args: Any, kwargs: Any) -> Any:
    _, shape, dim, index = args
    dim = wrap_dim(dim, len(shape))
    value = reshaped(waiting[0], [1 if d == dim else size for d, size in enumerate(shape)])
    return value if value is NotImplemented else embedded(value, dim, index % shape[dim], 1, shape[dim])


def _index_select_backward(batch: Batch, op: Op, waiting: Any, args: Any, kwargs: Any) -> Any:
    _, shape, dim, index = args
    if batch.is_mapped(index):
        return NotImplemented
    return _scattered(batch, waiting[0], shape, wrap_dim(dim, len(shape)), index)


def _scattered(batch: Batch, value: DeferredGradient, shape: Sequence[int], dim: int, index: torch.Tensor) -> Any:
    return of_each(batch, value, shape, lambda placed: linear.scattered(placed, dim, index, shape[dim]))


def _pad(batch: Batch, op: Op, waiting: Any, args: Any, kwargs: Any) -> Any:
    """With zeros, or by cutting off."""
    value, pad = waiting[0], args[1]
    if len(args) > 2 and args[2] != 0:
        return NotImplemented
    for axis in range(len(pad) // 2):
        dim, (before, behind) = len(value.shape) - 1 - axis, pad[2 * axis : 2 * axis + 2]
        kept = value.shape[dim] + min(before, 0) + min(behind, 0)
        value = narrowed(batch, value, dim, max(-before, 0), 1, kept)
        if value is NotImplemented:
            return value
        value = embedded(value, dim, max(before, 0), 1, kept + max(before, 0) + max(behind, 0))
        if value is NotImplemented:
            return value
    return value


def _cat(batch: Batch, op: Op, waiting: Waiting, args: Any, kwargs: Any) -> Any:
    tensors, dim = args[0], args[1] if len(args) > 1 else 0
    if len({t.dim() for t in tensors}) != 1 or len({t.dtype for t in tensors}) != 1:
        return NotImplemented
    dim = wrap_dim(dim, tensors[0].dim())
    size, start = sum(t.shape[dim] for t in tensors), 0
    terms: list[Placed] = []
    for tensor, value in zip(tensors, waiting, strict=True):
        if tensor.numel():
            terms += [Placed(p.term, p.layout.embed(dim, start, 1, size)) for p in terms_of(batch, tensor, value)]
        start += tensor.shape[dim]
    known = next(w for w in waiting if w is not None)
    return known.with_terms(terms, torch.Size([size if d == dim else s for d, s in enumerate(known.shape)]))


def _stack(batch: Batch, op: Op, waiting: Waiting, args: Any, kwargs: Any) -> Any:
    dim = wrap_dim(args[1] if len(args) > 1 else 0, args[0][0].dim() + 1)
    return aten.cat.default([aten.unsqueeze.default(t, dim) for t in args[0]], dim)


def _flip(batch: Batch, op: Op, waiting: Any, args: Any, kwargs: Any) -> Any:
    value = waiting[0]
    for dim in args[1]:
        dim = wrap_dim(dim, len(value.shape))
        size = value.shape[dim]
        backwards = torch.arange(size - 1, -1, -1, device=value.device)
        value = _scattered(batch, value, value.shape, dim, backwards)
        if value is NotImplemented:
            return value
    return value


PARTS: dict[Op, Any] = {
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.slice_backward.default: _slice_backward,
    aten.select_backward.default: _select_backward,
    aten.index_select_backward.default: _index_select_backward,
    aten.constant_pad_nd.default: _pad,
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.flip.default: _flip,
}
