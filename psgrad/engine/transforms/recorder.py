"""Records the kernels of a call while it computes its result.

A mode below all levels receives each kernel that a function runs, in order. A tensor is noted as a *slot* (a
number), and only by a weak reference, so memory is freed when the function itself frees it. A value that
Python reads from a tensor (`item`, `bool`) is a *guard*: a program of these kernels is right only for calls
in which all guards have the values of the recorded call. What a list of kernels cannot repeat is refused
(`NotCapturable`): results whose shape depends on data, writes into tensors from outside, memory that is read
without a kernel, random states that are set, tensors that are kept from one call to the next. A refusal does
not disturb the call.

A computation that would read numbers only to make sure that they need no other computation assumes this
instead (`assumed`). A program finds out with one read, after it ran, whether all assumptions hold.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from psgrad import random_state
from psgrad.engine.transforms import diagnostics
from psgrad.engine.transforms.operators import Op, aten, is_random, written_by
from psgrad.engine.transforms.private_torch import DispatchMode, storage_key, tree_flatten
from psgrad.engine.transforms.state import state
from psgrad.engine.transforms.tracer import Tracer


class NotCapturable(Exception):
    """The reason why a call can't be repeated as a list of kernels."""


class Slot(NamedTuple):
    """A tensor of the recorded call, by its number."""

    number: int


@dataclass
class Kernel:
    """One kernel of the recorded call.

    Attributes:
        args, kwargs: as the kernel got them, with slots in place of tensors.
        reads: the numbers of these slots.
        results: the numbers of its results, None for results that are no tensors.
        several: whether it returns a list or a tuple.
        writes: the numbers of the arguments that it writes to.
        draws: whether it draws random numbers.
        value: of a guard, what Python read; None of other kernels.
    """

    op: Op
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    reads: list[int]
    results: list[int | None]
    several: bool
    writes: list[int]
    draws: bool
    value: Any = None


@dataclass
class Recording:
    """The kernels of a call.

    Attributes:
        arguments: the numbers of the call's own tensors.
        outside: number -> a tensor that the function took from elsewhere.
        memory: for each number, one that tensors share if they share memory.
        views: for each number, what of its memory the tensor is: equal for tensors that are the same one.
        results: the numbers of the tensors that the call returned, and of `flag`.
        flag: bool [], whether an assumption of the call does not hold, so that its result may be wrong; None
            where nothing is assumed.
    """

    arguments: list[int]
    kernels: list[Kernel] = field(default_factory=list)
    outside: dict[int, torch.Tensor] = field(default_factory=dict)
    memory: list[int] = field(default_factory=list)
    views: list[Any] = field(default_factory=list)
    results: list[int] = field(default_factory=list)
    flag: torch.Tensor | None = None


