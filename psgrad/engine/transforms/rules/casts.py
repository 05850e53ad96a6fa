"""Operators without a derivative (comparisons, rounding), casts and copies."""

from __future__ import annotations

from typing import Any

import torch

from psgrad.engine.transforms.private_torch import is_non_overlapping_and_dense_or_false
from psgrad.engine.transforms.rules.families import (
    aten,
    broadcasting,
    cast,
    elementwise,
    elementwise_batch,
    linear,
    unchanged,
)
from psgrad.engine.transforms.rules.registry import constant, define

# -- constants and casts -------------------------------------------------------------------------------------

for _name in ["eq", "ne", "lt", "le", "gt", "ge"]:
    _packet = getattr(aten, _name)
    constant(_packet.Tensor, _packet.Scalar, batch=elementwise_batch)
constant(
    aten.logical_and.default,
    aten.logical_or.default,
    aten.logical_xor.default,
    aten.logical_not.default,
    aten.bitwise_and.Tensor,
    aten.bitwise_or.Tensor,
    aten.bitwise_xor.Tensor,
    aten.bitwise_and.Scalar,
    aten.bitwise_or.Scalar,
    aten.bitwise_not.default,
    aten.isnan.default,
    aten.isinf.default,
    aten.signbit.default,
    aten.floor_divide.default,
    aten.heaviside.default,
    batch=elementwise_batch,
)


# A cotangent of zero is passed on from these, as in PyTorch: if a derivative before them is not a number,
# neither is the product.
elementwise(
    aten.sign.default,
    aten.floor.default,
    aten.ceil.default,
    aten.round.default,
    aten.round.decimals,
    aten.trunc.default,
    x0=lambda out, x, *args, **kwargs: torch.zeros_like,
)


def _exact_division(op: Any) -> Any:
    """`div` with a rounding mode is a step function; with the mode None it is a division."""
    return lambda x, y, *, rounding_mode=None: op(x, y) if rounding_mode is None else None


define(aten.div.Tensor_mode, instead=_exact_division(aten.div.Tensor), batch=elementwise_batch)
define(aten.div.Scalar_mode, instead=_exact_division(aten.div.Scalar), batch=elementwise_batch)


def _overwrite_batch(
    batch: Any, op: Any, target: torch.Tensor, source: Any, *args: Any, **kwargs: Any
) -> Any:
    """The result has the target's shape, so the target needs its sample axis even where only the source has
    one.
    """
    aligned = batch.aligned(source, target.dim()) if isinstance(source, torch.Tensor) else source
    if op is aten.fill.Tensor:  # the kernel takes one number, not one a sample
        return aten.copy.default(batch.physical(target), aligned)
    return op(batch.physical(target), aligned, *args, **kwargs)


def _overwritten(out: torch.Tensor, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """A cotangent of zeros, not None: if the derivative of the overwritten value is not finite, autograd's is
    NaN.
    """
    shape, dtype, device = x.shape, x.dtype, x.device
    return lambda g: torch.zeros(shape, dtype=dtype, device=device)


define(
    aten.copy.default,
    aten.fill.Tensor,
    vjp={0: _overwritten, 1: broadcasting(unchanged, 1)},
    batch=_overwrite_batch,
)
define(aten.fill.Scalar, vjp={0: _overwritten}, batch=_overwrite_batch)


def _copied(
    batch: Any, op: Any, x: torch.Tensor, *, memory_format: Any = None, **kwargs: Any
) -> torch.Tensor:
    """The value without a memory format of channels last, which refers to a sample's axes."""
    keep = memory_format in (None, torch.contiguous_format, torch.preserve_format)
    layout = memory_format if keep else None
    if not is_non_overlapping_and_dense_or_false(
        x
    ):  # dense for one sample, too: this decides whether a reshape of it is a view
        layout = torch.contiguous_format
    return op(batch.physical(x), memory_format=layout, **kwargs)


linear(aten._to_copy.default, back=lambda out, x, **kwargs: _cast_back(x.dtype, x.device), batch=_copied)
linear(aten.clone.default, back=unchanged, batch=_copied)


def _cast_back(dtype: torch.dtype, device: torch.device) -> Any:
    return lambda g: cast(g if g.device == device else aten._to_copy.default(g, device=device), dtype)
