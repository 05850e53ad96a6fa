"""Special functions: Bessel functions, incomplete gammas, normal quantiles, orthogonal polynomials; and
logarithms that are operators of their own: times a factor that may be zero, of sums of exponentials, of odds,
of gamma functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from psgrad.engine.transforms import diagnostics
from psgrad.engine.transforms.rules.elementwise import conj
from psgrad.engine.transforms.rules.families import aten, elementwise, elementwise_batch, first_result
from psgrad.engine.transforms.rules.registry import Maker, constant, define
from psgrad.errors import UnsupportedOperatorError


def no_derivative(operator: str, argument: str) -> Maker:
    """The VJP in an argument without a known formula: it raises an error and never returns zero."""

    def maker(out: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedOperatorError(
            f"the derivative of {operator} in its argument {argument!r} is not known{diagnostics.where()}",
            hint=f"call .detach() on {argument!r}, or write the computation with other operators",
        )

    return maker


# -- of one variable -----------------------------------------------------------------------------------------

SQRT_2PI = math.sqrt(2 * math.pi)

_OF_ONE_VARIABLE: dict[str, Maker] = {
    "i0": lambda out, x: lambda g: g * aten.special_i1(x),
    "special_i0e": lambda out, x: lambda g: g * (aten.special_i1e(x) - torch.sgn(x) * out),
    "special_i1": lambda out, x: lambda g: g * _half_near_zero(x, lambda x: aten.i0(x) - out / x),
    "special_i1e": lambda out, x: (
        lambda g: (
            g * _half_near_zero(x, lambda x: aten.special_i0e(x) - out * (torch.sgn(x) + x.reciprocal()))
        )
    ),
    "special_erfcx": lambda out, x: lambda g: g * (2 * x * out - 2 / math.sqrt(math.pi)),
    "special_ndtri": lambda out, x: lambda g: g * SQRT_2PI * torch.exp(out * out / 2),
    "special_log_ndtr": lambda out, x: lambda g: g / SQRT_2PI * torch.exp(-(out + x * x / 2)),
    "special_entr": lambda out, x: lambda g: -g * (1 + torch.log(x)),
    # PyTorch has no derivative of the following ones
    "special_bessel_j0": lambda out, x: lambda g: -g * aten.special_bessel_j1(x),
    "special_bessel_j1": lambda out, x: lambda g: g * (aten.special_bessel_j0(x) - _over(out, x)),
    "special_bessel_y0": lambda out, x: lambda g: -g * aten.special_bessel_y1(x),
    "special_bessel_y1": lambda out, x: lambda g: g * (aten.special_bessel_y0(x) - out / x),
    "special_modified_bessel_i0": lambda out, x: lambda g: g * aten.special_modified_bessel_i1(x),
    "special_modified_bessel_i1": lambda out, x: (
        lambda g: g * (aten.special_modified_bessel_i0(x) - _over(out, x))
    ),
    "special_modified_bessel_k0": lambda out, x: lambda g: -g * aten.special_modified_bessel_k1(x),
    "special_modified_bessel_k1": lambda out, x: (
        lambda g: -g * (aten.special_modified_bessel_k0(x) + out / x)
    ),
    "special_scaled_modified_bessel_k0": lambda out, x: (
        lambda g: g * (out - aten.special_scaled_modified_bessel_k1(x))
    ),
    "special_scaled_modified_bessel_k1": lambda out, x: (
        lambda g: g * (out - out / x - aten.special_scaled_modified_bessel_k0(x))
    ),
    "special_spherical_bessel_j0": lambda out, x: (
        lambda g: (
            g * torch.where(x == 0, 0, (torch.cos(x) - out) / torch.where(x == 0, torch.ones_like(x), x))
        )
    ),
    "special_airy_ai": no_derivative("aten::special_airy_ai", "x"),
}
for _name, _back in _OF_ONE_VARIABLE.items():
    elementwise(getattr(aten, _name).default, x0=_back)


def _half_near_zero(x: torch.Tensor, slope: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The derivative of I1, or of the exponentially scaled one: one half at zero. (For NaN it is NaN, where
    PyTorch has one half up to 2.14.)
    """
    eps = torch.finfo(x.dtype).eps
    near = x.abs() <= eps
    return torch.where(near, 0.5, slope(torch.where(near, eps, x)))


