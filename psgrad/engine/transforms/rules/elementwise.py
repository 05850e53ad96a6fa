"""Elementwise operators: arithmetic, bounds, and functions of one variable."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.torch_version import TorchVersion

from psgrad.engine.transforms.interpreter import run
from psgrad.engine.transforms.rules.families import (
    aten,
    cast,
    elementwise,
    unchanged,
)

# -- arithmetic ----------------------------------------------------------------------------------------------

elementwise(
    aten.add.Tensor,
    x0=unchanged,
    x1=lambda out, x, y, alpha=1: lambda g: _scale(g, alpha),
)
elementwise(
    aten.sub.Tensor,
    x0=unchanged,
    x1=lambda out, x, y, alpha=1: lambda g: _scale(g, -alpha),
)
elementwise(aten.add.Scalar, aten.sub.Scalar, aten.fmod.Scalar, aten.remainder.Scalar, x0=unchanged)
elementwise(aten.rsub.Scalar, x0=lambda out, x, y, alpha=1: lambda g: _scale(g, -alpha))
elementwise(
    aten.rsub.Tensor,
    x0=lambda out, x, y, alpha=1: lambda g: _scale(g, -alpha),
    x1=unchanged,
)
elementwise(
    aten.mul.Tensor, x0=lambda out, x, y: lambda g: g * conj(y), x1=lambda out, x, y: lambda g: g * conj(x)
)
elementwise(
    aten.mul.Scalar, x0=lambda out, x, y: lambda g: _scale(g, y.conjugate() if isinstance(y, complex) else y)
)
elementwise(
    aten.div.Tensor,
    x0=lambda out, x, y: lambda g: g / conj(y),
    x1=lambda out, x, y: lambda g: -g * conj(out / y),
)
elementwise(aten.div.Scalar, x0=lambda out, x, y: lambda g: g / y)
elementwise(aten.neg.default, x0=lambda out, x: lambda g: -g)
elementwise(aten.pow.Tensor_Scalar, x0=lambda out, x, p: lambda g: _pow_base(g, x, p))
elementwise(aten.pow.Scalar, x1=lambda out, b, x: lambda g: _pow_exponent(g, out, b, x))
elementwise(
    aten.pow.Tensor_Tensor,
    x0=lambda out, x, p: lambda g: _where0(p != 0, g * conj(p * x ** (p - 1))),
    x1=lambda out, x, p: (
        lambda g: (
            g
            * conj(
                torch.where(
                    (x == 0) & (p.real >= 0 if p.is_complex() else p >= 0),
                    torch.zeros_like(out),
                    out * torch.log(x),
                )
            )
        )
    ),
)
elementwise(
    aten.ldexp.Tensor,
    # 2.0: an integer to a negative integer power would be 0
    x0=lambda out, x, y: lambda g: g * conj(torch.pow(2.0, y)),
    x1=lambda out, x, y: lambda g: g * conj(out) * math.log(2),
)
elementwise(
    aten.addcmul.default,
    x0=unchanged,
    x1=lambda out, a, x, y, value=1: lambda g: g * conj(_scale(y, value)),
    x2=lambda out, a, x, y, value=1: lambda g: g * conj(_scale(x, value)),
)
elementwise(
    aten.addcdiv.default,
    x0=unchanged,
    x1=lambda out, a, x, y, value=1: lambda g: g * conj(value / y),
    x2=lambda out, a, x, y, value=1: lambda g: -g * conj(_scale(x, value) / (y * y)),
)
elementwise(
    aten.lerp.Scalar,
    x0=lambda out, a, b, weight: lambda g: _scale(g, 1 - weight),
    x1=lambda out, a, b, weight: lambda g: _scale(g, weight),
)
elementwise(
    aten.lerp.Tensor,
    x0=lambda out, a, b, weight: lambda g: g * (1 - weight),
    x1=lambda out, a, b, weight: lambda g: g * weight,
    x2=lambda out, a, b, weight: lambda g: g * (b - a),
)
elementwise(
    aten.atan2.default,
    x0=lambda out, y, x: lambda g: g * x * _over_square(y, x),
    x1=lambda out, y, x: lambda g: g * -y * _over_square(y, x),
)
elementwise(
    aten.hypot.default,
    # NaN at the origin, where there is no derivative, as in PyTorch
    x0=lambda out, x, y: lambda g: g * x / out,
    x1=lambda out, x, y: lambda g: g * y / out,
)
# The rounded quotient is computed by one operator: its zero derivative must not be multiplied by an infinite
# one of a division.
elementwise(
    aten.fmod.Tensor,
    x0=unchanged,
    x1=lambda out, x, y: lambda g: -g * torch.div(x, y, rounding_mode="trunc"),
)
elementwise(
    aten.remainder.Tensor,
    x0=unchanged,
    x1=lambda out, x, y: lambda g: -g * torch.div(x, y, rounding_mode="floor"),
)
# If two numbers are equal, each gets half of the cotangent, as in PyTorch.
elementwise(
    aten.maximum.default,
    x0=lambda out, x, y: lambda g: _share(g, x, y),
    x1=lambda out, x, y: lambda g: _share(g, y, x),
)
elementwise(
    aten.minimum.default,
    x0=lambda out, x, y: lambda g: _share(g, y, x),
    x1=lambda out, x, y: lambda g: _share(g, x, y),
)
elementwise(
    aten.where.self,
    x1=lambda out, c, x, y: lambda g: _where0(c, g),
    x2=lambda out, c, x, y: lambda g: _where0(~c, g),
)
elementwise(
    aten.clamp.default, x0=lambda out, x, low=None, high=None: lambda g: _where0(_inside(x, low, high), g)
)
elementwise(aten.clamp_min.default, x0=lambda out, x, low: lambda g: _where0(_inside(x, low, None), g))
elementwise(aten.clamp_max.default, x0=lambda out, x, high: lambda g: _where0(_inside(x, None, high), g))
elementwise(
    aten.hardtanh.default,
    x0=lambda out, x, low=-1, high=1: lambda g: run(aten.hardtanh_backward.default, g, x, low, high),
)
elementwise(
    aten.masked_fill.Scalar, x0=lambda out, x, mask, value: lambda g: aten.masked_fill.Scalar(g, mask, 0)
)
elementwise(
    aten.copysign.Tensor,
    x0=lambda out, x, y: lambda g: g * _sign_change(out, x),
    x1=lambda out, x, y: lambda g: torch.zeros_like(g),
)
elementwise(aten.copysign.Scalar, x0=lambda out, x, y: lambda g: g * _sign_change(out, x))
elementwise(aten.nextafter.default, x0=lambda out, x, y: lambda g: _where0(x != y, g))
# If one argument is nan, the other is the result.
elementwise(
    aten.fmax.default,
    x0=lambda out, x, y: lambda g: _where0((x >= y) | y.isnan(), _shared(g, x == y)),
    x1=lambda out, x, y: lambda g: _where0(_beyond(y, x) | x.isnan() & ~y.isnan(), _shared(g, x == y)),
)
elementwise(
    aten.fmin.default,
    x0=lambda out, x, y: lambda g: _where0((x <= y) | y.isnan(), _shared(g, x == y)),
    x1=lambda out, x, y: lambda g: _where0(_beyond(x, y) | x.isnan() & ~y.isnan(), _shared(g, x == y)),
)


def _sign_change(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.where(x == 0, torch.zeros_like(out), out / x)


def _over_square(y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """1 / (x^2 + y^2); zero at the origin, where the angle has no derivative."""
    square = x * x + y * y
    origin = square == 0
    return torch.where(origin, 0, torch.where(origin, 1, square).reciprocal())


def _scale(g: torch.Tensor, factor: Any) -> torch.Tensor:
    return g if factor == 1 else g * factor


def conj(x: Any) -> Any:
    """The complex conjugate of a tensor or a Python number."""
    if isinstance(x, torch.Tensor):
        return x.conj() if x.dtype.is_complex else x
    return x.conjugate()


def _pow_base(g: torch.Tensor, x: torch.Tensor, p: Any) -> torch.Tensor:
    if p == 0:
        return torch.zeros_like(g)
    if p == 1:
        return g
    return g * conj(p * x if p == 2 else p * x ** (p - 1))


def _pow_exponent(g: torch.Tensor, out: torch.Tensor, base: Any, x: torch.Tensor) -> torch.Tensor:
    if base == 0:
        return g * torch.where(
            (x.real if x.is_complex() else x) >= 0, torch.zeros_like(out), out * -torch.inf
        )
    if isinstance(base, complex) or out.dtype.is_complex:
        return g * conj(out * torch.log(torch.tensor(base, dtype=out.dtype)))
    return g * out * (math.log(base) if base > 0 else math.nan)


def _share(g: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The part of g for x: all of it if x > y or one of them is NaN, one half if they are equal,
    else zero.
    """
    return _where0(~(x < y), torch.where(x == y, g / 2, g))


