"""Normalisations, and one loss, as programs of elementwise operators.

The second derivatives of PyTorch's kernels take the means and deviations that the kernels return for constants, so that third
derivatives through them are wrong; the oracle of nested transforms runs these instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class WrittenOut:
    """torch.nn.functional, but for five functions."""

    def __getattr__(self, name: str) -> Any:
        return getattr(F, name)

    @staticmethod
    def layer_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
        return _affine(_normal(_wide(x), list(range(-len(shape), 0)), eps), weight, bias, x.dtype)

    @staticmethod
    def group_norm(x: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
        F.group_norm(x, groups, weight, bias, eps)  # which refuses what it refuses
        cut = _wide(x).reshape(x.shape[0], groups, -1)
        return _affine(_normal(cut, [2], eps).reshape(x.shape), _by_channel(weight, x), _by_channel(bias, x), x.dtype)

    @staticmethod
    def instance_norm(x: Tensor, *, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
        F.instance_norm(x, weight=weight, bias=bias, eps=eps)
        return _affine(_normal(_wide(x), list(range(2, x.dim())), eps), _by_channel(weight, x), _by_channel(bias, x), x.dtype)

    @staticmethod
    def binary_cross_entropy(x: Tensor, y: Tensor, *, reduction: str = "mean") -> Tensor:
        """Without what the kernel's derivatives add to what they divide by."""
        loss = -(y * x.log().clamp_min(-100) + (1 - y) * (-x).log1p().clamp_min(-100))
        return {"mean": loss.mean(), "sum": loss.sum(), "none": loss}[reduction]

    @staticmethod
    def batch_norm(
        x: Tensor,
        mean: Tensor | None,
        var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        F.batch_norm(x, mean, var, weight, bias, training, momentum, eps)
        wide = _wide(x)
        if training or mean is None or var is None:
            out = _normal(wide, [0, *range(2, x.dim())], eps)
        else:
            out = (wide - _by_channel(mean, x)) * (_by_channel(var, x) + eps).rsqrt()
        return _affine(out, _by_channel(weight, x), _by_channel(bias, x), x.dtype)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _normal(x: Tensor, axes: list[int], eps: float) -> Tensor:
    centred = x - x.mean(axes, keepdim=True)
    return centred * (centred.square().mean(axes, keepdim=True) + eps).rsqrt()


def _by_channel(values: Tensor | None, x: Tensor) -> Any:
    return None if values is None else _wide(values).reshape(1, -1, *(1,) * (x.dim() - 2))


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    x = x if weight is None else x * weight
    return (x if bias is None else x + bias).to(dtype)