def _over(out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """J1(x) / x or I1(x) / x, whose limit at zero is one half."""
    at_zero = x == 0
    return torch.where(at_zero, 0.5, out / torch.where(at_zero, torch.ones_like(x), x))


# -- of two variables ----------------------------------------------------------------------------------------

elementwise(
    aten.igamma.default,
    x0=no_derivative("aten::igamma", "input"),
    x1=lambda out, a, x: lambda g: g * _gamma_density(a, x),
)
elementwise(
    aten.igammac.default,
    x0=no_derivative("aten::igammac", "input"),
    x1=lambda out, a, x: lambda g: -g * _gamma_density(a, x),
)
elementwise(
    aten.special_zeta.default,
    x0=no_derivative("aten::special_zeta", "input"),
    x1=lambda out, s, x: lambda g: -g * s * aten.special_zeta(s + 1.0, x),
)
elementwise(
    aten.special_zeta.self_scalar,
    x1=lambda out, s, x: lambda g: -g * s * aten.special_zeta(float(s) + 1.0, x),
)
elementwise(aten.special_zeta.other_scalar, x0=no_derivative("aten::special_zeta", "input"))


def _gamma_density(a: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.exp((a - 1) * torch.log(x) - x - torch.lgamma(a))


# x = mantissa * 2 ** exponent; the exponent is a step function
define(
    aten.frexp.Tensor,
    vjp={0: first_result(lambda out, x: lambda g: torch.ldexp(g, -out[1]))},
    batch=elementwise_batch,
)

# -- polynomials ---------------------------------------------------------------------------------------------

# For polynomials whose derivative is a polynomial of another family in PyTorch: the factor and the family.
_DERIVATIVES = {
    "chebyshev_polynomial_t": (1, "chebyshev_polynomial_u"),
    "shifted_chebyshev_polynomial_t": (2, "shifted_chebyshev_polynomial_u"),
    "hermite_polynomial_h": (2, "hermite_polynomial_h"),
    "hermite_polynomial_he": (1, "hermite_polynomial_he"),
}


def _polynomial_back(name: str) -> Maker:
    """The derivative in x of the polynomial of degree n; in n, which is an integer, there is none."""
    if name not in _DERIVATIVES:
        return no_derivative(f"aten::special_{name}", "x")
    factor, family = _DERIVATIVES[name]
    lower = getattr(aten, f"special_{family}")
    return lambda out, x, n: lambda g: g * factor * n * lower(x, n - 1)


for _name in (
    *_DERIVATIVES,
    "chebyshev_polynomial_u",
    "chebyshev_polynomial_v",
    "chebyshev_polynomial_w",
    "shifted_chebyshev_polynomial_u",
    "shifted_chebyshev_polynomial_v",
    "shifted_chebyshev_polynomial_w",
    "laguerre_polynomial_l",
    "legendre_polynomial_p",
):
    _packet = getattr(aten, f"special_{_name}")
    elementwise(_packet.default, _packet.n_scalar, x0=_polynomial_back(_name))
    constant(_packet.x_scalar, batch=elementwise_batch)


# -- x log(y), which is zero where x is ----------------------------------------------------------------------


def _times_log(g: torch.Tensor, x: torch.Tensor, y: Any, op: Any, lowest: int) -> torch.Tensor:
    """g log(y) by `op`, but zero at x = 0 where y has no logarithm. PyTorch's tables have a zero at every x =
    0.
    """
    product = op(g, y)
    if isinstance(y, torch.Tensor):
        return torch.where((x == 0) & (y <= lowest), 0, product)
    return product if y > lowest else torch.where(x == 0, 0, product)


def _xlogy(out: torch.Tensor, x: torch.Tensor, y: Any) -> Any:
    return lambda g: _times_log(g, x, y, torch.xlogy, 0)


def _xlog1py(out: torch.Tensor, x: torch.Tensor, y: Any) -> Any:
    return lambda g: _times_log(g, x, y, torch.special.xlog1py, -1)


elementwise(aten.xlogy.Tensor, x0=_xlogy, x1=lambda out, x, y: lambda g: g * x / y)
elementwise(aten.xlogy.Scalar_Other, x0=_xlogy)
elementwise(aten.xlogy.Scalar_Self, x1=lambda out, x, y: lambda g: g * x / y)
elementwise(aten.special_xlog1py.default, x0=_xlog1py, x1=lambda out, x, y: lambda g: g * x / (y + 1))
elementwise(aten.special_xlog1py.other_scalar, x0=_xlog1py)
elementwise(aten.special_xlog1py.self_scalar, x1=lambda out, x, y: lambda g: g * x / (y + 1))

# -- of a sum of two exponentials ----------------------------------------------------------------------------

elementwise(
    aten.logaddexp.default,
    x0=lambda out, x, y: lambda g: g / conj(1 + torch.exp(y - x)),
    x1=lambda out, x, y: lambda g: g / conj(1 + torch.exp(x - y)),
)
elementwise(
    aten.logaddexp2.default,
    x0=lambda out, x, y: lambda g: g / (1 + torch.pow(2, y - x)),
    x1=lambda out, x, y: lambda g: g / (1 + torch.pow(2, x - y)),
)

# -- of odds, and of the gamma function of several dimensions ------------------------------------------------


def _logit_back(g: torch.Tensor, x: torch.Tensor, eps: float | None) -> torch.Tensor:
    """Zero beyond the bounds, and for NaN, as if PyTorch keeps a graph; its kernel gives NaN or zero there,
    depending on the place in memory.
    """
    low, beyond = (0, torch.nan) if eps is None else (eps, 0)
    inside = (x >= low) & (x <= 1 - low)
    return torch.where(inside, g / torch.where(inside, x * (1 - x), 1), beyond)


elementwise(aten.logit.default, x0=lambda out, x, eps=None: lambda g: _logit_back(g, x, eps))


def _mvlgamma_back(out: torch.Tensor, x: torch.Tensor, p: int) -> Any:
    return lambda g: g * sum(torch.digamma(x + (i - p + 1) / 2) for i in range(p))


elementwise(aten.mvlgamma.default, x0=_mvlgamma_back)
