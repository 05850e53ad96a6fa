"""Fourier transforms. Each is linear; its VJP is its adjoint, which is the transform the other way, with the same scaling.

A transform of real values keeps half of the spectrum: the other half is its mirror image, conjugated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from psgrad.engine.transforms import diagnostics
from psgrad.engine.transforms.rules.families import aten, wrap_dim
from psgrad.engine.transforms.rules.registry import Op, define, replace
from psgrad.errors import TransformError


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

    def back(g: torch.Tensor) -> torch.Tensor:
        frequency = torch.arange(kept, device=g.device)
        weight = torch.where((frequency > 0) & (frequency <= last_size - kept), 2, 1).to(g.dtype)
        return (aten._fft_r2c.default(g, dims, scaling, True).movedim(dims[-1], -1) * weight).movedim(-1, dims[-1])

    return back


def _along_axes(batch: Any, op: Op, x: torch.Tensor, dims: Sequence[int], *rest: Any) -> torch.Tensor:
    physical, axes = batch.physical(x), [wrap_dim(d, x.dim()) + 1 for d in dims]
    if batch.size:
        return op(physical, axes, *rest)
    return op(physical.new_zeros(1, *x.shape), axes, *rest)[:0]  # the kernels fail where there is nothing to do


define(
    aten._fft_c2c.default,
    vjp={0: lambda out, x, dims, scaling, forward: lambda g: aten._fft_c2c.default(g, dims, scaling, not forward)},
    linear=(0,),
    batch=_along_axes,
)
define(aten._fft_r2c.default, vjp={0: _real_to_complex_back}, linear=(0,), batch=_along_axes)
define(aten._fft_c2r.default, vjp={0: _complex_to_real_back}, linear=(0,), batch=_along_axes)


@replace(aten.stft.default)
def _short_time_transform(
    x: torch.Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: torch.Tensor | None = None,
    normalized: bool = False,
    onesided: bool | None = None,
    return_complex: bool | None = None,
    align_to_window: bool | None = None,
) -> torch.Tensor:
    """Each window of the signal transformed by itself. PyTorch's own way turns its result round in place."""
    length = n_fft if win_length is None else win_length
    real = not x.is_complex() and (window is None or not window.is_complex())
    if not 0 < length <= n_fft or (window is not None and window.shape != (length,)) or (real and return_complex is None):
        given = None if window is None else tuple(window.shape)
        raise TransformError(
            f"stft with n_fft={n_fft}, win_length={win_length}, a window of shape {given}, return_complex={return_complex}"
            f"{diagnostics.where()}",
            expected="0 < win_length <= n_fft, a window of shape (win_length,), and return_complex for a real signal",
        )
    before = (n_fft - length) // 2
    signal = x if x.dim() == 2 else x.unsqueeze(0)
    if align_to_window:
        signal = torch.nn.functional.pad(signal, (before, before))
    frames = signal.unfold(-1, n_fft, n_fft // 4 if hop_length is None else hop_length)
    if window is None and length < n_fft:
        window = torch.ones(length, dtype=x.dtype, device=x.device)
    if window is not None:
        frames = frames * torch.nn.functional.pad(window, (before, n_fft - length - before))
    transform = torch.fft.rfft if (real if onesided is None else onesided) else torch.fft.fft
    spectrum = transform(frames, norm="ortho" if normalized else "backward").transpose(1, 2)
    spectrum = spectrum if x.dim() == 2 else spectrum.squeeze(0)
    return torch.view_as_real(spectrum) if return_complex is False else spectrum
