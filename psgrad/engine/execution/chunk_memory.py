"""The memory that a chunk takes, and the rows that fit a budget: by two chunks that run.

Memory is counted from the moment a kernel makes it to the moment the last tensor on it is gone, which is when
the pass itself gives it back.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from psgrad.engine.gradients.queries import PerSampleGradients
from psgrad.engine.transforms.operators import Op
from psgrad.engine.transforms.private_torch import DispatchMode, schema_of, storage_key, tree_leaves
from psgrad.engine.transforms.tracer import Tracer

LARGEST_AUTO_CHUNK = 1024
# A chunk that only shows how much memory a chunk takes has at most the rows of a run divided by this.
SHARE_OF_ROWS = 16


@dataclass(frozen=True)
class ChunkMemory:
    """The bytes that chunks of a pass take, their inputs included, beyond the parameters.

    Attributes:
        fixed: whatever the number of rows.
        each: for each row.
    """

    fixed: float
    each: float

    def of(self, rows: int) -> int:
        return int(self.fixed + self.each * rows)

    def rows_within(self, budget: int, most: int) -> int:
        """The number of rows, 1 to `most`, that fit a budget of bytes."""
        return max(1, min(most, int((budget - self.fixed) / self.each)))


def measured_memory(takes: Callable[[int], int], first: int, budget: int, most: int) -> ChunkMemory:
    """The memory of chunks, by two that run: of `first` rows, and of as many as seem to fit the budget then,
    `most` at most. Where those are few, the first one alone counts.

    takes: from a number of rows to the bytes that a chunk of them takes. Memory grows along a line from some
    size on. Below it grows faster, as small intermediates fill a block first, so no chunk takes more than is
    predicted.
    """
    few = takes(first)
    memory = ChunkMemory(0.0, max(few / first, 1.0))
    second = memory.rows_within(budget, most)
    if second < 2 * first:
        return memory
    many = takes(second)
    each = max((many - few) / (second - first), 1.0)
    return ChunkMemory(max(0.0, many - each * second), each)


def factor_bytes(gradients: PerSampleGradients) -> int:
    """The bytes of the factors of all these gradients."""
    factors = [
        factor
        for part in gradients.parts
        for gradient in part.gradients.values()
        for factor in gradient.factors
    ]
    return sum(factor.numel() * factor.element_size() for factor in factors)


def peak_bytes(function: Callable[..., Any], *args: Any) -> int:
    """The most memory that `function(*args)`, which runs, has at a time beyond its arguments and what it
    takes from outside; its result is in it.
    """
    counter = _MemoryCounter()
    for x in tree_leaves(args):
        counter.add_given(x)
    with counter, torch.no_grad():
        result = function(*args)  # noqa: F841 - its memory counts until all is counted
    return counter.peak


class _MemoryCounter(DispatchMode):
    """Counts the memory of the results of each kernel for as long as a tensor uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._seen: dict[int, list[int]] = {}  # storage -> its bytes, and how many tensors use it
        # storage -> a tensor of outside, which keeps it and is not counted
        self._given: dict[int, torch.Tensor] = {}

    def add_given(self, x: Any) -> None:
        if isinstance(x, torch.Tensor) and storage_key(x.untyped_storage()) not in self._seen:
            self._given[storage_key(x.untyped_storage())] = x

    def __torch_dispatch__(self, op: Op, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, Tracer) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        for x in tree_leaves((args, kwargs)):
            self.add_given(x)
        result = op(*args, **kwargs)
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                self._enter(x)
        self.peak = max(self.peak, self.bytes + _workspace(op, (args, result)))
        return result

    def _enter(self, x: torch.Tensor) -> None:
        storage = x.untyped_storage()
        key = storage_key(storage)
        if key in self._given:
            return
        if key not in self._seen:
            self._seen[key] = [storage.nbytes(), 0]
            self.bytes += storage.nbytes()
        self._seen[key][1] += 1
        weakref.finalize(x, self._leave, key)

    def _leave(self, key: int) -> None:
        entry = self._seen[key]
        entry[1] -= 1
        if not entry[1]:
            self.bytes -= entry[0]
            del self._seen[key]


# Convolutions take their operands and results again, and more: libraries lay them out in blocks, or make
# patches. Measured on a CPU.
_AGAIN = 1.26


def _workspace(op: Op, tensors: Any) -> int:
    """Bytes that an operator takes while it runs, beyond its results. tensors: its arguments and results."""
    if schema_of(op).name not in ("aten::convolution", "aten::convolution_backward"):
        return 0
    return int(_AGAIN * sum(x.nbytes for x in tree_leaves(tensors) if isinstance(x, torch.Tensor)))
