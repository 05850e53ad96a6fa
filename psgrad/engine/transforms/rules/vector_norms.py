"""Variances, standard deviations, norms of vectors, and operators that rescale by them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from psgrad.engine.transforms.rules.families import aten, cast, one_by_one, wrap_dim
from psgrad.engine.transforms.rules.reductions import axes_of, by_axes, mean_back, spread
from psgrad.engine.transforms.rules.registry import Op, define

# -- variances -----------------------------------------------------------------------------------------------


def _var_back(
    out: torch.Tensor, x: torch.Tensor, dims: Any = None, *, correction: Any = 1, keepdim: bool = False
) -> Any:
    axes, count = axes_of(dims, x.dim()), 1
    for axis in axes:
        count *= x.shape[axis]
    freedom = count - (1 if correction is None else correction)

    def back(g: torch.Tensor) -> torch.Tensor:
        mean = x.mean(axes, keepdim=True)
        if freedom <= 0 and (dims is None or not x.dim()):  # over given axes PyTorch divides
            return spread(g, x.shape, dims, keepdim) * torch.where(x == mean, torch.nan, torch.inf).to(
                x.dtype
            )
        return (2 / freedom if freedom else torch.inf) * spread(g, x.shape, dims, keepdim) * (x - mean)

    return back


def _std_back(
    out: torch.Tensor, x: torch.Tensor, dims: Any = None, *, correction: Any = 1, keepdim: bool = False
) -> Any:
    variance = _var_back(out, x, dims, correction=correction, keepdim=keepdim)
    divisor = torch.where(
        out == 0, torch.ones_like(out), 2 * out
    )  # forward mode is the transpose, and would divide zero by zero
    return lambda g: variance(torch.where(out == 0, torch.zeros_like(g), g / divisor))


def _with_mean(deviation: Callable[..., Any]) -> Callable[..., Any]:
    """The derivative of an operator that returns a variance or a standard deviation, and the mean."""

    def make(
        out: Any, x: torch.Tensor, dims: Any = None, *, correction: Any = 1, keepdim: bool = False
    ) -> Any:
        rules = (
            deviation(out[0], x, dims, correction=correction, keepdim=keepdim),
            mean_back(out[1], x, dims, keepdim),
        )

        def back(gs: list[Any]) -> torch.Tensor | None:
            parts = [rule(g) for rule, g in zip(rules, gs, strict=True) if g is not None]
            return parts[0] + parts[1] if len(parts) == 2 else parts[0]

        return back

    return make


define(aten.var.correction, vjp={0: _var_back}, batch=by_axes)
define(aten.std.correction, vjp={0: _std_back}, batch=by_axes)
define(aten.var_mean.correction, vjp={0: _with_mean(_var_back)}, batch=by_axes)
define(aten.std_mean.correction, vjp={0: _with_mean(_std_back)}, batch=by_axes)

# -- norms of vectors ----------------------------------------------------------------------------------------


def norm_of_axes_back(
    g: torch.Tensor, x: torch.Tensor, norm: torch.Tensor, order: Any, axes: list[int]
) -> torch.Tensor:
    """The cotangent of x from that of its norm over some axes; both of the latter have unit axes there.

    The formulas are PyTorch's, because intermediate numbers may be infinite. At zero the derivative is zero,
    and divisors and bases of powers are replaced by one: 0 / 0 must not enter a second derivative.
    """
    if order == 0:
        return torch.zeros_like(x)
    if order == 1:
        return torch.sgn(x) * g
    if abs(order) == float("inf"):
        size = x.abs()
        hit = cast((size == norm) | size.isnan(), g.dtype)
        return torch.sgn(x) * (g / hit.sum(axes, keepdim=True) * hit)
    divisor = torch.where(norm == 0, 1, norm)
    if order == 2:
        return g * torch.where(norm == 0, 0, x / divisor)
    size = torch.where(x == 0, 1, x.abs())
    if order < 1:
        return torch.sgn(x) * size ** (order - 1) * g * norm ** (1 - order)
    scale = torch.where(norm == 0, 0, g / divisor ** (order - 1))
    if order < 2:
        return torch.sgn(x) * size ** (order - 1) * scale
    return x * torch.where(x == 0, 0, size ** (order - 2)) * scale


def _norm_back(
    out: torch.Tensor,
    x: torch.Tensor,
    order: Any = 2,
    dims: Any = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,
) -> Any:
    shape, narrow = x.shape, x.dtype
    x = x if dtype is None else cast(x, dtype)
    axes = axes_of(dims, len(shape))
    unit = [1 if axis in axes else size for axis, size in enumerate(shape)]
    return lambda g: cast(norm_of_axes_back(g.reshape(unit), x, out.reshape(unit), order, axes), narrow)


def _norm_batch(
    batch: Any,
    op: Op,
    x: torch.Tensor,
    order: Any = 2,
    dims: Any = None,
    keepdim: bool = False,
    **kwargs: Any,
) -> Any:
    return by_axes(batch, lambda x, *axes, **rest: op(x, order, *axes, **rest), x, dims, keepdim, **kwargs)


define(aten.linalg_vector_norm.default, vjp={0: _norm_back}, batch=_norm_batch)

# -- slices scaled down to a norm ----------------------------------------------------------------------------


def _renorm_back(out: torch.Tensor, x: torch.Tensor, order: float, dim: int, maxnorm: float) -> Any:
    axes = [axis for axis in range(x.dim()) if axis != wrap_dim(dim, x.dim())]
    wide = torch.promote_types(
        x.dtype, torch.float64 if x.device.type == "cpu" else torch.float32
    )  # the type of the kernel's computation

    def back(g: torch.Tensor) -> torch.Tensor:
        norm = torch.linalg.vector_norm(x, order, axes, keepdim=True, dtype=wide)
        large = norm > maxnorm
        safe = torch.where(large, x, 0)  # the derivative of a small slice's norm may be NaN
        product = safe.conj() * g
        product = cast(torch.real(product) if product.is_complex() else product, norm.dtype).sum(
            axes, keepdim=True
        )
        inverse = (norm + 1e-7).reciprocal()
        through = norm_of_axes_back(product, safe, norm, order, axes)
        return torch.where(large, cast(maxnorm * inverse * (g - inverse * through), g.dtype), g)

    return back


define(aten.renorm.default, vjp={0: _renorm_back}, batch=one_by_one)
