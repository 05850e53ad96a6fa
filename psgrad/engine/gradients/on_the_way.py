"""What may happen to deferred values on their way to a parameter: linear operators, carried out on the factors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from psgrad.engine.gradients.layout import Layout
from psgrad.engine.gradients.linear import contracted, expanded, narrowed, reshaped, scattered, summed, times
from psgrad.engine.gradients.placed import DeferredGradient, Placed, term_of
from psgrad.engine.gradients.terms import Dense
from psgrad.engine.transforms.batching import Batch
from psgrad.engine.transforms.operators import Op
from psgrad.engine.transforms.rules.families import wrap_dim

aten = torch.ops.aten
Waiting = list[DeferredGradient | None]


# -- each term by itself ------------------------------------------------------------------------------------------------------------------


def _of_each(batch: Batch, value: DeferredGradient, shape: Sequence[int], change: Callable[[Placed], list[Placed] | None]) -> Any:
    """The terms changed one by one, NotImplemented where one can't be."""
    terms: list[Placed] = []
    for placed in value.terms:
        changed = change(placed)
        if changed is None:
            return NotImplemented
        terms += changed
    if not terms:  # zero
        zero = torch.zeros((), dtype=value.dtype, device=value.device).expand(batch.size, *shape)
        terms = [Placed.plain(Dense(zero))]
    return value.with_terms(terms, torch.Size(shape))


def _relabelled(value: DeferredGradient, layouts: list[Layout | None]) -> Any:
    if any(layout is None for layout in layouts):
        return NotImplemented
    terms = [Placed(placed.term, layout) for placed, layout in zip(value.terms, layouts, strict=True) if layout is not None]
    return value.with_terms(terms, terms[0].layout.shape)


