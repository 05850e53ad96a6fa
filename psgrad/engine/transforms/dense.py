"""Kernels of PyTorch that read an argument's memory as if it were contiguous, and what makes it so.

Batching hands expanded tensors (stride 0) to kernels: a value that all samples share, the cotangent of a sum. Most kernels read by
strides. Those listed here take the address of the first element and read on from there: with expanded or sliced memory they return wrong
numbers, or read outside the tensor. `tests/engine/transforms/kernel_layouts.py` searches for them among all kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

aten = torch.ops.aten

# By kernel, the positions of the arguments that it reads as contiguous memory.
READ_AS_CONTIGUOUS: dict[Any, tuple[int, ...]] = {
    aten.native_layer_norm_backward.default: (3, 4),
    aten.native_group_norm.default: (0, 1, 2),
    aten.native_group_norm_backward.default: (0, 1, 2, 3, 4),
    aten.adaptive_max_pool3d_backward.default: (2,),
    aten.fractional_max_pool2d_backward.default: (4,),
    aten.fractional_max_pool3d_backward.default: (4,),
    aten._ctc_loss.default: (1,),
    aten._ctc_loss.Tensor: (1, 2, 3),
    aten._ctc_loss_backward.default: (2, 5, 6),
    aten._ctc_loss_backward.Tensor: (2, 3, 4, 5, 6),
    aten._cdist_backward.default: (0, 1, 2, 4),
    aten._linalg_check_errors.default: (0,),
    aten.linalg_matrix_exp.default: (0,),
}


def contiguous(positions: tuple[int, ...], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """An operator's arguments with contiguous memory at `positions`. A tracer has none of its own and stays: its level comes here again."""
    return tuple([a.contiguous() if i in positions and type(a) is torch.Tensor else a for i, a in enumerate(args)])


def on_contiguous_memory(op: Any, positions: tuple[int, ...]) -> Callable[..., Any]:
    """`op` as a batching rule may call it."""
    return partial(_call, op, positions)


def _call(op: Any, positions: tuple[int, ...], *args: Any, **kwargs: Any) -> Any:
    return op(*contiguous(positions, args), **kwargs)
