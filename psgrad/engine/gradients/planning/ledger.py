"""The course of a pass, followed without running it: its kernels in order, and the memory that lives between them.

The function runs on tensors without values. Each kernel that it would run is entered with what it computes and moves; memory is
counted from the moment a kernel makes it to the moment the last tensor that sees it is gone, which is when the pass itself would give
it back.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from psgrad.engine.gradients.doubts import noting, trusting
from psgrad.engine.gradients.planning.kernels import Kernel, kernel_of
from psgrad.engine.transforms.interpreter import Tracer
from psgrad.engine.transforms.operators import Op
from psgrad.engine.transforms.watch import NoReads, NotCapturable, RandomStates, Watch, modules_unchanged, python_random_states

__all__ = ["Course", "Like", "NotCapturable", "followed", "traced"]


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
class Course:
    """What a call would do.

    Attributes:
        kernels: in order.
        operators: how many reached a level of the transforms, whose Python they cost.
        peak_bytes: the most memory that it has at a time, beyond its arguments and what it takes from outside; results are in it.
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
        self._given: dict[int, torch.Tensor] = {}  # storage -> a tensor of outside, which keeps it and is not counted

    def given(self, x: torch.Tensor) -> torch.Tensor:
        """The tensor, noted as one of outside."""
        self._given[x.untyped_storage()._cdata] = x
        return x

    def given_unless_seen(self, x: Any) -> None:
        if isinstance(x, torch.Tensor) and x.untyped_storage()._cdata not in self._seen:
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
        key = storage._cdata
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

    def course(self, result: Any, arguments: Any) -> Course:
        storages = (x.untyped_storage() for x in tree_leaves(arguments) if isinstance(x, torch.Tensor))
        given = {storage._cdata: storage.nbytes() for storage in storages}
        return Course(tuple(self.kernels), self.operators, self.peak, self.bytes, sum(given.values()), result)


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


class _Follower(TorchDispatchMode):
    """Enters every kernel of a function that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.account = _Account()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as for the interpreter

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


def followed(function: Callable[..., Any], *args: Any) -> Course:
    """What `function(*args)` did: for what depends on values, and has to run."""
    follower = _Follower()
    for x in tree_leaves(args):
        follower.account.given_unless_seen(x)
    with follower, torch.no_grad():
        result = function(*args)
    return follower.account.course(result, args)


def traced(function: Callable[..., Any], *args: Any, replayed: bool = False) -> Course:
    """What `function(*args)` would do, where no norm is in doubt.

    Args:
        args: pytrees of tensors, or of what is Like them; shapes, dtypes and devices count.
        replayed: as a record of it would, where doubts are noted.

    Raises NotCapturable, or what `function` raises, where its course depends on values.
    """
    mode = FakeTensorMode()
    with modules_unchanged(), python_random_states(), RandomStates() as random_states:
        ledger = _Ledger(random_states, mode.from_tensor)
        reads = NoReads()
        without_values = tree_map(lambda x: _without_value(x, mode, ledger.account), args)
        try:
            with mode, ledger, reads, noting() if replayed else trusting(), torch.no_grad():
                result = function(*without_values)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise NotCapturable(f"its course depends on data, by {error}") from error
        ledger.insist()
        reads.insist()
    return ledger.account.course(result, without_values)


def _without_value(x: Any, mode: FakeTensorMode, account: _Account) -> Any:
    if isinstance(x, Like):
        with mode:
            return account.given(torch.empty(x.shape, dtype=x.dtype, device=x.device))
    return account.given(mode.from_tensor(x)) if isinstance(x, torch.Tensor) else x
