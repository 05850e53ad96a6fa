"""Normalisation layers: statistics within a sample. Statistics across samples (BatchNorm in training mode) have no per-sample gradient."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from psgrad.engine.transforms import diagnostics
from psgrad.engine.transforms.rules.families import aten, sum_to
from psgrad.engine.transforms.rules.registry import Op, define, replace
from psgrad.errors import TransformError

# -- layer norm -----------------------------------------------------------------------------------------------------------------


def _layer_norm_input(out: Any, x: torch.Tensor, shape: Sequence[int], weight: Any, bias: Any, eps: float) -> Callable[[list[Any]], Any]:
    _, mean, rstd = out
    return lambda gs: (
        aten.native_layer_norm_backward.default(gs[0], x, shape, mean, rstd, weight, bias, [True, False, False])[0] if gs[0] is not None else None
    )


def _layer_norm_weight(out: Any, x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor, bias: Any, eps: float) -> Callable[[list[Any]], Any]:
    _, mean, rstd = out
    size, dtype = weight.shape, weight.dtype
    return lambda gs: sum_to(gs[0] * ((x - mean) * rstd), size, dtype) if gs[0] is not None else None


def _layer_norm_bias(out: Any, x: torch.Tensor, shape: Sequence[int], weight: Any, bias: torch.Tensor, eps: float) -> Callable[[list[Any]], Any]:
    size, dtype = bias.shape, bias.dtype
    return lambda gs: sum_to(gs[0], size, dtype) if gs[0] is not None else None


def _layer_norm_batch(batch: Any, op: Op, x: torch.Tensor, shape: Sequence[int], weight: Any, bias: Any, eps: float) -> Any:
    if not (batch.is_mapped(weight) or batch.is_mapped(bias)):
        return op(batch.physical(x), shape, weight, bias, eps)
    out, mean, rstd = op(batch.physical(x), shape, None, None, eps)
    if weight is not None:
        out = out * batch.aligned(weight, x.dim())
    if bias is not None:
        out = out + batch.aligned(bias, x.dim())
    return out, mean, rstd


define(
    aten.native_layer_norm.default,
    vjp={0: _layer_norm_input, 2: _layer_norm_weight, 3: _layer_norm_bias},
    batch=_layer_norm_batch,
)


def _layer_norm_backward_batch(
    batch: Any, op: Op, g: torch.Tensor, x: torch.Tensor, shape: Sequence[int], mean: Any, rstd: Any, weight: Any, bias: Any, mask: Sequence[bool]
) -> Any:
    assert not (mask[1] or mask[2]), "the rules above ask for the input's cotangent alone"
    cotangent = batch.physical(g)
    if batch.is_mapped(weight):
        cotangent, weight = cotangent * batch.aligned(weight, g.dim()), None
    physical = [batch.physical(t) for t in (mean, rstd)]
    return op(cotangent, batch.physical(x), shape, *physical, weight, None if batch.is_mapped(bias) else bias, mask)


define(aten.native_layer_norm_backward.default, batch=_layer_norm_backward_batch)

# -- group norm -----------------------------------------------------------------------------------------------------------------------


def _group_norm_input(out: Any, x: torch.Tensor, weight: Any, bias: Any, b: int, c: int, hw: int, groups: int, eps: float) -> Callable[..., Any]:
    _, mean, rstd = out
    return lambda gs: (
        aten.native_group_norm_backward.default(gs[0], x, mean, rstd, weight, b, c, hw, groups, [True, False, False])[0]
        if gs[0] is not None
        else None
    )


def _group_norm_weight(out: Any, x: torch.Tensor, weight: torch.Tensor, bias: Any, b: int, c: int, hw: int, groups: int, eps: float) -> Any:
    _, mean, rstd = out
    dtype = weight.dtype

    def back(gs: list[Any]) -> torch.Tensor | None:
        if gs[0] is None:
            return None
        g, values = gs[0].reshape(b, c, hw), x.reshape(b, c, hw)
        # sum over positions of g * (x - mean) * rstd, without writing out the normalised values
        product, total = (g * values).sum(2), g.sum(2)
        each = [s.unsqueeze(2).expand(b, groups, c // groups).reshape(b, c) for s in (mean, rstd)]
        return ((product - each[0] * total) * each[1]).sum(0).to(dtype)

    return back


def _group_norm_bias(out: Any, x: torch.Tensor, weight: Any, bias: torch.Tensor, b: int, c: int, hw: int, groups: int, eps: float) -> Any:
    return lambda gs: gs[0].reshape(b, c, hw).sum([0, 2]) if gs[0] is not None else None


def _group_norm_batch(batch: Any, op: Op, x: torch.Tensor, weight: Any, bias: Any, b: int, *sizes: Any) -> Any:
    mapped = batch.is_mapped(weight) or batch.is_mapped(bias)
    folded = batch.fold(x).contiguous()
    out, mean, rstd = batch.unfold(op(folded, None if mapped else weight, None if mapped else bias, b * batch.size, *sizes))
    if mapped:
        spatial = (1,) * (x.dim() - 2)
        for parameter, combine in ((weight, torch.mul), (bias, torch.add)):
            if parameter is not None:
                out = combine(out, batch.raw(parameter).reshape(*((batch.size, 1) if batch.is_mapped(parameter) else ()), -1, *spatial))
    return out, mean, rstd


define(
    aten.native_group_norm.default,
    vjp={0: _group_norm_input, 1: _group_norm_weight, 2: _group_norm_bias},
    batch=_group_norm_batch,
)


def _group_norm_backward_batch(
    batch: Any, op: Op, g: torch.Tensor, x: torch.Tensor, mean: Any, rstd: Any, weight: Any, b: int, c: int, hw: int, groups: int, mask: Any
) -> Any:
    assert not (mask[1] or mask[2]), "the rules above ask for the input's cotangent alone"
    folded = [batch.fold(t).contiguous() for t in (g, x, mean, rstd)]
    if batch.is_mapped(weight):
        each = batch.raw(weight).repeat_interleave(b, 0)  # [n * b, c]
        folded[0], weight = folded[0] * each.reshape(*each.shape, *(1,) * (folded[0].dim() - 2)), None
    return batch.unfold(op(*folded, weight, b * batch.size, c, hw, groups, mask)[0]), None, None


define(aten.native_group_norm_backward.default, batch=_group_norm_backward_batch)

# -- batch norm -----------------------------------------------------------------------------------------------------------------------


@replace(aten.batch_norm.default)
def _batch_norm(
    x: torch.Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, momentum: float, eps: float, cudnn_enabled: bool
) -> torch.Tensor:
    """With running statistics: an affine map per channel. With batch statistics: refused where the batch is ours."""
    if training:
        if _samples_are_mapped(x):
            raise TransformError(
                f"BatchNorm in training mode{diagnostics.where()}",
                expected="a layer that treats each sample by itself",
                cause="in training mode the statistics are taken over the batch, so one sample's gradient depends on all others: "
                "there is no per-sample gradient",
                next_step="call model.eval() to use the running statistics, or replace the layer by GroupNorm and train again",
            )
        return _with_batch_statistics(x, weight, bias, mean, var, momentum, eps)
    channels = (1, -1, *(1,) * (x.dim() - 2))
    scale = torch.rsqrt(var + eps)
    if weight is not None:
        scale = scale * weight
    out = (x - mean.reshape(channels)) * scale.reshape(channels)
    return out if bias is None else out + bias.reshape(channels)


def _samples_are_mapped(x: Any) -> bool:
    """Whether a sample axis is hidden under `x`, at whatever level."""
    from psgrad.engine.transforms.batching import BatchTracer
    from psgrad.engine.transforms.levels import Tracer

    while isinstance(x, Tracer):
        if isinstance(x, BatchTracer):
            return True
        x = x.below()
    return False


def _with_batch_statistics(x: torch.Tensor, weight: Any, bias: Any, mean: Any, var: Any, momentum: float, eps: float) -> torch.Tensor:
    axes = [0, *range(2, x.dim())]
    channels = (1, -1, *(1,) * (x.dim() - 2))
    batch_var, batch_mean = torch.var_mean(x, axes, correction=0, keepdim=True)
    if mean is not None:
        count = x.numel() // x.shape[1]
        mean.copy_((1 - momentum) * mean + momentum * batch_mean.reshape(-1))
        var.copy_((1 - momentum) * var + momentum * (count / max(count - 1, 1)) * batch_var.reshape(-1))
    out = (x - batch_mean) * torch.rsqrt(batch_var + eps)
    if weight is not None:
        out = out * weight.reshape(channels)
    return out if bias is None else out + bias.reshape(channels)


@replace(aten.instance_norm.default)
def _instance_norm(
    x: torch.Tensor, weight: Any, bias: Any, mean: Any, var: Any, use_input_stats: bool, momentum: float, eps: float, cudnn_enabled: bool
) -> torch.Tensor:
    """Statistics of one sample's channel; PyTorch's own way goes through a batch norm over a reshaped batch."""
    if not use_input_stats:
        return _batch_norm(x, weight, bias, mean, var, False, momentum, eps, cudnn_enabled)
    axes = list(range(2, x.dim()))
    channels = (1, -1, *(1,) * len(axes))
    spread, centre = torch.var_mean(x, axes, correction=0, keepdim=True)
    out = (x - centre) * torch.rsqrt(spread + eps)
    if weight is not None:
        out = out * weight.reshape(channels)
    return out if bias is None else out + bias.reshape(channels)
