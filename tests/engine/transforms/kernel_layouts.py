"""Kernels below all levels: the calls that reach them, and those that return other numbers for memory that is
not contiguous.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from psgrad.engine.transforms.interpreter import interpret
from psgrad.engine.transforms.operators import Op, facts, is_random
from psgrad.engine.transforms.tracer import Tracer

# Of an order among equal elements, and of a factorisation's storage, nothing is promised; both follow the
# layout of the argument. Of those that return values and their places, the values are compared.
WITHOUT_ONE_ANSWER = "argsort _linalg_det _linalg_slogdet"
VALUES_BEFORE_PLACES = frozenset(["sort", "median", "nanmedian", "kthvalue", "topk"])
# A view that PyTorch refuses where it has none; who calls it asks before.
REFUSES = "_unsafe_view"
# Chosen only where the last axis is contiguous: PyTorch's own choice between attention kernels looks at that.
CHOSEN_BY_LAYOUT = (
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward"
    " psgrad::attention_backward_for_cpu"
)
UNINITIALISED = "empty_like new_empty empty new_empty_strided"
EXEMPT = frozenset(f"{WITHOUT_ONE_ANSWER} {REFUSES} {CHOSEN_BY_LAYOUT} {UNINITIALISED}".split())


class Call(NamedTuple):
    """One call of a kernel on plain tensors."""

    op: Op
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def name_of(op: Op) -> str:
    return op.name().removeprefix("aten::").partition(".")[0]


class Kernels(TorchDispatchMode):
    """While it is on: calls that return new tensors are kept, at most `most` of each operator, one for each
    signature.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most
        self.calls: dict[Any, Call] = {}
        self.counts: Counter[Op] = Counter()

    def __torch_dispatch__(self, op: Op, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(isinstance(x, Tracer) for x in tensors):
            with self:
                return interpret(op, args, kwargs)
        said = facts(op)
        plain = tensors and all(type(x) is Tensor and x.layout == torch.strided for x in tensors)
        if plain and not (said.is_view or said.mutated or said.mutated_kwargs or is_random(op, args, kwargs)):
            self._keep(op, args, kwargs, tensors)
        return op(*args, **kwargs)

    def _keep(self, op: Op, args: Any, kwargs: Any, tensors: list[Tensor]) -> None:
        signature = (op, *[(x.shape, x.dtype) for x in tensors])
        if signature not in self.calls and self.counts[op] < self.most:
            self.counts[op] += 1
            kept = tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, (args, kwargs))
            self.calls[signature] = Call(op, *kept)


def layouts(x: Tensor) -> Iterator[Tensor]:
    """Tensors of the shape of `x` in memory that is expanded, sliced or transposed; the expanded ones with
    other values.
    """
    for axis in range(x.dim()):
        if x.shape[axis] > 1:
            yield x.narrow(axis, 0, 1).expand(x.shape)
    if x.dim() and x.numel() > 1:
        yield x.flatten()[:1].reshape((1,) * x.dim()).expand(x.shape)
        for axis in {0, x.dim() - 1}:
            wide = torch.full_like(x, 1).repeat_interleave(2, axis)
            sliced = wide[(slice(None),) * axis + (slice(None, None, 2),)]
            yield sliced.copy_(x)
    if x.dim() > 1:
        yield x.mT.contiguous().mT


def arguments_read_as_contiguous(call: Call) -> set[int]:
    """The positions of those arguments for which the kernel raises or returns other numbers where they are
    not contiguous.
    """
    return {
        i
        for i, x in enumerate(call.args)
        if isinstance(x, Tensor) and any(_differs(call, i, odd) for odd in layouts(x))
    }


def _differs(call: Call, position: int, odd: Tensor) -> bool:
    def run(x: Tensor) -> Any:
        out = call.op(*call.args[:position], x, *call.args[position + 1 :], **call.kwargs)
        return out[0] if name_of(call.op) in VALUES_BEFORE_PLACES and isinstance(out, tuple) else out

    try:
        wanted = run(odd.contiguous())
        litter = [
            torch.full((size,), 7.25) for size in (1, 16, 256, 4096)
        ]  # uninitialised memory may hold other values next time
        del litter
        repeated = run(odd.contiguous())
    except Exception:  # values out of the operator's domain
        return False
    if not same(wanted, repeated):  # a result with uninitialised memory
        return False
    try:
        return not same(run(odd), wanted)
    except Exception:
        return True


def same(one: Any, other: Any) -> bool:
    pairs = list(zip(tree_leaves(one), tree_leaves(other), strict=True))
    return all(
        torch.allclose(x, y, 1e-8, 1e-9, equal_nan=True)
        for x, y in pairs
        if isinstance(x, Tensor) and x.dtype != torch.bool
    )


def reads_as_contiguous(kernels: Kernels) -> dict[str, set[int]]:
    """By operator, the arguments that its kernel was found to read as contiguous memory."""
    result: dict[str, set[int]] = {}
    for call in kernels.calls.values():
        if name_of(call.op) not in EXEMPT and (positions := arguments_read_as_contiguous(call)):
            result.setdefault(call.op.name(), set()).update(positions)
    return result
