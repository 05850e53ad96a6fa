"""Python numbers and lengths that are taken from batched values: where all samples give the same, that is it."""

from __future__ import annotations

from typing import Any

import torch

from psgrad.engine.transforms import diagnostics
from psgrad.engine.transforms.branching import Divergence
from psgrad.engine.transforms.rules.families import aten
from psgrad.engine.transforms.rules.registry import Op, constant, replace
from psgrad.errors import TransformError


def shared_number(batch: Any, op: Op, values: torch.Tensor) -> Any:
    """The Python number that all of `values` [n] are; where they differ, a refusal or a split of the batch."""
    if not batch.size:
        return aten._local_scalar_dense.default(values.new_zeros(()))
    first = values[0]
    if bool(((values == first) | ((values != values) & (first != first))).all()):
        return aten._local_scalar_dense.default(first)
    if values.dtype.is_floating_point or values.dtype.is_complex:
        raise TransformError(
            f"{op.name().removeprefix('aten::')} is not possible on a value that differs between samples{diagnostics.where()}",
            expected="a program that does the same for every sample",
            cause="a Python number is taken from one sample's data",
            next_step="write the choice with torch.where, or take the number from outside the function",
        )
    raise Divergence(batch.level, values.tolist(), diagnostics.where())


def _number(batch: Any, op: Op, x: torch.Tensor) -> Any:
    if x.numel() != 1:
        return op(x.new_empty(x.shape))  # PyTorch's own words for it
    values = batch.physical(x).reshape(batch.size)
    return shared_number(batch, op, values != 0 if op is aten.is_nonzero.default else values)


constant(aten._local_scalar_dense.default, aten.item.default, aten.is_nonzero.default, batch=_number)


@replace(aten.equal.default)
def _equal(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.shape == y.shape and bool((x == y).all())


@replace(aten.allclose.default)
def _allclose(x: torch.Tensor, y: torch.Tensor, rtol: float = 1e-5, atol: float = 1e-8, equal_nan: bool = False) -> bool:
    return bool(aten.isclose.default(x, y, rtol, atol, equal_nan).all())


def _nonzero(batch: Any, op: Op, x: torch.Tensor) -> torch.Tensor:
    """As many places in each sample, or the samples with as many places together."""
    physical = batch.physical(x)
    count = shared_number(batch, op, (physical != 0).reshape(batch.size, -1).sum(1))
    return op(physical).reshape(batch.size, count, x.dim() + 1)[..., 1:]


constant(aten.nonzero.default, batch=_nonzero)


def _repeat_interleave(batch: Any, op: Op, repeats: torch.Tensor, *, output_size: int | None = None) -> torch.Tensor:
    physical = batch.physical(repeats)
    count = shared_number(batch, op, physical.sum(1))
    return op(physical.reshape(-1)).reshape(batch.size, count) % max(repeats.shape[0], 1)


constant(aten.repeat_interleave.Tensor, batch=_repeat_interleave)
