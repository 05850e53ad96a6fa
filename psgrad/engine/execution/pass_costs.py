"""What a pass will take, found without running it: its kernels in order, and the memory that lives between
them.

A kernel is described by its class, by how much it computes and moves, and by what it takes beside its result.
The function runs on tensors without values. Each kernel that it would run is entered with what it computes
and moves; memory is counted from the moment a kernel makes it to the moment the last tensor that sees it is
gone, which is when the pass itself would give it back.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from psgrad.engine.gradients.costs import Machine
from psgrad.engine.gradients.precision_guard import flagging, unchecked
from psgrad.engine.transforms.capture_guard import (
    NoReads,
    NotCapturable,
    RandomStates,
    Watch,
    modules_unchanged,
    python_random_states,
)
from psgrad.engine.transforms.operators import Op
from psgrad.engine.transforms.private_torch import (
    DataDependentOutputException,
    DispatchMode,
    DynamicOutputShapeException,
    FakeTensorMode,
    schema_of,
    storage_key,
    tree_leaves,
    tree_map,
)
from psgrad.engine.transforms.tracer import Tracer

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


__all__ = ["Like", "NotCapturable", "PassCosts", "observe_pass", "trace_pass"]


@dataclass(frozen=True)
class Like:
    """A contiguous tensor that need not exist, as an argument of `traced`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def rows(cls, x: torch.Tensor, count: int) -> Like:
        """As `x`, with so many rows."""
        return cls((count, *x.shape[1:]), x.dtype, x.device)


@dataclass(frozen=True)
class PassCosts:
    """What a call would do.

    Attributes:
        kernels: in order.
        operators: how many reached a level of the transforms, whose Python they cost.
        peak_bytes: the most memory that it has at a time, beyond its arguments and what it takes from
            outside; results are in it.
        result_bytes: what is left of that in the end.
        argument_bytes: the memory of its arguments.
        result: what it returned, tensors without values in it.
    """

    kernels: tuple[Kernel, ...]
    operators: int
    peak_bytes: int
    result_bytes: int
    argument_bytes: int
    result: Any


class _Account:
    """What kernels there were, and the memory of what they made while anything sees it."""

    def __init__(self) -> None:
        self.kernels: list[Kernel] = []
        self.operators = self.bytes = self.peak = 0
        self._seen: dict[int, list[int]] = {}  # storage -> its bytes, and how many tensors see it
        self._given: dict[
            int, torch.Tensor
        ] = {}  # storage -> a tensor of outside, which keeps it and is not counted

    def given(self, x: torch.Tensor) -> torch.Tensor:
        """The tensor, noted as one of outside."""
        self._given[storage_key(x.untyped_storage())] = x
        return x

    def given_unless_seen(self, x: Any) -> None:
        if isinstance(x, torch.Tensor) and storage_key(x.untyped_storage()) not in self._seen:
            self.given(x)

    def enter(self, op: Op, args: Any, kwargs: Any, result: Any) -> None:
        """One kernel ran."""
        fresh = sum(self._enter(x) for x in tree_leaves(result) if isinstance(x, torch.Tensor))
        kernel = kernel_of(op, args, kwargs, result, fresh)
        self.kernels.append(kernel)
        self.bytes += fresh
        self.peak = max(self.peak, self.bytes + kernel.workspace)

    def _enter(self, x: torch.Tensor) -> int:
        """Bytes of memory that was not there before this tensor."""
        storage = x.untyped_storage()
        key = storage_key(storage)
        if key in self._given:
            return 0
        fresh = 0
        if key not in self._seen:
            fresh = storage.nbytes()
            self._seen[key] = [fresh, 0]
        self._seen[key][1] += 1
        weakref.finalize(x, self._leave, key)
        return fresh

    def _leave(self, key: int) -> None:
        entry = self._seen[key]
        entry[1] -= 1
        if not entry[1]:
            self.bytes -= entry[0]
            del self._seen[key]

    def costs(self, result: Any, arguments: Any) -> PassCosts:
        storages = (x.untyped_storage() for x in tree_leaves(arguments) if isinstance(x, torch.Tensor))
        given = {storage_key(storage): storage.nbytes() for storage in storages}
        return PassCosts(
            tuple(self.kernels), self.operators, self.peak, self.bytes, sum(given.values()), result
        )


class _Ledger(Watch):
    """Enters every kernel of a function that runs on tensors without values."""

    def __init__(self, random_states: RandomStates, inside: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(random_states, inside)
        self.account = _Account()

    def inside(self, x: torch.Tensor) -> torch.Tensor:
        found = super().inside(x)
        return found if found is x else self.account.given(found)

    def __torch_dispatch__(self, op: Op, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(op, types, args, kwargs)
        if result is NotImplemented:
            self.account.operators += 1
        elif op.namespace != "prim":  # a question about a tensor without values is no kernel
            self.account.enter(op, args, kwargs or {}, result)
        return result


class _Follower(DispatchMode):
    """Enters every kernel of a function that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.account = _Account()

    def __torch_dispatch__(self, op: Op, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, Tracer) for kind in types):
            self.account.operators += 1
            return NotImplemented
        kwargs = kwargs or {}
        for x in tree_leaves((args, kwargs)):
            self.account.given_unless_seen(x)
        result = op(*args, **kwargs)
        self.account.enter(op, args, kwargs, result)
        return result


def observe_pass(function: Callable[..., Any], *args: Any) -> PassCosts:
    """What `function(*args)` did: for what depends on values, and has to run."""
    follower = _Follower()
    for x in tree_leaves(args):
        follower.account.given_unless_seen(x)
    with follower, torch.no_grad():
        result = function(*args)
    return follower.account.costs(result, args)


def trace_pass(function: Callable[..., Any], *args: Any, replayed: bool = False) -> PassCosts:
    """What `function(*args)` would do, where no norm is computed again.

    Args:
        args: pytrees of tensors, or of what is Like them; shapes, dtypes and devices count.
        replayed: as a captured program of it would, where inaccurate samples are flagged.

    Raises NotCapturable, or what `function` raises, where its kernels depend on values.
    """
    mode = FakeTensorMode()
    with modules_unchanged(), python_random_states(), RandomStates() as random_states:
        ledger = _Ledger(random_states, mode.from_tensor)
        reads = NoReads()
        without_values = tree_map(lambda x: _without_value(x, mode, ledger.account), args)
        try:
            with mode, ledger, reads, flagging() if replayed else unchecked(), torch.no_grad():
                result = function(*without_values)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise NotCapturable(f"its operators depend on data, by {error}") from error
        ledger.raise_if_refused()
        reads.raise_if_refused()
    return ledger.account.costs(result, without_values)


def _without_value(x: Any, mode: FakeTensorMode, account: _Account) -> Any:
    if isinstance(x, Like):
        with mode:
            return account.given(torch.empty(x.shape, dtype=x.dtype, device=x.device))
    return account.given(mode.from_tensor(x)) if isinstance(x, torch.Tensor) else x
