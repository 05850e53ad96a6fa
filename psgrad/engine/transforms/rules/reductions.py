"""Reductions and cumulative operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from psgrad.engine.transforms.rules.elementwise import conj
from psgrad.engine.transforms.rules.families import (
    aten,
    cast,
    first_result,
    linear,
    shifted,
    without_unit_axis,
    wrap_dim,
)
from psgrad.engine.transforms.rules.registry import Op, constant, define, replace


def axes_of(dims: Any, rank: int) -> list[int]:
    """The axes of a `dim` argument; None and [] mean all axes."""
    if dims is None or (not isinstance(dims, int) and len(dims) == 0):
        return list(range(rank))
    if isinstance(dims, int):
        dims = [dims]
    return [wrap_dim(d, rank) for d in dims] if rank else []


def spread(g: torch.Tensor, shape: Sequence[int], dims: Any, keepdim: bool) -> torch.Tensor:
    """A reduction's cotangent, repeated along the axes that were reduced."""
    if not keepdim:
        reduced = set(axes_of(dims, len(shape)))
        g = g.reshape([1 if i in reduced else s for i, s in enumerate(shape)])
    return g.expand(shape)


def by_axes(
    batch: Any, op: Callable[..., Any], x: torch.Tensor, dims: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Batching of a reduction over some axes."""
    physical = batch.physical(x)
    if x.dim() == 0:
        return without_unit_axis(op(physical.unsqueeze(1), [1], *args, **kwargs))
    return op(physical, [a + 1 for a in axes_of(dims, x.dim())], *args, **kwargs)


def full(op: Op) -> Callable[..., Any]:
    """Batching of a reduction over all elements: over every axis except the sample axis."""
    return lambda batch, _, x, **kwargs: by_axes(batch, op, x, None, False, **kwargs)


def _sum_back(
    out: torch.Tensor, x: torch.Tensor, dims: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    shape, kind = x.shape, x.dtype
    return lambda g: spread(cast(g, kind), shape, dims, keepdim)


def mean_back(
    out: torch.Tensor, x: torch.Tensor, dims: Any = None, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    shape, kind, count = x.shape, x.dtype, 1
    for axis in axes_of(dims, x.dim()):
        count *= shape[axis]
    return lambda g: spread(cast(g, kind) / count, shape, dims, keepdim)


linear(aten.sum.default, back=_sum_back, batch=full(aten.sum.dim_IntList))
linear(aten.sum.dim_IntList, back=_sum_back, batch=by_axes)
linear(aten.mean.default, back=mean_back, batch=full(aten.mean.dim))
linear(aten.mean.dim, back=mean_back, batch=by_axes)


def _nansum_back(out: torch.Tensor, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    counted, back = ~x.isnan(), _sum_back(out, x, *args, **kwargs)
    return lambda g: back(g) * counted


def _nansum_push(out: torch.Tensor, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    counted = ~x.isnan()
    return lambda t: torch.where(counted, t, 0).sum(*args or (None,), **kwargs)


define(aten.nansum.default, vjp={0: _nansum_back}, jvp={0: _nansum_push}, batch=by_axes)


def _logsumexp_back(out: torch.Tensor, x: torch.Tensor, dims: Any, keepdim: bool = False) -> Any:
    shape = x.shape
    return lambda g: spread(g, shape, dims, keepdim) * conj(torch.exp(x - spread(out, shape, dims, keepdim)))


define(aten.logsumexp.default, vjp={0: _logsumexp_back}, batch=by_axes)


def _extreme_back(out: torch.Tensor, x: torch.Tensor, dims: Any = (), keepdim: bool = False) -> Any:
    """The VJP of amax and amin: equal extreme elements share the cotangent equally."""
    shape = x.shape

    def back(g: torch.Tensor) -> torch.Tensor:
        hit = cast(x == spread(out, shape, dims, keepdim), g.dtype)
        ties = hit.sum(axes_of(dims, len(shape)), keepdim) if len(shape) else hit
        return hit * spread(g / ties, shape, dims, keepdim)

    return back


define(aten.amax.default, aten.amin.default, vjp={0: _extreme_back}, batch=by_axes)


def _cumsum_back(out: torch.Tensor, x: torch.Tensor, dim: int, *, dtype: Any = None) -> Any:
    kind = x.dtype
    return lambda g: cast(g.flip(dim).cumsum(dim).flip(dim) if g.dim() else g, kind)


linear(aten.cumsum.default, back=_cumsum_back, batch=shifted(1))


def _extreme_so_far_back(out: Any, x: torch.Tensor, dim: int) -> Any:
    """The VJP of cummax and cummin: each result's cotangent goes to the index of the extreme value so far."""
    shape, dtype, device, index = x.shape, x.dtype, x.device, out[1]
    return lambda g: torch.zeros(shape, dtype=dtype, device=device).scatter_add(dim, index, g)


define(
    aten.cummax.default, aten.cummin.default, vjp={0: first_result(_extreme_so_far_back)}, batch=shifted(1)
)


def _logcumsumexp_back(out: torch.Tensor, x: torch.Tensor, dim: int) -> Any:
    """d out_k / d x_i is exp(x_i - out_k) for k >= i, never above 1: as a matrix, quadratic in length.

    A cotangent that is NaN counts as zero: PyTorch adds up logarithms of those above zero and of those below,
    and NaN is neither.
    """

    def back(g: torch.Tensor) -> torch.Tensor:
        if not x.dim():
            return g
        size = x.shape[dim]
        earlier = torch.ones(size, size, dtype=torch.bool, device=x.device).tril(-1)  # [i, k]
        exponent = x.movedim(dim, -1).unsqueeze(-1) - out.movedim(dim, -1).unsqueeze(-2)
        share = exponent.masked_fill(earlier, -torch.inf).exp()
        cotangent = torch.where(g.isnan(), 0, g).movedim(dim, -1).unsqueeze(-2)
        return (conj(share) * cotangent).masked_fill(earlier, 0).sum(-1).movedim(-1, dim)

    return back


def _logcumsumexp_batch(batch: Any, op: Op, x: torch.Tensor, dim: int) -> torch.Tensor:
    """The batching rule. For a scalar the result is the scalar, and its cotangent is unchanged, also NaN."""
    return op(batch.physical(x), wrap_dim(dim, x.dim()) + 1) if x.dim() else batch.physical(x).clone()


define(aten.logcumsumexp.default, vjp={0: _logcumsumexp_back}, batch=_logcumsumexp_batch)


# PyTorch divides a product by each factor, which gives NaN for an infinite factor. If there is a zero, it
# multiplies the other factors instead. The branch that is not used computes with ones, so that its derivative
# is finite.


def _prod_back(out: torch.Tensor, x: torch.Tensor, *, dtype: Any = None) -> Any:
    return lambda g: (
        _prod_dim_back(out, x.reshape(-1), 0, dtype=dtype)(g).reshape(x.shape)
        if x.dim()
        else cast(g, x.dtype)
    )


def _prod_dim_back(
    out: torch.Tensor, x: torch.Tensor, dim: int, keepdim: bool = False, *, dtype: Any = None
) -> Any:
    shape, kind, x = x.shape, x.dtype, cast(x, out.dtype)

    def back(g: torch.Tensor) -> torch.Tensor:
        if not shape:
            return cast(g, kind)
        zeros = (x == 0).any()
        by_division = spread(out, shape, dim, keepdim) / torch.where(zeros, 1, x)
        others = torch.where(zeros, _products_of_others(torch.where(zeros, x, 1), dim), by_division)
        return cast(spread(g, shape, dim, keepdim) * conj(others), kind)

    return back


def _products_of_others(x: torch.Tensor, dim: int) -> torch.Tensor:
    """For each element the product of all others along `dim`."""
    if not x.numel():
        return torch.ones_like(x)
    one = torch.ones_like(x.narrow(dim, 0, 1))
    size = x.shape[dim]
    before = torch.cat([one, x.narrow(dim, 0, size - 1)], dim).cumprod(dim)
    after = torch.cat([one, x.flip(dim).narrow(dim, 0, size - 1)], dim).cumprod(dim).flip(dim)
    return before * after


define(
    aten.prod.default,
    vjp={0: _prod_back},
    batch=lambda batch, op, x, **kwargs: aten.prod.dim_int(
        batch.physical(x).reshape(batch.size, x.numel()), 1, **kwargs
    ),
)
define(aten.prod.dim_int, vjp={0: _prod_dim_back}, batch=shifted(1))


def _cumprod_back(out: torch.Tensor, x: torch.Tensor, dim: int, *, dtype: Any = None) -> Any:
    def back(g: torch.Tensor) -> torch.Tensor:
        g = cast(g, x.dtype)
        if not x.dim() or x.shape[dim] <= 1:
            return g
        zeros = (x == 0).any()
        factors = torch.where(zeros, 1, x)
        # not with `out`, whose derivative would multiply its infinite numbers with the zeros of this branch
        products = conj(cast(factors, out.dtype).cumprod(dim)) * g
        by_division = products.flip(dim).cumsum(dim).flip(dim) / conj(factors)
        return torch.where(
            zeros, _cumprod_of_others(torch.where(zeros, x, 1), g, dim), cast(by_division, x.dtype)
        )

    return back


def _cumprod_of_others(x: torch.Tensor, g: torch.Tensor, dim: int) -> torch.Tensor:
    """The cotangent of x: d out_k / d x_i is the product of x_0..x_k without x_i. Exact with zeros, quadratic
    in the length.
    """
    moved = x.movedim(dim, -1)
    size = moved.shape[-1]
    eye = torch.eye(size, dtype=torch.bool, device=x.device)
    others = torch.where(eye, torch.ones((), dtype=x.dtype, device=x.device), moved.unsqueeze(-2)).cumprod(-1)
    counted = torch.ones(size, size, dtype=torch.bool, device=x.device).triu()
    return torch.where(counted, conj(others) * g.movedim(dim, -1).unsqueeze(-2), 0).sum(-1).movedim(-1, dim)


define(aten.cumprod.default, vjp={0: _cumprod_back}, batch=shifted(1))


# -- truth values and indices: no derivative -----------------------------------------------------------------


def _one_axis(
    batch: Any, op: Op, x: torch.Tensor, dim: int | None = None, keepdim: bool = False
) -> torch.Tensor:
    physical = batch.physical(x)
    if dim is None or x.dim() == 0:
        return op(physical.reshape(batch.size, x.numel()), 1, False)
    return op(physical, wrap_dim(dim, x.dim()) + 1, keepdim)


constant(aten.argmax.default, aten.argmin.default, batch=_one_axis)
constant(aten.argsort.default, batch=shifted(1))
constant(aten.any.dim, aten.all.dim, batch=shifted(1))
constant(aten.any.dims, aten.all.dims, batch=by_axes)
constant(aten.any.default, batch=full(aten.any.dims))
constant(aten.all.default, batch=full(aten.all.dims))
replace(aten._is_all_true.default)(torch.all)
replace(aten._is_any_true.default)(torch.any)
