"""Composite operators that come down to one other operator: they go there at once, in place of through PyTorch's own definition of them.

What PyTorch does besides, with arguments out of the ordinary (shapes that don't fit, a cast), is left to it. Convolutions are in their
own file.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from psgrad.engine.transforms.interpreter import run
from psgrad.engine.transforms.rules.families import aten
from psgrad.engine.transforms.rules.registry import Op, replace


@replace(aten.group_norm.default)
def _group_norm(
    x: torch.Tensor, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-05, cudnn_enabled: bool = True
) -> torch.Tensor:
    shape, affine = x.shape, [p for p in (weight, bias) if p is not None]
    ordinary = len(shape) > 1 and groups > 0 and shape[1] % groups == 0 and x.is_contiguous()
    if not ordinary or any(p.shape != shape[1:2] or not p.is_contiguous() for p in affine):
        return aten.group_norm.default.decompose(x, groups, weight, bias, eps, cudnn_enabled)  # type: ignore[no-any-return]
    found = run(aten.native_group_norm.default, x, weight, bias, shape[0], shape[1], math.prod(shape[2:]), groups, eps)
    return found[0]  # type: ignore[no-any-return]


@replace(aten.layer_norm.default)
def _layer_norm(
    x: torch.Tensor, shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-05, cudnn_enable: bool = True
) -> torch.Tensor:
    return run(aten.native_layer_norm.default, x, shape, weight, bias, eps)[0]  # type: ignore[no-any-return]


@replace(aten.celu.default)
def _celu(x: torch.Tensor, alpha: Any = 1.0) -> torch.Tensor:
    return run(aten.elu.default, x, alpha, 1.0, 1.0 / alpha)  # type: ignore[no-any-return]


@replace(aten.max_pool2d.default)
def _max_pool2d(x: torch.Tensor, *args: Any) -> torch.Tensor:
    return run(aten.max_pool2d_with_indices.default, x, *args)[0]  # type: ignore[no-any-return]


def _softmax(op: Op, kernel: Op) -> Callable[..., torch.Tensor]:
    def softmax(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        if dtype is not None and dtype != x.dtype:
            return op.decompose(x, dim, dtype)  # type: ignore[no-any-return]
        return run(kernel, x, dim, False)  # type: ignore[no-any-return]

    return softmax


for _op, _kernel in ((aten.softmax.int, aten._softmax.default), (aten.log_softmax.int, aten._log_softmax.default)):
    replace(_op)(_softmax(_op, _kernel))
