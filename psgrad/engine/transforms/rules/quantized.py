"""Products with frozen weights of whole numbers or packed bits.

The weight is a constant of the forward pass. A product with it is linear in the other factor; what the
derivative needs of the weight is unpacked when the derivative is taken, and not kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from psgrad.engine.transforms import diagnostics
from psgrad.engine.transforms.interpreter import run
from psgrad.engine.transforms.rules.families import aten, linear
from psgrad.engine.transforms.rules.registry import Op, constant, define, refuse
from psgrad.errors import TransformError


def _rows(batch: Any, op: Op, x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    """The rows of all samples as one product. A packed weight is the same for all."""
    if any(batch.is_mapped(y) for y in (weight, *rest)):
        raise TransformError(
            f"{op.name()} with a quantised weight of each sample's own{diagnostics.where()}",
            expected="one quantised weight for all samples",
        )
    if not batch.is_mapped(x):
        return batch.physical(op(x, weight, *rest))
    return batch.unfold(op(batch.fold(x), weight, *rest))


# -- products of whole numbers, whose result has no derivative -----------------------------------------------


def _int_mm_batch(batch: Any, op: Op, a: Tensor, b: Tensor) -> Tensor:
    if not batch.is_mapped(b):
        return _rows(batch, op, a, b)
    exact = torch.matmul(batch.raw(a).double(), batch.raw(b).double())  # below 2^53, so every digit is there
    return exact.to(torch.int32)


constant(aten._int_mm.default, batch=_int_mm_batch)


# -- products of floating-point rows with a packed weight ----------------------------------------------------


def _int8_rows(out: Tensor, x: Tensor, weight: Tensor, scales: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda g: run(aten.mm.default, g * scales, weight.to(g.dtype))


def _int8_scales(out: Tensor, x: Tensor, weight: Tensor, scales: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda g: (g * run(aten.mm.default, x, weight.t().to(x.dtype))).sum(0)


define(aten._weight_int8pack_mm.default, vjp={0: _int8_rows, 2: _int8_scales}, linear=(0, 2), batch=_rows)


def _define_packed(op: Op) -> None:
    """How the bits are packed is internal to the kernel: its product with the identity unpacks them."""

    def back(out: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> Callable[[Tensor], Tensor]:
        width, dtype, device = x.shape[1], x.dtype, x.device

        def pull(g: Tensor) -> Tensor:
            columns = op(torch.eye(width, dtype=dtype, device=device), weight, *rest)
            return run(aten.mm.default, g, columns.t())  # type: ignore[no-any-return]

        return pull

    linear(op, back=back, batch=_rows)


for _name in (
    "_weight_int4pack_mm",
    "_weight_int4pack_mm_for_cpu",
    "_weight_int4pack_mm_with_scales_and_zeros",
):
    if hasattr(aten, _name):
        _define_packed(getattr(aten, _name).default)


# -- refused -------------------------------------------------------------------------------------------------


@refuse(aten._scaled_mm.default)
def _scaled_mm(*args: Any, **kwargs: Any) -> Tensor:
    raise TransformError(
        f"a product of float8 matrices (_scaled_mm){diagnostics.where()}",
        cause=("the layer rounds its inputs to float8; PyTorch has no derivative of this product either"),
        next_step=(
            "keep the weights in float8 and cast them up in the forward (weight.to(x.dtype) * scale), or use"
            " weight-only quantisation"
        ),
    )
