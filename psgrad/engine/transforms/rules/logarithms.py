"""Logarithms that are operators of their own: times a factor that may be zero, of sums of exponentials, of
odds, of gamma functions.
"""

from __future__ import annotations

from typing import Any

import torch

from psgrad.engine.transforms.rules.elementwise import conj
from psgrad.engine.transforms.rules.families import aten, elementwise

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
