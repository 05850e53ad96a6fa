"""Complex values, their parts, and Fourier transforms.

Cotangents follow PyTorch's convention: of z they are d/d re(z) + i d/d im(z). A Fourier transform is linear;
its VJP is its adjoint, which is the inverse transform with the same scaling. A transform of real values keeps
half of the spectrum: the other half is its mirror image, conjugated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from psgrad.engine.transforms.rules.elementwise import conj
from psgrad.engine.transforms.rules.families import (
    aten,
    elementwise,
    leading,
    linear,
    of_one_if_empty,
    shifted,
    unchanged,
)
from psgrad.engine.transforms.rules.registry import Op, replace
from psgrad.engine.transforms.tracer import innermost


def from_pairs(x: torch.Tensor) -> torch.Tensor:
    return torch.complex(x.select(-1, 0), x.select(-1, 1))


def to_pairs(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(x.resolve_conj())


def _carried_out(x: torch.Tensor) -> torch.Tensor:
    return x.resolve_conj() if innermost(x).is_conj() else x


# -- views of the same memory: a value below may be a conjugate that was not computed ----------------------

linear(aten.resolve_conj.default, aten.resolve_neg.default, back=unchanged, batch=leading)
linear(aten._neg_view.default, back=lambda out, x: lambda g: -g, batch=leading)
linear(
    aten.view_as_real.default,
    back=lambda out, x: from_pairs,
    batch=lambda batch, op, x: op(_carried_out(batch.physical(x))),
)


def _view_as_complex_batch(batch: Any, op: Op, x: torch.Tensor) -> torch.Tensor:
    """Pairs must be adjacent in memory, which they need not be after batching."""
    physical = batch.physical(x)
    together = physical.stride(-1) == 1 and all(stride % 2 == 0 for stride in physical.stride()[:-1])
    return op(physical if together else physical.contiguous())


linear(aten.view_as_complex.default, back=lambda out, x: to_pairs, batch=_view_as_complex_batch)
linear(
    aten.real.default,
    back=lambda out, x: (lambda g: torch.complex(g, torch.zeros_like(g))) if x.is_complex() else lambda g: g,
    batch=leading,
)
linear(aten.imag.default, back=lambda out, x: lambda g: torch.complex(torch.zeros_like(g), g), batch=leading)


# -- made of two real values ---------------------------------------------------------------------------------

elementwise(
    aten.complex.default,
    x0=lambda out, x, y: lambda g: torch.real(g),
    x1=lambda out, x, y: lambda g: torch.imag(g),
)


@replace(aten.polar.default)
def _polar(size: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    return torch.complex(size * torch.cos(angle), size * torch.sin(angle))


# -- angle and direction -------------------------------------------------------------------------------------


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


def _real_to_complex_back(
    out: torch.Tensor, x: torch.Tensor, dims: Sequence[int], scaling: int, onesided: bool
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The half that is not kept has a zero cotangent; of the result only the real part reaches a real
    argument.
    """
    missing = x.shape[dims[-1]] - out.shape[dims[-1]]

    def back(g: torch.Tensor) -> torch.Tensor:
        whole = (
            aten.constant_pad_nd.default(g.movedim(dims[-1], -1), [0, missing]).movedim(-1, dims[-1])
            if missing
            else g
        )
        return torch.real(aten._fft_c2c.default(whole, dims, scaling, False))

    return back


def _complex_to_real_back(
    out: torch.Tensor, x: torch.Tensor, dims: Sequence[int], scaling: int, last_size: int
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A frequency with a mirror image counts twice: all but the constant, and the highest one of an even
    length.
    """
    frequencies = x.shape[dims[-1]]

    def back(g: torch.Tensor) -> torch.Tensor:
        frequency = torch.arange(frequencies, device=g.device)
        weight = torch.where((frequency > 0) & (frequency <= last_size - frequencies), 2, 1).to(g.dtype)
        return (aten._fft_r2c.default(g, dims, scaling, True).movedim(dims[-1], -1) * weight).movedim(
            -1, dims[-1]
        )

    return back


_along_axes = of_one_if_empty(shifted(1))

linear(
    aten._fft_c2c.default,
    back=lambda out, x, dims, scaling, forward: (
        lambda g: aten._fft_c2c.default(g, dims, scaling, not forward)
    ),
    batch=_along_axes,
)
linear(aten._fft_r2c.default, back=_real_to_complex_back, batch=_along_axes)
linear(aten._fft_c2r.default, back=_complex_to_real_back, batch=_along_axes)