class Recorder(DispatchMode):
    """A mode that records the kernels of one call.

    Args:
        arguments: the tensors of the call.

    Attributes:
        reason: why the call can't be repeated as a list of kernels; None as long as it can.
    """

    def __init__(self, arguments: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.reason: str | None = None
        self.recording = Recording([])
        self._autograd_follows = torch.is_grad_enabled()  # a level has it on inside
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}  # id of a tensor -> its number
        self._made: list[weakref.ref[torch.Tensor]] = []
        self._storages: list[int] = []  # for each number, its storage
        self._outside: dict[int, int] = {}  # storage of a tensor that outlives the call -> its memory
        self._torch_states, self._other_states = random_state.states(), random_state.cpu_states()[:2]
        self.recording.arguments = [self._number_outside(x) for x in arguments]

    def refuse(self, why: str) -> None:
        self.reason = self.reason or why

    def __torch_dispatch__(self, op: Op, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, Tracer) for kind in types):
            return NotImplemented  # a level's operator; it comes back as kernels
        kwargs = kwargs or {}
        if self.reason is not None:
            return op(*args, **kwargs)
        if op is aten.lift_fresh.default:
            op = aten.clone.default  # the result of torch.tensor(..): new memory in each call
        draws = is_random(op, args, kwargs)
        if draws:
            self._require_states()
        self._refuse_unrepeatable(op, args, kwargs)
        reads: list[int] = []
        kernel = Kernel(op, self._slots(args, reads), self._slots(kwargs, reads), reads, [], False, [], draws)
        written = [x for x in tree_flatten(written_by(op, args, kwargs))[0] if isinstance(x, torch.Tensor)]
        kernel.writes = [self._number(x) for x in written]
        if any(self.recording.memory[n] in self._outside.values() for n in kernel.writes):
            self.refuse(f"it writes into a tensor from outside{diagnostics.where()}")
        before = [_place(x) for x in written]
        result = op(*args, **kwargs)
        if [_place(x) for x in written] != before:
            self.refuse(f"{op} changes more of a tensor than its values{diagnostics.where()}")
        if draws:
            self._torch_states = random_state.states()
        self._add(kernel, result)
        return result

    def finish(self, results: Sequence[torch.Tensor]) -> Recording:
        """The recording of a call that returned these tensors. Raises NotCapturable."""
        self._require_states()
        if random_state.cpu_states()[:2] != self._other_states:
            self.refuse("it draws from Python's or NumPy's generator")
        if self.reason is None:
            self.recording.results = [self._number(x) for x in results]
            if self._keeps_others(results):
                gc.collect()
                if self._keeps_others(results):
                    self.refuse("it keeps tensors from one call to the next")
        if self.reason is not None:
            raise NotCapturable(self.reason)
        return self.recording

    def _keeps_others(self, returned: Sequence[torch.Tensor]) -> bool:
        """Whether a tensor of the call is alive that shares no memory with those returned (a view keeps the
        tensor that it looks at).
        """
        memory = {self.recording.memory[self._number(x)] for x in returned}
        alive = [x for x in (made() for made in self._made) if x is not None]
        return any(self.recording.memory[self._number(x)] not in memory for x in alive)

    # -- tensors as numbers ----------------------------------------------------------------------------------

    def _slots(self, value: Any, reads: list[int]) -> Any:
        """A kernel's arguments with slots in place of tensors, whose numbers are added to `reads`."""
        kind = type(value)
        if kind is tuple or kind is list:
            return kind(self._slots(item, reads) for item in value)
        if kind is dict:
            return {name: self._slots(item, reads) for name, item in value.items()}
        if not isinstance(value, torch.Tensor):
            return value
        reads.append(self._number(value))
        return Slot(reads[-1])

    def _number(self, x: torch.Tensor) -> int:
        number = self._known_number(x)
        if number is None:
            number = self._number_outside(x)
            self.recording.outside[number] = x
        return number

    def _known_number(self, x: torch.Tensor) -> int | None:
        known = self._known.get(id(x))
        return known[1] if known is not None and known[0]() is x else None

    def _number_outside(self, x: torch.Tensor) -> int:
        """The number of a tensor that lives longer than the call."""
        if not is_known_kind(x) or x.layout != torch.strided:
            self.refuse(f"it uses a {type(x).__name__} of layout {x.layout}")
        elif x.requires_grad and self._autograd_follows:
            self.refuse(
                "a tensor from outside requires a gradient, and PyTorch's autograd may follow it; call under"
                " torch.no_grad()"
            )
        number = self._known_number(x)
        if number is None:
            number = self._enter(x, self._outside.get(_storage(x)))
            self._outside.setdefault(self._storages[number], self.recording.memory[number])
        return number

    def _enter(self, x: torch.Tensor, memory: int | None) -> int:
        """The number of a new tensor. memory: that of tensors that share its memory; None for new memory."""
        number = len(self.recording.memory)
        self.recording.memory.append(number if memory is None else memory)
        self.recording.views.append(_view(x))
        self._storages.append(_storage(x))
        self._known[id(x)] = (weakref.ref(x), number)
        return number

    def _add(self, kernel: Kernel, result: Any) -> None:
        """Enter a kernel that returned `result`; or a guard, if it returned a value."""
        kernel.several = isinstance(result, (list, tuple))
        values = list(result) if kernel.several else [result]
        if any(isinstance(x, (list, tuple)) for x in values):
            self.refuse(f"{kernel.op} returns lists in a list{diagnostics.where()}")
        elif any(isinstance(x, torch.Tensor) for x in values) or kernel.writes:
            kernel.results = [self._result(kernel, x) for x in values]
            self.recording.kernels.append(kernel)
        elif kernel.reads and result is not None:
            kernel.value = result
            self.recording.kernels.append(kernel)

    def _result(self, kernel: Kernel, x: Any) -> int | None:
        if not isinstance(x, torch.Tensor):
            return None
        number = self._known_number(x)  # known: written in place
        if number is None:
            if x.layout != torch.strided or not is_known_kind(x):
                self.refuse(f"{kernel.op} returns a {type(x).__name__} of layout {x.layout}")
                return None
            storage = _storage(x)
            shared = [n for n in kernel.reads if self._storages[n] == storage]
            number = self._enter(x, self.recording.memory[shared[0]] if shared else None)
            self._made.append(weakref.ref(x))
        return number

    # -- what cannot be repeated -----------------------------------------------------------------------------

    def _refuse_unrepeatable(self, op: Op, args: Any, kwargs: dict[str, Any]) -> None:
        if torch.Tag.dynamic_output_shape in op.tags and not _indexes_by_numbers(op, args):
            self.refuse(f"its operators depend on data, by {op}{diagnostics.where()}")
        if isinstance(kwargs.get("generator"), torch.Generator):
            self.refuse(f"{op} draws from a generator of its own{diagnostics.where()}")

    def _require_states(self) -> None:
        """Refuse a call that has set PyTorch's random state since it last drew."""
        for (_, now), (_, known) in zip(random_state.states(), self._torch_states, strict=True):
            if not torch.equal(now, known):
                self.refuse("it sets PyTorch's random state")


