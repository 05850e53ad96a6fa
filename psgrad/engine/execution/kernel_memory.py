"""The memory that a kernel takes beside its results."""

from __future__ import annotations

import math
from typing import Any

import torch

from psgrad.engine.transforms.operators import Op
from psgrad.engine.transforms.private_torch import schema_of, tree_leaves


def workspace_of(op: Op, args: Any, results: Any) -> int:
    """Bytes that this call of an operator takes meanwhile, beyond its results: of convolutions."""
    made = [x for x in tree_leaves(results) if isinstance(x, torch.Tensor)]
    name = schema_of(op).name.removeprefix("aten::").removesuffix("_")
    return _of_convolution(name, args, made) if name in ("convolution", "convolution_backward") else 0


def _bytes(x: torch.Tensor) -> int:
    """What a tensor holds in memory: an axis that is expanded counts once."""
    return (
        math.prod(size for size, stride in zip(x.shape, x.stride(), strict=True) if stride or size == 0)
        * x.element_size()
    )


def _of_convolution(name: str, args: Any, made: list[torch.Tensor]) -> int:
    """The workspace of a convolution, or of its derivatives that are asked for."""
    forward = name == "convolution"
    g, x, weight = (made[0], args[0], args[1]) if forward else args[:3]
    transposed, groups = (args[6], args[8]) if forward else (args[7], args[9])
    wanted = (True, False, False) if forward else tuple(args[10])
    # Operands that do not lie in order are copied: a weight of which only the shape counts is one element,
    # expanded.
    copies = sum(
        _whole(each) for each in (g, x, weight) if not (forward and each is g) and not each.is_contiguous()
    )
    if x.device.type != "cpu":
        passes = [
            _bytes(g) + _bytes(x)
        ]  # a GPU's libraries choose for themselves; as much as the operands is a common amount
    elif not _takes_onednn(x, weight, groups):
        image, other = (g, x) if transposed else (x, g)
        passes = [
            image.shape[0]
            * math.prod(weight.shape[1:])
            * groups
            * math.prod(other.shape[2:])
            * x.element_size()
        ]
    else:
        passes = [_blocked_workspace(x, weight, g, "out")] if forward else []
        passes += [_blocked_workspace(g, weight, x, "input")] if not forward and wanted[0] else []
        passes += [_blocked_workspace(g, x, weight, "weight")] if not forward and wanted[1] else []
    return copies + max(passes, default=0)


def _takes_onednn(x: torch.Tensor, weight: torch.Tensor, groups: int) -> bool:
    """Whether PyTorch leaves a convolution on a CPU to oneDNN (use_mkldnn in its Convolution.cpp); else
    patches are materialised.
    """
    if x.dtype == torch.float64 or not torch.backends.mkldnn.is_available():
        return False
    return groups > 1 or x.shape[0] > 1 or x.numel() > 20480 or min(weight.shape[2:]) > 3


_LANES = 16  # channels in a block of oneDNN's layout


def _blocked_workspace(first: torch.Tensor, second: torch.Tensor, out: torch.Tensor, which: str) -> int:
    """Bytes that oneDNN takes beyond its result: it lays operands out in blocks of 16 channels, and the
    result back.

    As PyTorch's allocator counts them.
    """
    result = _blocked(out, 0 if which == "weight" else 1, always=which == "input")
    second_bytes = _blocked(second, 1 if which == "weight" else 0)
    return max(_blocked(first) + second_bytes + result, result + _whole(out)) - _whole(out)


def _whole(x: torch.Tensor) -> int:
    return x.numel() * x.element_size()


def _blocked(x: torch.Tensor, axis: int = 1, *, always: bool = False) -> int:
    """Bytes of a copy with the channels in whole blocks; 0 where so few channels are read as they lie."""
    channels = x.shape[axis]
    if axis == 1 and channels <= 3 and not always:
        return 0
    return _whole(x) // max(channels, 1) * (-(-channels // _LANES) * _LANES)
