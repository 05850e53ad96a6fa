"""Batch norm and instance norm. Statistics across samples (batch norm in training mode) have no per-sample
gradient.
"""

from __future__ import annotations

from typing import Any

import torch

from psgrad.engine.transforms import diagnostics
from psgrad.engine.transforms.rules.families import aten, cast
from psgrad.engine.transforms.rules.registry import replace
from psgrad.engine.transforms.tracer import Tracer
from psgrad.errors import TransformError


@replace(aten.batch_norm.default)
def _batch_norm(
    x: torch.Tensor,
    weight: Any,
    bias: Any,
    mean: Any,
    var: Any,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> torch.Tensor:
    """Batch norm. With running statistics it is an affine map for each channel. With batch statistics it is
    refused if the batch is one sample.

    A mapped value with several rows is a batch of the user (in a vmap over models or over batches), and the
    statistics are those of this batch.
    """
    if x.dim() < 2:
        raise TransformError(
            f"batch norm of a tensor of shape {tuple(x.shape)}{diagnostics.where()}; expected a batch axis"
            " and a channel axis",
        )
    x = _as_kernels_lay_out(x)
    if training:
        if _samples_are_mapped(x) and (
            x.shape[0] == 1 or (mean is not None and not _samples_are_mapped(mean))
        ):
            raise diagnostics.batch_statistics_error(diagnostics.where())
        return _with_batch_statistics(x, weight, bias, mean, var, momentum, eps)
    channels = (1, -1, *(1,) * (x.dim() - 2))
    scale = torch.rsqrt(var + eps)
    if weight is not None:
        scale = scale * weight
    out = (x - mean.reshape(channels)) * scale.reshape(channels)
    return out if bias is None else out + bias.reshape(channels)


def _as_kernels_lay_out(x: torch.Tensor) -> torch.Tensor:
    """The value in the memory layout of PyTorch's kernel: channels last, or contiguous."""
    channels_last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    return x if channels_last is not None and x.is_contiguous(memory_format=channels_last) else x.contiguous()


def _samples_are_mapped(x: Any) -> bool:
    """Whether `x` has a hidden sample axis, at any level."""
    while isinstance(x, Tracer):
        if x.carries_samples:
            return True
        x = x.below()
    return False


def _with_batch_statistics(
    x: torch.Tensor, weight: Any, bias: Any, mean: Any, var: Any, momentum: float, eps: float
) -> torch.Tensor:
    dtype, x = x.dtype, _wide(x)
    axes = [0, *range(2, x.dim())]
    batch_var, batch_mean = torch.var_mean(x, axes, correction=0, keepdim=True)
    if mean is not None:
        _follow(mean, var, batch_mean.reshape(-1), batch_var.reshape(-1), x.numel() // x.shape[1], momentum)
    return cast(_normalised(x, batch_mean, batch_var, weight, bias, eps), dtype)


def _normalised(
    x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor, weight: Any, bias: Any, eps: float
) -> torch.Tensor:
    channels = (1, -1, *(1,) * (x.dim() - 2))
    out = (x - mean) * torch.rsqrt(var + eps)
    if weight is not None:
        out = out * weight.reshape(channels)
    return out if bias is None else out + bias.reshape(channels)


@replace(aten.instance_norm.default)
def _instance_norm(
    x: torch.Tensor,
    weight: Any,
    bias: Any,
    mean: Any,
    var: Any,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> torch.Tensor:
    """Instance norm, with the statistics of each sample's channel. PyTorch defines it as a batch norm of a
    reshaped batch.
    """
    if not use_input_stats:
        return _batch_norm(x, weight, bias, mean, var, False, momentum, eps, cudnn_enabled)
    dtype, x = x.dtype, _wide(x.contiguous())
    axes = list(range(2, x.dim()))
    spread, centre = torch.var_mean(x, axes, correction=0, keepdim=True)
    own = (
        _has_levels_of(x, mean) and _has_levels_of(x, var)
        if isinstance(x, Tracer)
        else isinstance(mean, Tracer) and isinstance(var, Tracer)
    )
    if own:  # other statistics, such as buffers from outside, are not updated
        new_mean, new_var = centre.detach().flatten(1).mean(0), spread.detach().flatten(1).mean(0)
        _follow(mean, var, new_mean, new_var, x.numel() // (x.shape[0] * x.shape[1]), momentum)
    return cast(_normalised(x, centre, spread, weight, bias, eps), dtype)


def _has_levels_of(x: Any, statistic: Any) -> bool:
    """Whether a statistic is traced at all levels of `x`, so that its new value can be written to it."""
    while isinstance(x, Tracer):
        if not isinstance(statistic, Tracer) or statistic.level is not x.level:
            return False
        x, statistic = x.below(), statistic.below()
    return True


def _wide(x: torch.Tensor) -> torch.Tensor:
    """Half-precision values in single precision: rounded means and deviations make the normalised values
    wrong, and derivatives magnify this error.
    """
    return cast(x, torch.promote_types(x.dtype, torch.float32))


def _follow(
    mean: torch.Tensor,
    var: torch.Tensor,
    new_mean: torch.Tensor,
    new_var: torch.Tensor,
    count: int,
    momentum: float,
) -> None:
    """Update running statistics by those of a batch, each computed from `count` numbers."""
    mean.copy_((1 - momentum) * mean + momentum * new_mean)
    var.copy_((1 - momentum) * var + momentum * (count / max(count - 1, 1)) * new_var)
