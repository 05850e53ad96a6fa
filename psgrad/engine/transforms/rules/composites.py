"""Composite operators that call one other operator directly instead of PyTorch's own definition; and Python
numbers that are read from batched values, where all samples have the same.

PyTorch's definition is used for unusual arguments (shapes that don't fit, a cast). Convolutions are in their
own file.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from psgrad.engine.transforms import diagnostics
from psgrad.engine.transforms.interpreter import run
from psgrad.engine.transforms.rules.families import aten
from psgrad.engine.transforms.rules.registry import Op, constant, replace
from psgrad.engine.transforms.state import Divergence
from psgrad.errors import TransformError


@replace(aten.group_norm.default)
def _group_norm(
    x: torch.Tensor,
    groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-05,
    cudnn_enabled: bool = True,
) -> torch.Tensor:
    shape, affine = x.shape, [p for p in (weight, bias) if p is not None]
    ordinary = len(shape) > 1 and groups > 0 and shape[1] % groups == 0 and x.is_contiguous()
    if not ordinary or any(p.shape != shape[1:2] or not p.is_contiguous() for p in affine):
        return aten.group_norm.default.decompose(x, groups, weight, bias, eps, cudnn_enabled)  # type: ignore[no-any-return]
    result = run(
        aten.native_group_norm.default, x, weight, bias, shape[0], shape[1], math.prod(shape[2:]), groups, eps
    )
    return result[0]  # type: ignore[no-any-return]


@replace(aten.layer_norm.default)
def _layer_norm(
    x: torch.Tensor,
    shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-05,
    cudnn_enable: bool = True,
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


for _op, _kernel in (
    (aten.softmax.int, aten._softmax.default),
    (aten.log_softmax.int, aten._log_softmax.default),
):
    replace(_op)(_softmax(_op, _kernel))


def _followed(batch: Any, values: torch.Tensor) -> torch.Tensor:
    """[n, ...]: the values of each sample, or of the first one that counts in place of those that do not."""
    counted = batch.level.counted
    if counted is None:
        return values
    first = values.index_select(0, counted.int().argmax().reshape(1))
    return torch.where(counted.reshape(-1, *[1] * (values.dim() - 1)), values, first)


def shared_number(batch: Any, op: Op, values: torch.Tensor) -> Any:
    """The Python number that all of `values` [n] are; if they differ, an error or a split of the batch."""
    if not batch.size:
        return aten._local_scalar_dense.default(values.new_zeros(()))
    values = _followed(batch, values)
    first = values[0]
    if bool(((values == first) | ((values != values) & (first != first))).all()):
        return aten._local_scalar_dense.default(first)
    if values.dtype.is_floating_point or values.dtype.is_complex:
        raise TransformError(
            f"{op.name().removeprefix('aten::')} is not possible on a value that differs between"
            f" samples{diagnostics.where()}",
            hint="write the choice with torch.where, or take the number from outside the function",
        )
    raise Divergence(batch.level, values.tolist(), diagnostics.where())


def _number(batch: Any, op: Op, x: torch.Tensor) -> Any:
    if x.numel() != 1:
        return op(x.new_empty(x.shape))  # PyTorch's message
    values = batch.physical(x).reshape(batch.size)
    return shared_number(batch, op, values != 0 if op is aten.is_nonzero.default else values)


constant(aten._local_scalar_dense.default, aten.item.default, aten.is_nonzero.default, batch=_number)


@replace(aten.equal.default)
def _equal(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.shape == y.shape and bool((x == y).all())


@replace(aten.allclose.default)
def _allclose(
    x: torch.Tensor, y: torch.Tensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False
) -> bool:
    return bool(aten.isclose.default(x, y, rtol, atol, equal_nan).all())


def _nonzero(batch: Any, op: Op, x: torch.Tensor) -> torch.Tensor:
    """Tensors of equal length if all samples have as many places; else the batch is split by their number."""
    physical = _followed(batch, batch.physical(x))
    count = shared_number(batch, op, (physical != 0).reshape(batch.size, x.numel()).sum(1))
    return op(physical).reshape(batch.size, count, x.dim() + 1)[..., 1:]


constant(aten.nonzero.default, batch=_nonzero)


def _repeat_interleave(
    batch: Any, op: Op, repeats: torch.Tensor, *, output_size: int | None = None
) -> torch.Tensor:
    physical = _followed(batch, batch.physical(repeats))
    count = shared_number(batch, op, physical.sum(1))
    return op(physical.reshape(-1)).reshape(batch.size, count) % max(repeats.shape[0], 1)


constant(aten.repeat_interleave.Tensor, batch=_repeat_interleave)