def _reshaped(value: DeferredGradient, shape: Sequence[int]) -> Any:
    if -1 in shape:
        known = -1
        for size in shape:
            known *= size
        shape = [value.shape.numel() // known if size == -1 and known else size for size in shape]
    terms = [found for placed in value.terms if (found := reshaped(placed, shape)) is not None]
    return value.with_terms(terms, torch.Size(shape)) if len(terms) == len(value.terms) else NotImplemented


# -- another dtype, another shape --------------------------------------------------------------------------------------------------------


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
    return _reshaped(waiting[0], args[1])


def _squeeze(batch: Batch, op: Op, waiting: Any, args: Any, kwargs: Any) -> Any:
    value = waiting[0]
    dims = range(len(value.shape)) if len(args) == 1 else [args[1]] if isinstance(args[1], int) else args[1]
    gone = {wrap_dim(d, len(value.shape)) for d in dims}
    return _reshaped(value, [s for i, s in enumerate(value.shape) if not (i in gone and s == 1)])


def _unsqueeze(batch: Batch, op: Op, waiting: Any, args: Any, kwargs: Any) -> Any:
    shape = list(waiting[0].shape)
    shape.insert(wrap_dim(args[1], len(shape) + 1), 1)
    return _reshaped(waiting[0], shape)


def _permuted(value: DeferredGradient, dims: list[int]) -> Any:
    return _relabelled(value, [placed.layout.permute(dims) for placed in value.terms])


def _permute(batch: Batch, op: Op, waiting: Any, args: Any, kwargs: Any) -> Any:
    rank = len(waiting[0].shape)
    return _permuted(waiting[0], [wrap_dim(d, rank) for d in args[1]])


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
    return _permuted(waiting[0], dims)


def _expand(batch: Batch, op: Op, waiting: Any, args: Any, kwargs: Any) -> Any:
    shape = list(args[1])
    shape[-len(waiting[0].shape) :] = [
        old if new == -1 else new for old, new in zip(waiting[0].shape, shape[-len(waiting[0].shape) :], strict=True)
    ]
    return _expanded(batch, waiting[0], shape)


def _expanded(batch: Batch, value: DeferredGradient, shape: Sequence[int]) -> Any:
    return value if tuple(shape) == tuple(value.shape) else _of_each(batch, value, shape, lambda placed: expanded(placed, shape))


# -- parts, and what is put together from parts ------------------------------------------------------------------------------------------


def _slice(batch: Batch, op: Op, waiting: Any, args: Any, kwargs: Any) -> Any:
    value, given = waiting[0], list(args[1:])
    dim, start, end, step = given + [0, None, None, 1][len(given) :]
    dim = wrap_dim(dim, len(value.shape))
    first, last, step = slice(start, end, step).indices(value.shape[dim])
    return _narrowed(batch, value, dim, first, step, len(range(first, last, step)))


def _narrowed(batch: Batch, value: DeferredGradient, dim: int, start: int, step: int, length: int) -> Any:
    if length == value.shape[dim]:
        return value
    shape = [length if d == dim else size for d, size in enumerate(value.shape)]
    return _of_each(batch, value, shape, lambda placed: narrowed(placed, dim, start, step, length))


def _select(batch: Batch, op: Op, waiting: Any, args: Any, kwargs: Any) -> Any:
    value, (dim, index) = waiting[0], args[1:]
    dim = wrap_dim(dim, len(value.shape))
    part = _narrowed(batch, value, dim, index % value.shape[dim], 1, 1)
    return part if part is NotImplemented else _reshaped(part, [size for d, size in enumerate(value.shape) if d != dim])


def _embedded(value: DeferredGradient, dim: int, start: int, step: int, size: int) -> Any:
    return _relabelled(value, [placed.layout.embed(dim, start, step, size) for placed in value.terms])


def _slice_backward(batch: Batch, op: Op, waiting: Any, args: Any, kwargs: Any) -> Any:
    _, shape, dim, start, _, step = args
    return _embedded(waiting[0], wrap_dim(dim, len(shape)), start, step, shape[dim])


def _select_backward(batch: Batch, op: Op, waiting: Any, args: Any, kwargs: Any) -> Any:
    _, shape, dim, index = args
    dim = wrap_dim(dim, len(shape))
    value = _reshaped(waiting[0], [1 if d == dim else size for d, size in enumerate(shape)])
    return value if value is NotImplemented else _embedded(value, dim, index % shape[dim], 1, shape[dim])


def _index_select_backward(batch: Batch, op: Op, waiting: Any, args: Any, kwargs: Any) -> Any:
    _, shape, dim, index = args
    if batch.is_mapped(index):
        return NotImplemented
    return _of_each(batch, waiting[0], shape, lambda placed: scattered(placed, wrap_dim(dim, len(shape)), index, shape[dim]))


def _pad(batch: Batch, op: Op, waiting: Any, args: Any, kwargs: Any) -> Any:
    """With zeros, or by cutting off."""
    value, pad = waiting[0], args[1]
    if len(args) > 2 and args[2] != 0:
        return NotImplemented
    for axis in range(len(pad) // 2):
        dim, (before, behind) = len(value.shape) - 1 - axis, pad[2 * axis : 2 * axis + 2]
        kept = value.shape[dim] + min(before, 0) + min(behind, 0)
        value = _narrowed(batch, value, dim, max(-before, 0), 1, kept)
        if value is NotImplemented:
            return value
        value = _embedded(value, dim, max(before, 0), 1, kept + max(before, 0) + max(behind, 0))
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
            terms += [Placed(p.term, p.layout.embed(dim, start, 1, size)) for p in _terms(batch, tensor, value)]
        start += tensor.shape[dim]
    known = next(w for w in waiting if w is not None)
    return known.with_terms(terms, torch.Size([size if d == dim else s for d, s in enumerate(known.shape)]))


def _stack(batch: Batch, op: Op, waiting: Waiting, args: Any, kwargs: Any) -> Any:
    dim = wrap_dim(args[1] if len(args) > 1 else 0, args[0][0].dim() + 1)
    return aten.cat.default([aten.unsqueeze.default(t, dim) for t in args[0]], dim)


def _flip(batch: Batch, op: Op, waiting: Any, args: Any, kwargs: Any) -> Any:
    """A product with the matrix that has ones from corner to corner."""
    value = waiting[0]
    for dim in args[1]:
        dim = wrap_dim(dim, len(value.shape))
        exchange = torch.eye(value.shape[dim], dtype=value.dtype, device=value.device).flip(0)
        value = _contracted(batch, value, dim, exchange)
        if value is NotImplemented:
            return value
    return value


# -- sums ----------------------------------------------------------------------------------------------------------------------------------


def _terms(batch: Batch, tensor: torch.Tensor, value: DeferredGradient | None) -> tuple[Placed, ...]:
    return value.terms if value is not None else (Placed.plain(term_of(batch, tensor)),)


def _add(batch: Batch, op: Op, waiting: Waiting, args: Any, kwargs: Any) -> Any:
    alpha = kwargs.get("alpha", 1)
    if not all(isinstance(a, torch.Tensor) for a in args) or args[0].shape != args[1].shape or args[0].dtype != args[1].dtype:
        return NotImplemented
    if op is aten.sub.Tensor:
        alpha = -alpha
    known = next(w for w in waiting if w is not None)
    first, second = (_terms(batch, argument, value) for argument, value in zip(args, waiting, strict=True))
    return known.with_terms([*first, *(p if alpha == 1 else Placed(p.term.scaled(float(alpha)), p.layout) for p in second)])


def _sum(batch: Batch, op: Op, waiting: Any, args: Any, kwargs: Any) -> Any:
    value = waiting[0]
    rank = len(value.shape)
    dims, keep = [*args[1:], *(None, False)[len(args) - 1 :]][:2]
    if kwargs.get("dtype") not in (None, value.dtype):
        return NotImplemented
    gone = {wrap_dim(d, rank) for d in dims} if dims else set(range(rank))
    shape = [1 if d in gone else size for d, size in enumerate(value.shape)]
    short = [size for d, size in enumerate(value.shape) if d not in gone]
    total = _of_each(batch, value, shape, lambda placed: summed(placed, gone))
    if total is NotImplemented or keep:
        return total
    return _reshaped(total, short)


def _mean(batch: Batch, op: Op, waiting: Any, args: Any, kwargs: Any) -> Any:
    total = _sum(batch, op, waiting, args, kwargs)
    if total is NotImplemented:
        return total
    value = waiting[0]
    dims = args[1] if len(args) > 1 and args[1] else range(len(value.shape))
    return _scaled(total, 1 / max(math.prod(value.shape[d] for d in dims), 1))


# -- products with what all samples share -----------------------------------------------------------------------------------------------


def _scaled(value: DeferredGradient, factor: float) -> DeferredGradient:
    return value.with_terms([Placed(p.term.scaled(factor), p.layout) for p in value.terms])


def _scale_by(exponent: int) -> Any:
    def scale(batch: Batch, op: Op, waiting: Waiting, args: Any, kwargs: Any) -> Any:
        if len(args) != 2 or kwargs or (exponent < 0 and waiting[0] is None):
            return NotImplemented
        value, other = (waiting[0], args[1]) if waiting[0] is not None else (waiting[1], args[0])
        assert value is not None
        if isinstance(other, (int, float)) and not isinstance(other, bool):
            return _scaled(value, float(other) ** exponent)
        if not isinstance(other, torch.Tensor) or batch.is_mapped(other) or not other.is_floating_point():
            return NotImplemented
        if other.dim():
            value = (
                _expanded(batch, value, torch.broadcast_shapes(other.shape, value.shape)) if other.dtype == value.dtype else NotImplemented
            )
        if value is NotImplemented:
            return NotImplemented
        return _times(batch, value, other, torch.mul if exponent > 0 else torch.div)

    return scale


def _times(batch: Batch, value: DeferredGradient, by: torch.Tensor, product: Any = torch.mul) -> Any:
    return _of_each(batch, value, value.shape, lambda placed: times(placed, by, product))


def _negate(batch: Batch, op: Op, waiting: Any, args: Any, kwargs: Any) -> Any:
    return _scaled(waiting[0], -1.0)


def _masked_fill(batch: Batch, op: Op, waiting: Any, args: Any, kwargs: Any) -> Any:
    value, (mask, filling) = waiting[0], args[1:]
    if value is None or filling != 0 or batch.is_mapped(mask) or torch.broadcast_shapes(mask.shape, value.shape) != value.shape:
        return NotImplemented
    return _times(batch, value, (~mask).to(value.dtype))


def _where(batch: Batch, op: Op, waiting: Any, args: Any, kwargs: Any) -> Any:
    """A choice between a deferred value and zero."""
    mask, *choices = args
    place = 0 if waiting[1] is not None else 1
    value, other = waiting[1 + place], choices[1 - place]
    is_zero = other == 0 if isinstance(other, (int, float)) else other.dim() == 0 and not batch.is_mapped(other) and _is_zero(other)
    if batch.is_mapped(mask) or not is_zero or value is None or torch.broadcast_shapes(mask.shape, value.shape) != value.shape:
        return NotImplemented
    return _times(batch, value, (mask if place == 0 else ~mask).to(value.dtype))


def _is_zero(number: torch.Tensor) -> bool:
    """Whether a number is known to be zero without waiting for a device."""
    return number.device.type == "cpu" and type(number) is torch.Tensor and number.item() == 0


def _triangle(batch: Batch, op: Op, waiting: Any, args: Any, kwargs: Any) -> Any:
    value = waiting[0]
    return _times(batch, value, op(torch.ones(value.shape[-2:], dtype=value.dtype, device=value.device), *args[1:]))


def _derivative(batch: Batch, op: Op, waiting: Any, args: Any, kwargs: Any) -> Any:
    """An elementwise function of a weight: the operator on ones is its derivative."""
    value = waiting[0]
    if value is None or any(w is not None for w in waiting[1:]) or any(batch.is_mapped(a) for a in args[1:]):
        return NotImplemented
    ones = torch.ones(value.shape, dtype=value.dtype, device=value.device)
    return _times(batch, value, op(ones, *args[1:], **kwargs))


def _softmax(batch: Batch, op: Op, waiting: Any, args: Any, kwargs: Any) -> Any:
    g, out, dim, dtype = args
    if waiting[0] is None or batch.is_mapped(out) or g.dtype != dtype:
        return NotImplemented
    inner = aten.mul.Tensor(g, out)
    return aten.sub.Tensor(inner, aten.mul.Tensor(aten.sum.dim_IntList(inner, [dim], True), out))


def _log_softmax(batch: Batch, op: Op, waiting: Any, args: Any, kwargs: Any) -> Any:
    g, out, dim, dtype = args
    if waiting[0] is None or batch.is_mapped(out) or g.dtype != dtype:
        return NotImplemented
    return aten.sub.Tensor(g, aten.mul.Tensor(aten.sum.dim_IntList(g, [dim], True), aten.exp.default(out)))


# -- contractions with what all samples share --------------------------------------------------------------------------------------------


def _contracted(batch: Batch, value: DeferredGradient, dim: int, matrix: torch.Tensor) -> Any:
    shape = [matrix.shape[-1] if d == dim else size for d, size in enumerate(value.shape)]
    return _of_each(batch, value, shape, lambda placed: contracted(placed, dim, matrix))


def _matmul(batch: Batch, op: Op, waiting: Waiting, args: Any, kwargs: Any) -> Any:
    """(sum_t left ⊗ right) @ M = sum_t left ⊗ (right @ M): the matrix goes into a factor."""
    left, right = waiting
    if left is not None and right is not None:
        return NotImplemented
    value, matrix = (left, args[1]) if left is not None else (right, args[0])
    assert value is not None
    rank = len(value.shape)
    if batch.is_mapped(matrix) or rank < 2 or not 2 <= matrix.dim() <= rank or matrix.shape[:-2] != value.shape[: matrix.dim() - 2]:
        return NotImplemented
    if left is not None:
        return _contracted(batch, value, rank - 1, matrix)
    return _contracted(batch, value, rank - 2, matrix.transpose(-2, -1))


def _mv(batch: Batch, op: Op, waiting: Waiting, args: Any, kwargs: Any) -> Any:
    value, vector = waiting[0], args[1]
    if value is None or batch.is_mapped(vector) or vector.dim() != 1:
        return NotImplemented
    product = _contracted(batch, value, len(value.shape) - 1, vector.unsqueeze(1))
    return product if product is NotImplemented else _reshaped(product, value.shape[:-1])


ON_THE_WAY: dict[Op, Any] = {
    aten.add.Tensor: _add,
    aten.sub.Tensor: _add,
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
    aten.slice.Tensor: _slice,
    aten.select.int: _select,
    aten.slice_backward.default: _slice_backward,
    aten.select_backward.default: _select_backward,
    aten.index_select_backward.default: _index_select_backward,
    aten.constant_pad_nd.default: _pad,
    aten.cat.default: _cat,
    aten.stack.default: _stack,
    aten.flip.default: _flip,
    aten.sum.default: _sum,
    aten.sum.dim_IntList: _sum,
    aten.mean.default: _mean,
    aten.mean.dim: _mean,
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
