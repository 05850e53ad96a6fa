"""Numbers of PyTorch's that go by their place in memory: where some kernels meet NaN, their part that works
on several numbers at once returns another one than their part for the rest.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_TOGETHER = 64  # numbers, more than a kernel works on at once
_BY_PLACE = frozenset(
    f"{name}_backward" for name in ("hardtanh", "hardswish", "elu", "softshrink", "hardshrink", "logit")
)


class AtPlaces(TorchDispatchMode):
    """Inside it such kernels are given each number alone, or in the middle of others."""

    def __init__(self, alone: bool) -> None:
        super().__init__()
        self.alone = alone

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if op._schema.name.removeprefix("aten::") not in _BY_PLACE:
            return op(*args, **(kwargs or {}))
        shape = torch.broadcast_shapes(*[x.shape for x in args if isinstance(x, Tensor)])

        def run(pick: Any) -> Tensor:
            return op(*[pick(x.expand(shape).reshape(-1)) if isinstance(x, Tensor) else x for x in args])

        if self.alone:
            places = range(shape.numel())
            out = torch.cat([run(lambda x, place=place: x[place : place + 1].clone()) for place in places])
        else:
            out = run(lambda x: x.unsqueeze(1).repeat(1, _TOGETHER))[:, 0]
        return out.reshape(shape)
