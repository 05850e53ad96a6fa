"""What one kernel takes: its class, how much it computes and moves, and the memory that it needs beside its
result.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch

from psgrad.engine.gradients.costs import Machine
from psgrad.engine.transforms.operators import Op
from psgrad.engine.transforms.private_torch import schema_of, tree_leaves

Kind = Literal[
    "view",
    "product",
    "convolution",
    "grouped convolution",
    "attention",
    "pooling",
    "scattered",
    "transcendental",
    "stream",
]

# fmt: off
_TRANSCENDENTAL = frozenset({
    "exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "logsumexp", "sin", "cos", "tan", "tanh",
    "tanh_backward", "sigmoid",
    "sigmoid_backward", "erf", "erfc", "erfinv", "gelu", "gelu_backward", "silu", "silu_backward", "softplus",
    "mish", "elu", "pow",
    "_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data", "bernoulli",
    "native_dropout", "normal",
    "uniform", "rand", "randn",
})
# Whole rows where an index says; single elements, of which each moves a cache line.
_ROWS = frozenset(
    {"index", "index_select", "embedding", "index_add", "index_put", "index_copy", "embedding_dense_backward",
     "cumsum"}
)
_ELEMENTS = frozenset(
    {"gather", "take", "take_along_dim", "scatter", "scatter_add", "scatter_reduce", "masked_scatter", "sort",
     "topk"}
)
_WINDOWS = frozenset({"max_pool2d_with_indices", "avg_pool2d", "im2col", "col2im", "unfold_backward"})
_FACTORIES = frozenset({
    "new_zeros", "new_ones", "new_full", "new_empty", "zeros_like", "ones_like", "empty_like", "full_like",
    "nll_loss_forward",
    "nll_loss_backward", "zeros", "ones", "full", "arange",
})
# fmt: on
_LINE = 64  # bytes of a cache line


@dataclass(frozen=True)
class Kernel:
    """One kernel of a pass.

    Attributes:
        name: the operator's, without overload.
        kind: which of the machine's constants price it.
        operations: floating-point operations, of products, convolutions and attention.
        moved: bytes read and written.
        result: bytes of fresh memory that its results take.
        workspace: bytes that it takes meanwhile, beyond its results.
        sizes: (batch, rows, columns, inner) of a product.
        elements: of the result.
        dtype: of what is multiplied.
    """

    name: str
    kind: Kind
    operations: float
    moved: int
    result: int
    workspace: int
    sizes: tuple[int, int, int, int]
    elements: int
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
        if self.kind == "attention":
            return machine.attention_seconds(self.operations, self.moved, self.dtype)
        if self.kind == "pooling":
            return machine.call_seconds + self.elements / machine.pooling
        if self.kind == "scattered":
            return machine.scattered_seconds(self.moved)
        if self.kind == "transcendental":
            return machine.transcendental_seconds(self.elements, self.moved)
        return machine.stream_seconds(self.moved, self.result)


def kernel_of(op: Op, args: Any, kwargs: Any, results: Any, fresh: int) -> Kernel:
    """The kernel that this call of an operator is; `fresh` bytes of its results are new memory, the rest
    views and what it wrote into.
    """
    given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    made = [x for x in tree_leaves(results) if isinstance(x, torch.Tensor)]
    name = schema_of(op).name.removeprefix("aten::").removesuffix("_") or schema_of(op).name
    read, written = sum(map(_bytes, given)), sum(map(_bytes, made))
    dtype = next((x.dtype for x in given if x.dtype.is_floating_point), torch.float32)
    elements = sum(x.numel() for x in made)
    kind: Kind = "stream"
    operations, workspace, moved, sizes = 0.0, 0, read + written, (1, 1, 1, 1)
    if not fresh and not schema_of(op).is_mutable:
        kind, moved = "view", 0
    elif found := _product_sizes(name, args):
        kind, sizes, operations = "product", found, 2.0 * math.prod(found)
    elif name in ("convolution", "convolution_backward"):
        kind, operations, workspace = _convolution(name, args, made)
    elif "attention" in name and len(given) >= 3:
        kind, operations = "attention", _attention_operations(name, args)
    elif name in _WINDOWS:
        kind, elements = "pooling", max(x.numel() for x in (*given, *made))
    elif name in _ROWS:
        kind, moved = "scattered", 2 * max(min(read, written), fresh)
    elif name in _ELEMENTS:
        kind, moved = (
            "scattered",
            _LINE * min(x.numel() for x in given if x.dim()) + (fresh if "scatter" in name else 0),
        )
    elif name in _FACTORIES:
        moved = fresh
    elif name in _TRANSCENDENTAL:
        kind = "transcendental"
    return Kernel(name, kind, operations, moved, fresh, workspace, sizes, elements, dtype)


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
