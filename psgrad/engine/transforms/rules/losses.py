"""Softmax and the losses. Most losses are a few elementwise operators and a mean; PyTorch's tables write them so."""

from __future__ import annotations

from typing import Any

import torch

from psgrad.engine.transforms.rules.families import aten, wrap_dim
from psgrad.engine.transforms.rules.registry import Op, define, replace


def _softmax_batch(batch: Any, op: Op, x: torch.Tensor, dim: int, half_to_float: bool) -> torch.Tensor:
    if x.dim() == 0:
        return op(batch.physical(x).unsqueeze(1), 1, half_to_float).squeeze(1)
    return op(batch.physical(x), wrap_dim(dim, x.dim()) + 1, half_to_float)


def _softmax_backward_batch(batch: Any, op: Op, g: torch.Tensor, out: torch.Tensor, dim: int, dtype: torch.dtype) -> torch.Tensor:
    if g.dim() == 0:
        return op(batch.physical(g).unsqueeze(1), batch.physical(out).unsqueeze(1), 1, dtype).squeeze(1)
    return op(batch.physical(g), batch.physical(out), wrap_dim(dim, g.dim()) + 1, dtype)


for _forward, _backward in (
    (aten._softmax.default, aten._softmax_backward_data.default),
    (aten._log_softmax.default, aten._log_softmax_backward_data.default),
):
    define(
        _forward,
        vjp={0: lambda out, x, dim, half_to_float, backward=_backward: lambda g, dtype=x.dtype: backward(g, out, dim, dtype)},
        batch=_softmax_batch,
    )
    define(_backward, batch=_softmax_backward_batch)

define(
    aten._softmax_backward_data.default,
    vjp={
        0: lambda out, g, y, dim, dtype: lambda h: aten._softmax_backward_data.default(h, y, dim, dtype),
        1: lambda out, g, y, dim, dtype: lambda h: h * (g - (g * y).sum(dim, keepdim=True)) - g * (h * y).sum(dim, keepdim=True),
    },
)
define(
    aten._log_softmax_backward_data.default,
    vjp={
        0: lambda out, g, y, dim, dtype: lambda h: h - (h * torch.exp(y)).sum(dim, keepdim=True),
        1: lambda out, g, y, dim, dtype: lambda h: -h * torch.exp(y) * g.sum(dim, keepdim=True),
    },
)
define(
    aten._safe_softmax.default,
    vjp={0: lambda out, x, dim, dtype=None: lambda g, kind=x.dtype: aten._softmax_backward_data.default(g, out, dim, kind)},
    batch=lambda batch, op, x, dim, dtype=None: op(batch.physical(x), wrap_dim(dim, x.dim()) + 1, dtype),
)


def reduced(loss: torch.Tensor, reduction: int) -> torch.Tensor:
    return loss if reduction == 0 else loss.mean() if reduction == 1 else loss.sum()


@replace(aten.nll_loss_forward.default)
@replace(aten.nll_loss2d_forward.default)
def _nll_loss_forward(
    log_probabilities: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, reduction: int, ignore_index: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Works for targets of any rank: classes are on axis 1, or on axis 0 of a single vector."""
    axis = 0 if log_probabilities.dim() == 1 else 1
    counted = target != ignore_index
    safe = torch.where(counted, target, torch.zeros_like(target))
    picked = -torch.gather(log_probabilities, axis, safe.unsqueeze(axis)).squeeze(axis)
    if weight is not None:
        weights = torch.where(counted, weight[safe], torch.zeros((), dtype=weight.dtype, device=weight.device))
        picked = picked * weights
    else:
        weights = counted.to(log_probabilities.dtype)
    picked = torch.where(counted, picked, torch.zeros((), dtype=picked.dtype, device=picked.device))
    total = weights.sum()
    if reduction == 0:
        return picked, torch.zeros_like(total)
    return (picked.sum() / total if reduction == 1 else picked.sum()), total


@replace(aten.mse_loss.default)
def _mse_loss(x: torch.Tensor, y: torch.Tensor, reduction: int = 1) -> torch.Tensor:
    difference = x - y
    return reduced(difference * difference, reduction)


@replace(aten.huber_loss.default)
def _huber_loss(x: torch.Tensor, y: torch.Tensor, reduction: int = 1, delta: float = 1.0) -> torch.Tensor:
    distance = (x - y).abs()
    return reduced(torch.where(distance < delta, 0.5 * distance * distance, delta * (distance - 0.5 * delta)), reduction)


@replace(aten.smooth_l1_loss.default)
def _smooth_l1_loss(x: torch.Tensor, y: torch.Tensor, reduction: int = 1, beta: float = 1.0) -> torch.Tensor:
    distance = (x - y).abs()
    if beta == 0:
        return reduced(distance, reduction)
    return reduced(torch.where(distance < beta, 0.5 * distance * distance / beta, distance - 0.5 * beta), reduction)


@replace(aten.binary_cross_entropy.default)
def _binary_cross_entropy(x: torch.Tensor, y: torch.Tensor, weight: Any = None, reduction: int = 1) -> torch.Tensor:
    # PyTorch's kernel clamps the logarithms at -100
    loss = -(y * torch.log(x).clamp(min=-100) + (1 - y) * torch.log1p(-x).clamp(min=-100))
    return reduced(loss if weight is None else loss * weight, reduction)


@replace(aten.binary_cross_entropy_with_logits.default)
def _binary_cross_entropy_with_logits(
    x: torch.Tensor, y: torch.Tensor, weight: Any = None, pos_weight: Any = None, reduction: int = 1
) -> torch.Tensor:
    softplus = aten.softplus.default(-x)
    loss = (1 - y) * x + (softplus if pos_weight is None else (1 + (pos_weight - 1) * y) * softplus)
    return reduced(loss if weight is None else loss * weight, reduction)
