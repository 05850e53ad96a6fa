"""Products of deferred values with shared tensors, element by element and as matrices; slices of deferred
values and their embedding into larger ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from psgrad.engine.gradients.deferral.propagation import (
    DeferredArguments,
    contracted,
    embedded,
    expanded,
    narrowed,
    of_each,
    reshaped,
    scaled,
    terms_of,
    times,
)
from psgrad.engine.gradients.deferred import DeferredGradient, Placed
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
        if not isinstance(other, torch.Tensor) or batch.is_mapped(other) or not other.is_floating_point():
            return NotImplemented
        if other.dim():
            value = (
                expanded(batch, value, torch.broadcast_shapes(other.shape, value.shape))
                if other.dtype == value.dtype
                else NotImplemented
            )
        if value is NotImplemented:
            return NotImplemented
        return times(batch, value, other, torch.mul if exponent > 0 else torch.div)

    return scale


def _negate(batch: Batch, op: Op, deferred: Any, args: Any, kwargs: Any) -> Any:
    return scaled(deferred[0], -1.0)


def _masked_fill(batch: Batch, op: Op, deferred: Any, args: Any, kwargs: Any) -> Any:
    """A product with zeros and ones. `times` refuses NaN and infinity, which zeros would not remove."""
    value, (mask, filling) = deferred[0], args[1:]
    if (
        value is None
        or filling != 0
        or batch.is_mapped(mask)
        or torch.broadcast_shapes(mask.shape, value.shape) != value.shape
    ):
        return NotImplemented
    return times(batch, value, (~mask).to(value.dtype))


def _where(batch: Batch, op: Op, deferred: Any, args: Any, kwargs: Any) -> Any:
    """A choice between a deferred value and zero."""
    mask, *choices = args
    place = 0 if deferred[1] is not None else 1
    value, other = deferred[1 + place], choices[1 - place]
    is_zero = (
        other == 0
        if isinstance(other, (int, float))
        else other.dim() == 0 and not batch.is_mapped(other) and _is_zero(other)
    )
    if (
        batch.is_mapped(mask)
        or not is_zero
        or value is None
        or torch.broadcast_shapes(mask.shape, value.shape) != value.shape
    ):
        return NotImplemented
    return times(batch, value, (mask if place == 0 else ~mask).to(value.dtype))


def _is_zero(number: torch.Tensor) -> bool:
    """Whether a number is known to be zero without waiting for a device."""
    return number.device.type == "cpu" and type(number) is torch.Tensor and number.item() == 0


def _triangle(batch: Batch, op: Op, deferred: Any, args: Any, kwargs: Any) -> Any:
    value = deferred[0]
    return times(
        batch, value, op(torch.ones(value.shape[-2:], dtype=value.dtype, device=value.device), *args[1:])
    )


def _derivative(batch: Batch, op: Op, deferred: Any, args: Any, kwargs: Any) -> Any:
    """An elementwise function of a weight: the operator on ones is its derivative."""
    value = deferred[0]
    if value is None or any(w is not None for w in deferred[1:]) or any(batch.is_mapped(a) for a in args[1:]):
        return NotImplemented
    ones = torch.ones(value.shape, dtype=value.dtype, device=value.device)
    return times(batch, value, op(ones, *args[1:], **kwargs))


def _softmax(batch: Batch, op: Op, deferred: Any, args: Any, kwargs: Any) -> Any:
    g, out, dim, dtype = args
    if deferred[0] is None or batch.is_mapped(out) or g.dtype != dtype:
        return NotImplemented
    inner = aten.mul.Tensor(g, out)
    return aten.sub.Tensor(inner, aten.mul.Tensor(aten.sum.dim_IntList(inner, [dim], True), out))


def _log_softmax(batch: Batch, op: Op, deferred: Any, args: Any, kwargs: Any) -> Any:
    g, out, dim, dtype = args
    if deferred[0] is None or batch.is_mapped(out) or g.dtype != dtype:
        return NotImplemented
    return aten.sub.Tensor(g, aten.mul.Tensor(aten.sum.dim_IntList(g, [dim], True), aten.exp.default(out)))


# -- contractions with shared tensors ------------------------------------------------------------------------


def _matmul(batch: Batch, op: Op, deferred: DeferredArguments, args: Any, kwargs: Any) -> Any:
    """(sum_t left ⊗ right) @ M = sum_t left ⊗ (right @ M): the matrix goes into a factor."""
    left, right = deferred
    if left is not None and right is not None:
        return NotImplemented
    value, matrix = (left, args[1]) if left is not None else (right, args[0])
    assert value is not None
    rank = len(value.shape)
    if (
        batch.is_mapped(matrix)
        or rank < 2
        or not 2 <= matrix.dim() <= rank
        or matrix.shape[:-2] != value.shape[: matrix.dim() - 2]
    ):
        return NotImplemented
    if left is not None:
        return contracted(batch, value, rank - 1, matrix)
    return contracted(batch, value, rank - 2, matrix.transpose(-2, -1))


def _mv(batch: Batch, op: Op, deferred: DeferredArguments, args: Any, kwargs: Any) -> Any:
    value, vector = deferred[0], args[1]
    if value is None or batch.is_mapped(vector) or vector.dim() != 1:
        return NotImplemented
    product = contracted(batch, value, len(value.shape) - 1, vector.unsqueeze(1))
    return product if product is NotImplemented else reshaped(product, value.shape[:-1])


PRODUCTS: dict[Op, Any] = {
    aten.neg.default: _negate,
    aten.mul.Tensor: _scale_by(1),
    aten.mul.Scalar: _scale_by(1),
    aten.div.Tensor: _scale_by(-1),
    aten.div.Scalar: _scale_by(-1),
    aten.masked_fill.Scalar: _masked_fill,
    aten.where.self: _where,
    aten.where.ScalarOther: _where,
    aten.where.ScalarSelf: _where,
    aten.tril.default: _triangle,
    aten.triu.default: _triangle,
    aten._softmax_backward_data.default: _softmax,
    aten._log_softmax_backward_data.default: _log_softmax,
    aten.mm.default: _matmul,
    aten.bmm.default: _matmul,
    aten.matmul.default: _matmul,
    aten.mv.default: _mv,
    **{
        getattr(aten, name).default: _derivative
        for name in (
            "tanh_backward",
            "sigmoid_backward",
            "threshold_backward",
            "gelu_backward",
            "silu_backward",
            "softplus_backward",
            "hardtanh_backward",
            "hardsigmoid_backward",
        )
    },
}


def _slice(batch: Batch, op: Op, deferred: Any, args: Any, kwargs: Any) -> Any:
    value, given = deferred[0], list(args[1:])
    dim, start, end, step = given + [0, None, None, 1][len(given) :]
    dim = wrap_dim(dim, len(value.shape))
    first, last, step = slice(start, end, step).indices(value.shape[dim])
    return narrowed(batch, value, dim, first, step, len(range(first, last, step)))


def _select(batch: Batch, op: Op, deferred: Any, args: Any, kwargs: Any) -> Any:
    value, (dim, index) = deferred[0], args[1:]
    dim = wrap_dim(dim, len(value.shape))
    part = narrowed(batch, value, dim, index % value.shape[dim], 1, 1)
    return (
        part
        if part is NotImplemented
        else reshaped(part, [size for d, size in enumerate(value.shape) if d != dim])
    )


def _slice_backward(batch: Batch, op: Op, deferred: Any, args: Any, kwargs: Any) -> Any:
    _, shape, dim, start, _, step = args
    return embedded(deferred[0], wrap_dim(dim, len(shape)), start, step, shape[dim])


def _select_backward(batch: Batch, op: Op, deferred: Any, args: Any, kwargs: Any) -> Any:
    _, shape, dim, index = args
    dim = wrap_dim(dim, len(shape))
    value = reshaped(deferred[0], [1 if d == dim else size for d, size in enumerate(shape)])
    return value if value is NotImplemented else embedded(value, dim, index % shape[dim], 1, shape[dim])


def _index_select_backward(batch: Batch, op: Op, deferred: Any, args: Any, kwargs: Any) -> Any:
    _, shape, dim, index = args
    if batch.is_mapped(index):
        return NotImplemented
    return _scattered(batch, deferred[0], shape, wrap_dim(dim, len(shape)), index)


def _scattered(
    batch: Batch, value: DeferredGradient, shape: Sequence[int], dim: int, index: torch.Tensor
) -> Any:
    return of_each(batch, value, shape, lambda placed: placed_maps.scattered(placed, dim, index, shape[dim]))


def _pad(batch: Batch, op: Op, deferred: Any, args: Any, kwargs: Any) -> Any:
    """With zeros, or by cutting off."""
    value, pad = deferred[0], args[1]
    if len(args) > 2 and args[2] != 0:
        return NotImplemented
    for axis in range(len(pad) // 2):
        dim, (before, behind) = len(value.shape) - 1 - axis, pad[2 * axis : 2 * axis + 2]
        length = value.shape[dim] + min(before, 0) + min(behind, 0)
        value = narrowed(batch, value, dim, max(-before, 0), 1, length)
        if value is NotImplemented:
            return value
        value = embedded(value, dim, max(before, 0), 1, length + max(before, 0) + max(behind, 0))
        if value is NotImplemented:
            return value
    return value


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
                Placed(p.term, p.layout.embed(dim, start, 1, size)) for p in terms_of(batch, tensor, value)
            ]
        start += tensor.shape[dim]
    first = next(w for w in deferred if w is not None)
    return first.with_terms(terms, torch.Size([size if d == dim else s for d, s in enumerate(first.shape)]))


def _stack(batch: Batch, op: Op, deferred: DeferredArguments, args: Any, kwargs: Any) -> Any:
    dim = wrap_dim(args[1] if len(args) > 1 else 0, args[0][0].dim() + 1)
    return aten.cat.default([aten.unsqueeze.default(t, dim) for t in args[0]], dim)


def _flip(batch: Batch, op: Op, deferred: Any, args: Any, kwargs: Any) -> Any:
    value = deferred[0]
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
