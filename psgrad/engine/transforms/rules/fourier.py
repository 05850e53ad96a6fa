"""Fourier transforms. Each is linear; its VJP is its adjoint, which is the transform the other way, with the same scaling.

A transform of real values keeps half of the spectrum: the other half is its mirror image, conjugated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from psgrad.engine.transforms.rules.families import aten, shifted
from psgrad.engine.transforms.rules.registry import define


def _real_to_complex_back(
    out: torch.Tensor, x: torch.Tensor, dims: Sequence[int], scaling: int, onesided: bool
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The half that is not kept has a zero cotangent; of the result only the real part reaches a real argument."""
    missing = x.shape[dims[-1]] - out.shape[dims[-1]]

    def back(g: torch.Tensor) -> torch.Tensor:
        whole = aten.constant_pad_nd.default(g.movedim(dims[-1], -1), [0, missing]).movedim(-1, dims[-1]) if missing else g
        return torch.real(aten._fft_c2c.default(whole, dims, scaling, False))

    return back


def _complex_to_real_back(
    out: torch.Tensor, x: torch.Tensor, dims: Sequence[int], scaling: int, last_size: int
) -> Callable[[torch.Tensor], torch.Tensor]:
    """A frequency that has a mirror image counts twice: all but the constant, and the highest one of an even length."""
    kept = x.shape[dims[-1]]
    frequency = torch.arange(kept, device=x.device)
    weight = torch.where((frequency > 0) & (frequency <= last_size - kept), 2, 1).to(out.dtype)
    return lambda g: (aten._fft_r2c.default(g, dims, scaling, True).movedim(dims[-1], -1) * weight).movedim(-1, dims[-1])


define(
    aten._fft_c2c.default,
    vjp={0: lambda out, x, dims, scaling, forward: lambda g: aten._fft_c2c.default(g, dims, scaling, not forward)},
    linear=(0,),
    batch=shifted(1),
)
define(aten._fft_r2c.default, vjp={0: _real_to_complex_back}, linear=(0,), batch=shifted(1))
define(aten._fft_c2r.default, vjp={0: _complex_to_real_back}, linear=(0,), batch=shifted(1))
