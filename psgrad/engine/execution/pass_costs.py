"""The memory that a pass will take, found without running it.

The function runs on tensors without values. Memory is counted from the moment a kernel makes it to the moment
the last tensor on it is gone, which is when the pass itself would give it back.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from psgrad import random_state
from psgrad.engine.execution.kernel_memory import workspace_of
from psgrad.engine.gradients.terms.numerics import unchecked
from psgrad.engine.transforms.operators import Op, aten
from psgrad.engine.transforms.private_torch import (
    DataDependentOutputException,
    DispatchMode,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    buffer_store,
    schema_of,
    storage_key,
    tree_leaves,
    tree_map,
)
from psgrad.engine.transforms.recorder import NotCapturable, Reads
from psgrad.engine.transforms.tracer import Tracer, innermost, map_tracers

__all__ = ["Like", "NotCapturable", "PassCosts", "observe_pass", "trace_pass"]


@dataclass(frozen=True)
class Like:
    """A contiguous tensor that need not exist, as an argument of `trace_pass`."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def rows(cls, x: torch.Tensor, count: int) -> Like:
        """As `x`, with `count` rows."""
        return cls((count, *x.shape[1:]), x.dtype, x.device)


@dataclass(frozen=True)
class PassCosts:
    """What a call would do.

    Attributes:
        kernels: the names of its operators, in order, without views.
        peak_bytes: the most memory that it has at a time, beyond its arguments and what it takes from
            outside; results are in it.
        result_bytes: what is left of that in the end.
        argument_bytes: the memory of its arguments.
        result: what it returned, tensors without values in it.
    """

    kernels: tuple[str, ...]
    peak_bytes: int
    result_bytes: int
    argument_bytes: int
    result: Any


class _Account:
    """Counts the kernels, and the memory of their results for as long as a tensor uses it."""

    def __init__(self) -> None:
        self.kernels: list[str] = []
        self.bytes = self.peak = 0
        self._seen: dict[int, list[int]] = {}  # storage -> its bytes, and how many tensors use it
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

    def enter(self, op: Op, args: Any, result: Any) -> None:
        """One kernel ran."""
        fresh = sum(self._enter(x) for x in tree_leaves(result) if isinstance(x, torch.Tensor))
        if fresh or schema_of(op).is_mutable:
            self.kernels.append(schema_of(op).name.removeprefix("aten::"))
        self.bytes += fresh
        self.peak = max(self.peak, self.bytes + workspace_of(op, args, result))

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
        return PassCosts(tuple(self.kernels), self.peak, self.bytes, sum(given.values()), result)


class _KernelCounter(DispatchMode):
    """Enters every kernel of a function that runs on tensors without values."""

    def __init__(self, mode: FakeTensorMode) -> None:
        super().__init__()
        self.mode, self.account = mode, _Account()

    def without_value(self, x: Any) -> Any:
        """What stands for a tensor from outside."""
        if isinstance(x, Like):
            with self.mode:
                return self.account.given(torch.empty(x.shape, dtype=x.dtype, device=x.device))
        if not isinstance(x, torch.Tensor) or isinstance(x, FakeTensor):
            return x
        return self.account.given(self.mode.from_tensor(x))

    def __torch_dispatch__(self, op: Op, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, Tracer) for kind in types):
            return NotImplemented
        if op is not aten.lift_fresh.default:  # the result of torch.tensor(..) is not from outside
            args, kwargs = (
                map_tracers(self.without_value, args),
                map_tracers(self.without_value, kwargs or {}),
            )
        result = op(*args, **(kwargs or {}))
        if op.namespace != "prim":  # a question about a tensor without values is not a kernel
            self.account.enter(op, args, result)
        return result


class _Follower(DispatchMode):
    """Enters every kernel of a function that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.account = _Account()

    def __torch_dispatch__(self, op: Op, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, Tracer) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        for x in tree_leaves((args, kwargs)):
            self.account.given_unless_seen(x)
        result = op(*args, **kwargs)
        self.account.enter(op, args, result)
        return result


def observe_pass(function: Callable[..., Any], *args: Any) -> PassCosts:
    """The costs of `function(*args)`, which runs: for functions whose kernels depend on values."""
    follower = _Follower()
    for x in tree_leaves(args):
        follower.account.given_unless_seen(x)
    with follower, torch.no_grad():
        result = function(*args)
    return follower.account.costs(result, args)


def trace_pass(function: Callable[..., Any], *args: Any) -> PassCosts:
    """What `function(*args)` would do, where no norm is computed again.

    Args:
        args: pytrees of tensors, or of what is Like them; shapes, dtypes and devices count.

    Raises NotCapturable, or what `function` raises, where its kernels depend on values.
    """
    mode = FakeTensorMode()
    counter, reads = _KernelCounter(mode), Reads()
    with _modules_unchanged(), random_state.restored():
        without_values = tree_map(counter.without_value, args)
        try:
            with mode, counter, reads, unchecked(), torch.no_grad():
                result = function(*without_values)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise NotCapturable(f"its operators depend on data, by {error}") from error
        finally:
            if reads.reason is not None:
                raise NotCapturable(reads.reason)
    return counter.account.costs(result, without_values)


@contextmanager
def _modules_unchanged() -> Iterator[None]:
    """At the end, remove the tensors without values that modules stored meanwhile (a cache, the last
    attention map).
    """
    stores: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {}

    def note(module: torch.nn.Module, args: Any) -> None:
        for store in (buffer_store(module), module.__dict__):  # in this order: the second contains the first
            stores.setdefault(id(store), (store, dict(store)))

    handle = torch.nn.modules.module.register_module_forward_pre_hook(note)
    try:
        yield
    finally:
        handle.remove()
        for store, before in stores.values():
            for key in [key for key, value in store.items() if _has_no_value(value)]:
                if key in before and not _has_no_value(before[key]):
                    store[key] = before[key]
                else:
                    del store[key]


def _has_no_value(value: Any) -> bool:
    return any(
        isinstance(leaf, FakeTensor) or (isinstance(leaf, Tracer) and _has_no_value(innermost(leaf)))
        for leaf in tree_leaves(value)
    )
