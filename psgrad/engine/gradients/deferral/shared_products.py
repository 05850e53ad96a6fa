"""Products of deferred values with shared tensors that change one factor, such as those of low-rank adapters;
slices of deferred values and their embedding into larger ones.
"""

from __future__ import annotations

from typing import Any

import torch

from psgrad.engine.gradients.deferral.propagation import (
    DeferredArguments,
    embedded,
    narrowed,
    of_each,
    reshaped,
    scaled,
    terms_of,
)
from psgrad.engine.gradients.deferred import Placed
from psgrad.engine.gradients.terms import placed as placed_maps
from psgrad.engine.transforms.batch_values import Batch
from psgrad.engine.transforms.operators import Op
from psgrad.engine.transforms.rules.families import wrap_dim

aten = torch.ops.aten


def _scale_by(exponent: int) -> Any:
    def scale(batch: Batch, op: Op, deferred: DeferredArguments, args: Any, kwargs: Any) -> Any:
        if len(args) != 2 or kwargs or (exponent < 0 and deferred[0] is None):
            return NotImplemented
        value, other = (deferred[0], args[1]) if deferred[0] is not None else (deferred[1], args[0])
        assert value is not None
        if isinstance(other, (int, float)) and not isinstance(other, bool):
            return scaled(value, float(other) ** exponent)
        if not isinstance(other, torch.Tensor) or batch.is_mapped(other) or other.dtype != value.dtype:
            return NotImplemented
        product = torch.mul if exponent > 0 else torch.div
        return of_each(value, value.shape, lambda placed: placed_maps.times(placed, other, product))

    return scale


def _negate(batch: Batch, op: Op, deferred: Any, args: Any, kwargs: Any) -> Any:
    return scaled(deferred[0], -1.0)


# -- contractions with shared tensors ------------------------------------------------------------------------


def _mm(batch: Batch, op: Op, deferred: DeferredArguments, args: Any, kwargs: Any) -> Any:
    """(sum_t left ⊗ right) @ M = sum_t left ⊗ (right @ M): the matrix goes into a factor."""
    left, right = deferred
    value, matrix = (left, args[1]) if left is not None else (right, args[0].transpose(-1, -2))
    if value is None or batch.is_mapped(matrix) or matrix.dim() != 2 or len(value.shape) != 2:
        return NotImplemented
    dim = 1 if left is not None else 0
    shape = [matrix.shape[1] if d == dim else size for d, size in enumerate(value.shape)]
    return of_each(value, shape, lambda placed: placed_maps.contracted(placed, dim, matrix))


PRODUCTS: dict[Op, Any] = {
    aten.neg.default: _negate,
    aten.mul.Tensor: _scale_by(1),
    aten.mul.Scalar: _scale_by(1),
    aten.div.Tensor: _scale_by(-1),
    aten.div.Scalar: _scale_by(-1),
    aten.mm.default: _mm,
    aten.matmul.default: _mm,
}


def _slice(batch: Batch, op: Op, deferred: Any, args: Any, kwargs: Any) -> Any:
    value, given = deferred[0], list(args[1:])
    dim, start, end, step = given + [0, None, None, 1][len(given) :]
    dim = wrap_dim(dim, len(value.shape))
    first, last, step = slice(start, end, step).indices(value.shape[dim])
    return NotImplemented if step != 1 else narrowed(value, dim, first, max(last - first, 0))


def _select(batch: Batch, op: Op, deferred: Any, args: Any, kwargs: Any) -> Any:
    value, (dim, index) = deferred[0], args[1:]
    dim = wrap_dim(dim, len(value.shape))
    part = narrowed(value, dim, index % value.shape[dim], 1)
    return (
        part
        if part is NotImplemented
        else reshaped(part, [size for d, size in enumerate(value.shape) if d != dim])
    )


def _slice_backward(batch: Batch, op: Op, deferred: Any, args: Any, kwargs: Any) -> Any:
    _, shape, dim, start, _, step = args
    return (
        NotImplemented if step != 1 else embedded(deferred[0], wrap_dim(dim, len(shape)), start, shape[dim])
    )


def _select_backward(batch: Batch, op: Op, deferred: Any, args: Any, kwargs: Any) -> Any:
    _, shape, dim, index = args
    dim = wrap_dim(dim, len(shape))
    value = reshaped(deferred[0], [1 if d == dim else size for d, size in enumerate(shape)])
    return value if value is NotImplemented else embedded(value, dim, index % shape[dim], shape[dim])


def _cat(batch: Batch, op: Op, deferred: DeferredArguments, args: Any, kwargs: Any) -> Any:
    tensors, dim = args[0], args[1] if len(args) > 1 else 0
    if len({t.dim() for t in tensors}) != 1 or len({t.dtype for t in tensors}) != 1:
        return NotImplemented
    dim = wrap_dim(dim, tensors[0].dim())
    size, start = sum(t.shape[dim] for t in tensors), 0
    terms: list[Placed] = []
    for tensor, value in zip(tensors, deferred, strict=True):
        if tensor.numel():
            terms += [
                Placed(p.term, p.layout.embed(dim, start, size)) for p in terms_of(batch, tensor, value)
            ]
        start += tensor.shape[dim]
    first = next(w for w in deferred if w is not None)
    return first.with_terms(terms, torch.Size([size if d == dim else s for d, s in enumerate(first.shape)]))


def _stack(batch: Batch, op: Op, deferred: DeferredArguments, args: Any, kwargs: Any) -> Any:
    dim = wrap_dim(args[1] if len(args) > 1 else 0, args[0][0].dim() + 1)
    return aten.cat.default([aten.unsqueeze.default(t, dim) for t in args[0]], dim)


PARTS: dict[Op, Any] = {
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.slice_backward.default: _slice_backward,
    aten.select_backward.default: _select_backward,
    aten.cat.default: _cat,
    aten.stack.default: _stack,
}
