"""The plainest oracle: torch.autograd on one sample after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def gradients_by_loop(
    function: Callable[..., Tensor], *samples: Tensor, argnums: Sequence[int] = (0,)
) -> tuple[Tensor, ...]:
    """The gradients of `function(*one sample)` in the arguments named, stacked; all arguments are [n,
    ...].
    """
    rows = []
    for one in zip(*samples, strict=True):
        given = [t.clone().requires_grad_(i in argnums) for i, t in enumerate(one)]
        leaves = [given[i] for i in argnums]
        rows.append(torch.autograd.grad(function(*given), leaves, materialize_grads=True))
    return tuple(torch.stack(column) for column in zip(*rows, strict=True))