def _where0(condition: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    """g where the condition is true, else 0, also if g is infinite or NaN. A product with 0 would be NaN
    there.
    """
    return torch.where(condition, g, 0)


# The derivative of a value that equals its bound is a convention, and PyTorch has changed it. Up to 2.13 the
# value gets the whole cotangent. Since 2.14 the value gets nothing if the bound is a number; if the bound is
# a tensor, value and bound get one half each.
BOUNDS_SHARE = TorchVersion(torch.__version__) >= TorchVersion("2.14")


def _inside(x: torch.Tensor, low: Any, high: Any) -> torch.Tensor:
    above, below = (x.__gt__, x.__lt__) if BOUNDS_SHARE else (x.__ge__, x.__le__)
    if low is None:
        return below(high)
    return above(low) if high is None else above(low) & below(high)


def _beyond(greater: torch.Tensor, less: torch.Tensor) -> torch.Tensor:
    """Whether the bound replaces the value, or gets a part of the cotangent."""
    return greater >= less if BOUNDS_SHARE else greater > less


def _shared(g: torch.Tensor, tie: torch.Tensor) -> torch.Tensor:
    return torch.where(tie, g / 2, g) if BOUNDS_SHARE else g


# The VJPs of a value and of its bound.
_AT_LEAST = (
    lambda out, x, low: lambda g: _where0(x >= low, _shared(g, x == low)),
    lambda out, x, low: lambda g: _where0(_beyond(low, x), _shared(g, x == low)),
)
_AT_MOST = (
    lambda out, x, high: lambda g: _where0(x <= high, _shared(g, x == high)),
    lambda out, x, high: lambda g: _where0(_beyond(x, high), _shared(g, x == high)),
)


def _between(position: int) -> Any:
    """The VJP for two bounds; the upper bound is used if they cross."""

    def make(out: torch.Tensor, x: torch.Tensor, low: Any = None, high: Any = None) -> Any:
        if high is None:
            return _AT_LEAST[position](out, x, low)
        if low is None:
            return _AT_MOST[min(position, 1)](out, x, high)
        tie = ((x == low) | (x == high)) & (low < high)
        # up to 2.13, the lower one of two equal bounds gets nothing from a smaller value
        in_order = low <= high if BOUNDS_SHARE else low < high
        counts = ((x >= low) & (x <= high), (x < low) & in_order, (x > high) | (high < low))[position]
        if BOUNDS_SHARE and position:
            counts = counts | (tie & (x == (low, high)[position - 1]))
        return lambda g: _where0(counts, _shared(g, tie))

    return make


elementwise(aten.clamp_min.Tensor, x0=_AT_LEAST[0], x1=_AT_LEAST[1])
elementwise(aten.clamp_max.Tensor, x0=_AT_MOST[0], x1=_AT_MOST[1])
elementwise(aten.clamp.Tensor, x0=_between(0), x1=_between(1), x2=_between(2))


# -- functions of one variable -------------------------------------------------------------------------------

elementwise(
    aten.abs.default, x0=lambda out, x: lambda g: g * (torch.sgn(x) if x.dtype.is_complex else torch.sign(x))
)
elementwise(aten.exp.default, x0=lambda out, x: lambda g: g * conj(out))
elementwise(aten.exp2.default, x0=lambda out, x: lambda g: g * conj(out) * math.log(2))
elementwise(aten.expm1.default, x0=lambda out, x: lambda g: g * conj(out + 1))
elementwise(aten.log.default, x0=lambda out, x: lambda g: g / conj(x))
elementwise(aten.log2.default, x0=lambda out, x: lambda g: g / conj(x * math.log(2)))
elementwise(aten.log10.default, x0=lambda out, x: lambda g: g / conj(x * math.log(10)))
elementwise(aten.log1p.default, x0=lambda out, x: lambda g: g / conj(x + 1))
elementwise(aten.sqrt.default, x0=lambda out, x: lambda g: g / conj(2 * out))
elementwise(aten.rsqrt.default, x0=lambda out, x: lambda g: -0.5 * g * conj(out**3))
elementwise(aten.reciprocal.default, x0=lambda out, x: lambda g: -g * conj(out * out))
elementwise(aten.sin.default, x0=lambda out, x: lambda g: g * conj(torch.cos(x)))
elementwise(aten.cos.default, x0=lambda out, x: lambda g: -g * conj(torch.sin(x)))
elementwise(aten.tan.default, x0=lambda out, x: lambda g: g * conj(1 + out * out))
elementwise(aten.asin.default, x0=lambda out, x: lambda g: g * conj(torch.rsqrt(1 - x * x)))
elementwise(aten.acos.default, x0=lambda out, x: lambda g: -g * conj(torch.rsqrt(1 - x * x)))
elementwise(aten.atan.default, x0=lambda out, x: lambda g: g / conj(1 + x * x))
elementwise(aten.sinh.default, x0=lambda out, x: lambda g: g * conj(torch.cosh(x)))
elementwise(aten.cosh.default, x0=lambda out, x: lambda g: g * conj(torch.sinh(x)))
elementwise(aten.asinh.default, x0=lambda out, x: lambda g: g * conj(torch.rsqrt(x * x + 1)))
elementwise(aten.acosh.default, x0=lambda out, x: lambda g: g * _dacosh(x))
elementwise(aten.atanh.default, x0=lambda out, x: lambda g: g / conj(1 - x * x))
elementwise(aten.tanh.default, x0=lambda out, x: lambda g: run(aten.tanh_backward.default, g, out))
elementwise(aten.sigmoid.default, x0=lambda out, x: lambda g: run(aten.sigmoid_backward.default, g, out))
elementwise(aten.erf.default, x0=lambda out, x: lambda g: g * (2 / math.sqrt(math.pi)) * torch.exp(-x * x))
elementwise(aten.erfc.default, x0=lambda out, x: lambda g: g * (-2 / math.sqrt(math.pi)) * torch.exp(-x * x))
elementwise(
    aten.erfinv.default, x0=lambda out, x: lambda g: g * (math.sqrt(math.pi) / 2) * torch.exp(out * out)
)
elementwise(aten.lgamma.default, x0=lambda out, x: lambda g: g * torch.digamma(x))
elementwise(aten.digamma.default, x0=lambda out, x: lambda g: g * torch.polygamma(1, x))
elementwise(aten.polygamma.default, x1=lambda out, n, x: lambda g: g * torch.polygamma(n + 1, x))
elementwise(aten.sinc.default, x0=lambda out, x: lambda g: _sinc_back(g, x))
elementwise(aten._conj.default, aten._conj_physical.default, x0=lambda out, x: lambda g: g.conj())
elementwise(
    aten.nan_to_num.default, x0=lambda out, x, *args, **kwargs: lambda g: g * cast(torch.isfinite(x), g.dtype)
)


def _dacosh(x: torch.Tensor) -> torch.Tensor:
    """The derivative of acosh. sqrt(x - 1) sqrt(x + 1) equals sqrt(x^2 - 1) only for real x, for which
    PyTorch uses the latter.
    """
    return (
        torch.conj(torch.rsqrt(x - 1) * torch.rsqrt(x + 1)) if x.dtype.is_complex else torch.rsqrt(x * x - 1)
    )


def _sinc_back(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The slope times g, at the origin zero also for an infinite g.

    The difference of sine and cosine cancels near the origin: there the slope is its Taylor series, with a =
    pi x the sum over k > 0 of (-1)^k 2k a^(2k - 1) / (2k + 1)!, so that derivatives of any order are right.
    """
    angle = math.pi * x
    near = angle.abs() < 1
    small, large = torch.where(near, angle, 0), torch.where(near, 1, angle)
    series, square = torch.zeros_like(small), small * small
    for k in range(10, 0, -1):
        series = series * square + (-1) ** k * 2 * k / math.factorial(2 * k + 1)
    slope = math.pi * torch.where(
        near, series * small, (large * torch.cos(large) - torch.sin(large)) / (large * large)
    )
    return torch.where(x == 0, g.nan_to_num(0, 0, 0), g) * conj(slope)