class Reads(TorchFunctionMode):
    """Notes which method first read a tensor's memory without an operator.

    Attributes:
        reason: why that can't be repeated; None where nothing was read.
    """

    _METHODS = (
        *("tolist", "numpy", "data_ptr", "storage", "untyped_storage"),
        *("__array__", "__dlpack__", "__deepcopy__", "__reduce_ex__"),
    )

    def __init__(self) -> None:
        super().__init__()
        self.reason: str | None = None

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in self._METHODS and self.reason is None:
            self.reason = f"its operators depend on data, by Tensor.{name}{diagnostics.where()}"
        return function(*args, **(kwargs or {}))


class Assumptions(Protocol):
    """What a call assumes of its numbers."""

    def flag(self) -> torch.Tensor | None:
        """bool []: whether an assumption does not hold; None where there are none."""


Kind = TypeVar("Kind", bound=Assumptions)


def assumed(kind: type[Kind]) -> Kind | None:
    """The assumptions of this class of the call that is recorded in this thread; None where none is."""
    return None if state.assumptions is None else state.assumptions.setdefault(kind, kind())


def _flag(assumptions: Iterable[Assumptions]) -> torch.Tensor | None:
    """bool []: whether one of them does not hold; None where there are none."""
    flags = [flag for each in assumptions if (flag := each.flag()) is not None]
    return torch.stack(flags).any() if len(flags) > 1 else next(iter(flags), None)


def record(
    function: Callable[[], Any], arguments: Sequence[torch.Tensor]
) -> tuple[Any, Recording | str, bool]:
    """The result of `function()`; its recording, or the reason why it can't be repeated by a program; and
    whether an assumption does not hold, so that the result may be wrong.

    arguments: the tensors that will be others in a repetition.
    """
    recorder, reads = Recorder(arguments), Reads()
    before, state.assumptions = state.assumptions, {}
    try:
        with recorder, reads:
            result = function()
            flag = _flag(state.assumptions.values())
    finally:
        state.assumptions = before
    found: Recording | str
    try:
        results = [x for x in tree_flatten((result, flag))[0] if isinstance(x, torch.Tensor)]
        found = reads.reason or recorder.finish(results)
    except NotCapturable as error:
        found = str(error)
    if isinstance(found, Recording):
        found.flag = flag
    return result, found, flag is not None and bool(flag)


def is_known_kind(x: torch.Tensor) -> bool:
    """Whether a tensor is PyTorch's own; or one whose kernels bring its numbers in from elsewhere, which has
    `memory_key`: equal for tensors that are views of the same numbers.
    """
    return type(x) in (torch.Tensor, torch.nn.Parameter) or hasattr(x, "memory_key")


def _indexes_by_numbers(op: Op, args: Any) -> bool:
    return op is aten.index.Tensor and all(
        i is None or i.dtype not in (torch.bool, torch.uint8) for i in args[1]
    )


def _storage(x: torch.Tensor) -> int:
    if hasattr(x, "memory_key"):
        return x.memory_key()  # type: ignore[no-any-return]
    return storage_key(x.untyped_storage()) if x.layout == torch.strided else id(x)


def _view(x: torch.Tensor) -> Any:
    if x.layout != torch.strided:
        return None
    return x.storage_offset(), x.shape, x.stride(), x.dtype, x.is_conj(), x.is_neg()


def _place(x: torch.Tensor) -> Any:
    return _storage(x), x.storage_offset(), x.shape, x.stride(), x.dtype
