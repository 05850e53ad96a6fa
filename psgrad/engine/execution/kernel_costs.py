"""What one kernel takes: how much it computes and moves, and the memory that it needs beside its result."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch

from psgrad.engine.gradients.costs import Machine
from psgrad.engine.transforms.operators import Op
from psgrad.engine.transforms.private_torch import schema_of, tree_leaves

Kind = Literal["view", "product", "convolution", "grouped convolution", "other"]


@dataclass(frozen=True)
class Kernel:
    """One kernel of a pass.

    Attributes:
        name: the operator's, without overload.
        kind: how it is priced.
        operations: floating-point operations, of products, convolutions and attention.
        moved: bytes read and written.
        result: bytes of fresh memory that its results take.
        workspace: bytes that it takes meanwhile, beyond its results.
        sizes: (batch, rows, columns, inner) of a product.
        dtype: of what is multiplied.
    """

    name: str
    kind: Kind
    operations: float
    moved: int
    result: int
    workspace: int
    sizes: tuple[int, int, int, int]
    dtype: torch.dtype

    @property
    def is_view(self) -> bool:
        return self.kind == "view"

    def seconds(self, machine: Machine) -> float:
        """What it takes on a machine, its call included."""
        if self.kind == "view":
            return machine.call_seconds / 2
        if self.kind == "product":
            return machine.matmul_seconds(*self.sizes, self.dtype)
        if self.kind in ("convolution", "grouped convolution"):
            moved = self.moved + 2 * self.workspace
            return machine.convolution_seconds(
                self.operations, moved, self.dtype, grouped=self.kind == "grouped convolution"
            )
        computing = self.operations / machine.product_rate(self.dtype)
        return computing + machine.stream_seconds(self.moved, self.result)


def kernel_of(op: Op, args: Any, kwargs: Any, results: Any, fresh: int) -> Kernel:
    """The kernel that this call of an operator is; `fresh` bytes of its results are new memory, the rest
    views and what it wrote into.
    """
    given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    made = [x for x in tree_leaves(results) if isinstance(x, torch.Tensor)]
    name = schema_of(op).name.removeprefix("aten::").removesuffix("_") or schema_of(op).name
    dtype = next((x.dtype for x in given if x.dtype.is_floating_point), torch.float32)
    kind: Kind = "other"
    operations, workspace, moved, sizes = 0.0, 0, sum(map(_bytes, (*given, *made))), (1, 1, 1, 1)
    if not fresh and not schema_of(op).is_mutable:
        kind, moved = "view", 0
    elif found := _product_sizes(name, args):
        kind, sizes, operations = "product", found, 2.0 * math.prod(found)
    elif name in ("convolution", "convolution_backward"):
        kind, operations, workspace = _convolution(name, args, made)
    elif "attention" in name and len(given) >= 3:
        operations = _attention_operations(name, args)
    return Kernel(name, kind, operations, moved, fresh, workspace, sizes, dtype)


def _bytes(x: torch.Tensor) -> int:
    """What a tensor holds in memory: an axis that is expanded counts once."""
    return (
        math.prod(size for size, stride in zip(x.shape, x.stride(), strict=True) if stride or size == 0)
        * x.element_size()
    )


def _product_sizes(name: str, args: Any) -> tuple[int, int, int, int] | None:
    """(batch, rows, columns, inner) of a matrix product; None for anything else."""
    if name in ("mm", "bmm", "matmul", "mv", "dot"):
        a, b = args[:2]
    elif name in ("addmm", "baddbmm", "addmv"):
        a, b = args[1:3]
    elif name == "linear":
        a, weight = args[:2]
        return 1, a.numel() // max(weight.shape[1], 1), weight.shape[0], weight.shape[1]
    else:
        return None
    rows = a.shape[-2] if a.dim() > 1 else 1
    columns = b.shape[-1] if b.dim() > 1 else 1
    if a.dim() > 2 and b.dim() <= 2:
        return 1, math.prod(a.shape[:-1]), columns, a.shape[-1]
    batch = math.prod(torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]))
    return batch, rows, columns, a.shape[-1]


def _attention_operations(name: str, args: Any) -> float:
    backward = "backward" in name
    q, k, v = args[1:4] if backward else args[:3]
    pairs = math.prod(q.shape[:-1]) * k.shape[-2]
    return pairs * (2.0 * q.shape[-1] + 2.0 * v.shape[-1]) * (2.5 if backward else 1)


def _convolution(name: str, args: Any, made: list[torch.Tensor]) -> tuple[Kind, float, int]:
    """(kind, operations, workspace) of a convolution, or of its derivatives that are asked for."""
    forward = name == "convolution"
    g, x, weight = (made[0], args[0], args[1]) if forward else args[:3]
    transposed, groups = (args[6], args[8]) if forward else (args[7], args[9])
    wanted = (True, False, False) if forward else tuple(args[10])
    narrow = x if transposed else g
    each = 2.0 * narrow.shape[0] * math.prod(narrow.shape[2:]) * weight.numel()
    # The backward pass through a stride is a convolution at every place of the input.
    operations = each if forward else each * (wanted[0] + wanted[1]) * math.prod(args[4])
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
    return "grouped convolution" if groups > 1 else "convolution", operations, copies + max(passes, default=0)


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
