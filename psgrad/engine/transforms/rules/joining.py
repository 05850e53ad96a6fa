"""Joining tensors, and padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from psgrad.engine.transforms.rules.families import aten, leading, linear, pooled, sum_to, wrap_dim
from psgrad.engine.transforms.rules.registry import Op, define

# -- joining -------------------------------------------------------------------------------------------------


def _cat_back(
    out: torch.Tensor, tensors: Sequence[torch.Tensor], dim: int = 0
) -> Callable[[int], Callable[[torch.Tensor], torch.Tensor]]:
    # PyTorch allows 1-d empty tensors in any concatenation
    sizes = [t.shape[dim] if t.dim() == out.dim() else 0 for t in tensors]
    shapes, dtypes = [t.shape for t in tensors], [t.dtype for t in tensors]

    def at(place: int) -> Callable[[torch.Tensor], torch.Tensor]:
        start = sum(sizes[:place])

        def back(g: torch.Tensor) -> torch.Tensor:
            part = aten.slice.Tensor(g, dim, start, start + sizes[place])
            return sum_to(part.reshape(shapes[place]), shapes[place], dtypes[place])

        return back

    return at


def _cat_batch(batch: Any, op: Op, tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    rank = max(t.dim() for t in tensors)
    return op([batch.physical(t) for t in tensors if t.dim() == rank or t.numel()], wrap_dim(dim, rank) + 1)


def _stack_back(
    out: torch.Tensor, tensors: Sequence[torch.Tensor], dim: int = 0
) -> Callable[[int], Callable[[torch.Tensor], torch.Tensor]]:
    dtypes = [t.dtype for t in tensors]
    return lambda place: lambda g: aten.select.int(g, dim, place).to(dtypes[place])


linear(aten.cat.default, back=_cat_back, batch=_cat_batch)
linear(
    aten.stack.default,
    back=_stack_back,
    batch=lambda batch, op, tensors, dim=0: op(
        [batch.physical(t) for t in tensors], wrap_dim(dim, tensors[0].dim() + 1) + 1
    ),
)

# -- padding -------------------------------------------------------------------------------------------------

define(
    aten.constant_pad_nd.default,
    vjp={0: lambda out, x, pad, value=0: lambda g: aten.constant_pad_nd.default(g, [-p for p in pad], 0)},
    batch=leading,
)


for _axes in (1, 2, 3):
    for _kind in ("reflection", "replication"):
        _forward = getattr(aten, f"{_kind}_pad{_axes}d").default
        _backward = getattr(aten, f"{_kind}_pad{_axes}d_backward").default
        define(
            _forward,
            vjp={0: lambda out, x, pad, backward=_backward: lambda g: backward(g, x, pad)},
            batch=pooled(_axes),
        )
        define(
            _backward,
            vjp={0: lambda out, g, x, pad, forward=_forward: lambda h: forward(h, pad)},
            batch=pooled(_axes),
        )
