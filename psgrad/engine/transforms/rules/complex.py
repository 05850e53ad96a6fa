"""Complex values and their parts. Cotangents follow PyTorch's convention: of z they are d/d re(z) + i d/d im(z)."""

from __future__ import annotations

from typing import Any

import torch

from psgrad.engine.transforms.interpreter import innermost
from psgrad.engine.transforms.rules.elementwise import conj
from psgrad.engine.transforms.rules.families import aten, elementwise, elementwise_batch, leading
from psgrad.engine.transforms.rules.registry import Op, define, replace


def _from_pairs(x: torch.Tensor) -> torch.Tensor:
    return torch.complex(x.select(-1, 0), x.select(-1, 1))


def _to_pairs(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(x.resolve_conj())


def _carried_out(x: torch.Tensor) -> torch.Tensor:
    return x.resolve_conj() if innermost(x).is_conj() else x


def _imaginary(g: torch.Tensor) -> torch.Tensor:
    return torch.complex(torch.zeros_like(g), g)


# -- the same memory, seen otherwise: a value below may be a conjugate that has not been carried out ------------------------------

define(aten.resolve_conj.default, aten.resolve_neg.default, vjp={0: lambda out, x: lambda g: g}, linear=(0,), batch=leading)
define(aten._neg_view.default, vjp={0: lambda out, x: lambda g: -g}, linear=(0,), batch=leading)
define(
    aten.view_as_real.default,
    vjp={0: lambda out, x: lambda g: _from_pairs(g)},
    linear=(0,),
    batch=lambda batch, op, x: op(_carried_out(batch.physical(x))),
)


def _view_as_complex_batch(batch: Any, op: Op, x: torch.Tensor) -> torch.Tensor:
    """Pairs must lie together, which the samples' axis may have led them not to."""
    physical = batch.physical(x)
    together = physical.stride(-1) == 1 and all(stride % 2 == 0 for stride in physical.stride()[:-1])
    return op(physical if together else physical.contiguous())


define(aten.view_as_complex.default, vjp={0: lambda out, x: lambda g: _to_pairs(g)}, linear=(0,), batch=_view_as_complex_batch)
define(
    aten.real.default,
    vjp={0: lambda out, x: (lambda g: torch.complex(g, torch.zeros_like(g))) if x.is_complex() else lambda g: g},
    linear=(0,),
    batch=leading,
)
define(aten.imag.default, vjp={0: lambda out, x: lambda g: _imaginary(g)}, linear=(0,), batch=leading)


def write_part(op: Op, base: torch.Tensor, new: torch.Tensor) -> torch.Tensor | None:
    """The base after its view by `op`, one of those above, was overwritten by `new`; None for any other operator, or for a copy."""
    if op is aten._conj.default:
        return new.conj()
    if op is aten._neg_view.default:
        return -new
    if op is aten.view_as_real.default:
        return _from_pairs(new)
    if op is aten.view_as_complex.default:
        return _to_pairs(new)
    if op in (aten.resolve_conj.default, aten.resolve_neg.default) and not innermost(base).is_conj() and not innermost(base).is_neg():
        return new  # nothing was to be carried out: it was the base itself
    if op is aten.real.default:
        return torch.complex(new, torch.imag(base)) if base.is_complex() else new
    if op is aten.imag.default:
        return torch.complex(torch.real(base), new)
    return None


# -- made of two real values ------------------------------------------------------------------------------------------------------

elementwise(aten.complex.default, x0=lambda out, x, y: lambda g: torch.real(g), x1=lambda out, x, y: lambda g: torch.imag(g))
define(aten.polar.default, batch=elementwise_batch)


@replace(aten.polar.default)
def _polar(size: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    return torch.complex(size * torch.cos(angle), size * torch.sin(angle))


# -- angle and direction ------------------------------------------------------------------------------------------------------------


def _angle_back(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Zero for a real value, whose angle is a step function, and at the origin."""
    if not x.is_complex():
        return torch.zeros_like(g)
    size = torch.where(x == 0, torch.ones_like(x), x).abs()
    return torch.where(x == 0, torch.zeros_like(x), g * x / (size * size) * 1j)


def _direction_back(g: torch.Tensor, out: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """x / |x| moves across itself only; zero for a real value and at the origin."""
    if not x.is_complex():
        return torch.zeros_like(g)
    size = torch.where(x == 0, torch.ones_like(x), x).abs()
    return torch.where(x == 0, torch.zeros_like(x), (g - out * torch.real(conj(out) * g)) / size)


elementwise(aten.angle.default, x0=lambda out, x: lambda g: _angle_back(g, x))
elementwise(aten.sgn.default, x0=lambda out, x: lambda g: _direction_back(g, out, x))
