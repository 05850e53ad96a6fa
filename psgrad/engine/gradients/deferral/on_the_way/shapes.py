"""Casts, reshapes and transposes of deferred values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from psgrad.engine.gradients.deferral.on_the_way.each import Waiting, expanded, permuted, reshaped
from psgrad.engine.transforms.batching import Batch
from psgrad.engine.transforms.operators import Op
from psgrad.engine.transforms.rules.families import wrap_dim

aten = torch.ops.aten


def _same(batch: Batch, op: Op, waiting: Waiting, args: Any, kwargs: Any) -> Any:
    value = waiting[0]
    return value if value is not None and kwargs.get("dtype") in (None, value.dtype) else NotImplemented


def _cast(batch: Batch, op: Op, waiting: Waiting, args: Any, kwargs: Any) -> Any:
    """A weight that is cast to another precision on its way into a product (autocast): the factors stay in theirs.

    So what is asked of the gradient sums products of halves in float32, and nothing is rounded to halves in between.
    """
    value, dtype = waiting[0], kwargs.get("dtype")
    if value is None or kwargs.get("device") not in (None, value.device):
        return NotImplemented
    if dtype in (None, value.dtype):
        return value
    return replace(value, dtype=dtype) if dtype.is_floating_point else NotImplemented


def _reshape(batch: Batch, op: Op, waiting: Any, args: Any, kwargs: Any) -> Any:
    return reshaped(waiting[0], args[1])


def _squeeze(batch: Batch, op: Op, waiting: Any, args: Any, kwargs: Any) -> Any:
    value = waiting[0]
    dims = range(len(value.shape)) if len(args) == 1 else [args[1]] if isinstance(args[1], int) else args[1]
    gone = {wrap_dim(d, len(value.shape)) for d in dims}
    return reshaped(value, [s for i, s in enumerate(value.shape) if not (i in gone and s == 1)])


def _unsqueeze(batch: Batch, op: Op, waiting: Any, args: Any, kwargs: Any) -> Any:
    shape = list(waiting[0].shape)
    shape.insert(wrap_dim(args[1], len(shape) + 1), 1)
    return reshaped(waiting[0], shape)


def _permute(batch: Batch, op: Op, waiting: Any, args: Any, kwargs: Any) -> Any:
    rank = len(waiting[0].shape)
    return permuted(waiting[0], [wrap_dim(d, rank) for d in args[1]])


def _transpose(batch: Batch, op: Op, waiting: Any, args: Any, kwargs: Any) -> Any:
    rank = len(waiting[0].shape)
    dims = list(range(rank))
    if len(args) == 3:
        first, second = wrap_dim(args[1], rank), wrap_dim(args[2], rank)
    elif rank == 2:
        first, second = 0, 1
    else:
        return waiting[0]
    dims[first], dims[second] = dims[second], dims[first]
    return permuted(waiting[0], dims)


def _expand(batch: Batch, op: Op, waiting: Any, args: Any, kwargs: Any) -> Any:
    shape = list(args[1])
    shape[-len(waiting[0].shape) :] = [
        old if new == -1 else new for old, new in zip(waiting[0].shape, shape[-len(waiting[0].shape) :], strict=True)
    ]
    return expanded(batch, waiting[0], shape)


SHAPES: dict[Op, Any] = {
    aten.alias.default: _same,
    aten.detach.default: _same,
    aten.clone.default: _same,
    aten.contiguous.default: _same,
    aten._to_copy.default: _cast,
    aten.view.default: _reshape,
    aten._unsafe_view.default: _reshape,
    aten.reshape.default: _reshape,
    aten.squeeze.default: _squeeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.unsqueeze.default: _unsqueeze,
    aten.permute.default: _permute,
    aten.transpose.int: _transpose,
    aten.t.default: _transpose,
    aten.expand.default: _expand,
}
