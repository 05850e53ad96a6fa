"""Capture and replay: the kernels of a function are recorded once as a program, which runs again without the
Python of the transforms.

`capture(f)` records the first call with each signature (shapes, dtypes, devices, Python values among the
arguments) while it computes its result (recorder.py). The program (program.py) is compared with `f` itself in
the second call, bit for bit, and replaces it from then on. A transform costs microseconds of Python for each
operator, a program one call.

A value that `f` reads from a tensor is compared in each replay; where it is another one, `f` itself runs.
Functions that a list of kernels can't repeat run uncaptured, with one warning. Any other value that `f` reads
from Python (an attribute, a global number) stays as it was in the recorded call. Where such a value has
changed by the second call, `f` runs uncaptured; a later change can't be detected, and the caller must avoid
it.
"""

from __future__ import annotations

import contextlib
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from psgrad import random_state
from psgrad.engine.transforms.private_torch import (
    autocast_is_on,
    dispatch_modes,
    function_modes,
    torch_func_runs,
)
from psgrad.engine.transforms.program import Program, program_of
from psgrad.engine.transforms.recorder import Recording, record
from psgrad.engine.transforms.state import state
from psgrad.engine.transforms.trees import LEAF, Structure, flatten, unflatten

# The types of values that a captured function may take and return besides tensors.
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
# Programs of a function that are kept: those used last.
MOST_PROGRAMS = 32
# If more than one replay in this many fails for a guard, the function is no longer replayed.
_RARELY = 8
Autocast = tuple[
    tuple[str, torch.dtype], ...
]  # the types of device with autocast, and the dtype of its casts


def capture(
    function: Callable[..., Any],
    *,
    say: Callable[[str], None] | None = None,
) -> Captured:
    """`function`, recorded at the first call with each signature, and replayed from the third one on.

    Args:
        function: takes and returns pytrees of tensors and Python values, and has no other effects that must
            be repeated. Tensors from outside (a module's buffers) are read again at each call, with their
            current values.
        say: called once with the reason why calls run uncaptured; by default it gives a warning.

    Random operators draw new numbers at each call, as many and in the same order as `function` itself.
    """
    name = getattr(function, "__name__", type(function).__name__)
    return Captured(
        function,
        say or (lambda why: warnings.warn(f"{name} is not replayed but run uncaptured: {why}", stacklevel=3)),
    )


@dataclass
class Entry:
    """What is known of the calls with one signature.

    Attributes:
        recording: of a call; None before.
        program: that replaces the function; None before it was compared.
        results, structure: the recorded call's results, flat; `_TENSOR` where the next tensor goes.
        replays, failures: how often a program replaced the function, and how often a guard did not hold.
        ended: whether calls run uncaptured.
        has_flag: whether a program returns a flag after its results.
        met: for a caller that records later than the first call: how many there were.
    """

    recording: Recording | None = None
    program: Program | None = None
    results: tuple[Any, ...] = ()
    structure: Structure = LEAF
    replays: int = 0
    failures: int = 0
    ended: bool = False
    has_flag: bool = False
    met: int = 0

    def count_failure(self) -> None:
        self.failures += 1
        if self.failures > 2 + self.replays / _RARELY:
            self.program, self.ended = None, True  # calls that run twice are slower than calls that don't


_TENSOR = object()


@dataclass
class Call:
    """One call of a captured function.

    Attributes:
        entry: what is known of calls with its signature.
        tensors: of its arguments, each once.
    """

    entry: Entry
    tensors: list[torch.Tensor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def of(self, function: Callable[..., Any]) -> Any:
        return function(*self.args, **self.kwargs)


class Captured:
    """A function with its programs, by signature. Made by `capture`.

    Args:
        hoists: see `program_of`.
        rounding: by how much a program's numbers may differ from the function's own, see `agree`.

    Attributes:
        flags: in how many calls an assumption of the program did not hold.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        say: Callable[[str], None],
        hoists: bool = False,
        rounding: float = 0.0,
    ) -> None:
        self.function, self.say, self.hoists, self.rounding = function, say, hoists, rounding
        self.flags = 0
        self.entries: OrderedDict[Any, Entry] = OrderedDict()
        self.warned = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = self.call(*args, **kwargs)
        if call is None or call.entry.ended:
            return self.function(*args, **kwargs)
        if call.entry.program is not None:
            done, result = self.replay(call)
            return result if done else self.function(*args, **kwargs)
        if call.entry.recording is None:
            return self.record(call)
        return self.compare(call)

    def call(self, *args: Any, **kwargs: Any) -> Call | None:
        """A call with these arguments; None if it must run uncaptured."""
        if _transform_or_mode_is_active():
            return None
        leaves, structure = flatten((args, kwargs))
        signature = self._signature(leaves, structure, _autocast())
        if signature is None:
            return None
        entry = self.entries.get(signature)
        if entry is None:
            entry = self.entries[signature] = Entry()
            if len(self.entries) > MOST_PROGRAMS:
                self.entries.popitem(last=False)
        elif entry.program is not None and not entry.program.fits():
            entry.program = entry.recording = None
        self.entries.move_to_end(signature)
        tensors = {id(x): x for x in leaves if isinstance(x, torch.Tensor)}
        return Call(entry, list(tensors.values()), args, kwargs)

    def record(self, call: Call) -> Any:
        """The function's result, recorded."""
        entry, before = call.entry, random_state.states()
        result, recording, flag = record(lambda: call.of(self.function), call.tensors)
        if isinstance(recording, Recording):
            leaves, entry.structure = flatten(result)
            entry.results = tuple(_TENSOR if isinstance(x, torch.Tensor) else x for x in leaves)
            entry.recording, entry.has_flag = recording, recording.flag is not None
            strange = [x for x in entry.results if x is not _TENSOR and not isinstance(x, PLAIN)]
            if strange:
                recording = f"it returns a {type(strange[0]).__name__}"
        if isinstance(recording, str):
            self.end(entry, recording)
        if not flag:
            return result
        self._count_flag(entry, before)
        return call.of(self.function)

    def _count_flag(self, entry: Entry, before: random_state.States) -> None:
        """Count a call in which an assumption did not hold, and undo what it has drawn."""
        self.flags += 1
        entry.count_failure()
        random_state.restore(before)

    def compare(self, call: Call) -> Any:
        """The function's result. If the program of the recorded call gives the same, it runs from now on."""
        entry = call.entry
        before = random_state.states()
        result = call.of(self.function)
        after = random_state.states()
        why = "the program gave other numbers than the function itself, which may keep a state of its own"
        for binds in (True, False):
            random_state.restore(before)
            try:
                assert entry.recording is not None
                entry.program = program_of(entry.recording, call.tensors, binds, self.hoists)
                done, again = self.replay(call)
            except torch.OutOfMemoryError:
                random_state.restore(after)
                raise
            except Exception as error:
                why = f"{type(error).__name__} {str(error).partition(chr(10))[0]}"
                continue
            if not done or agree(result, again, self.rounding):
                if not done:
                    entry.program = None  # the next call compares
                else:
                    entry.recording = None
                break
        else:
            self.end(entry, why)
        random_state.restore(after)
        return result

    def replay(self, call: Call) -> tuple[bool, Any]:
        """(True, the program's result), or (False, None) where a guard or an assumption does not hold, as if
        nothing had been drawn.
        """
        entry = call.entry
        assert entry.program is not None
        before = random_state.states() if entry.program.draws else []
        with contextlib.ExitStack() as exits:
            for kind, _ in _autocast():  # the program holds the casts
                exits.enter_context(torch.autocast(kind, enabled=False))
            entry.program.refresh()
            values = entry.program.run(*call.tensors)
        if values is None:
            random_state.restore(before)
            entry.count_failure()
            return False, None
        if entry.has_flag and bool(values.pop()):
            self._count_flag(entry, before)
            return False, None
        entry.replays += 1
        tensors = iter(values)
        leaves = [next(tensors) if item is _TENSOR else item for item in entry.results]
        return True, unflatten(leaves, entry.structure)

    def end(self, entry: Entry, why: str) -> None:
        """Calls with this signature run uncaptured from now on."""
        entry.recording, entry.program, entry.ended = None, None, True
        self._say_once(why)

    def _signature(self, leaves: list[Any], structure: Structure, autocast: Autocast) -> Any:
        """The key of a program, without the values of tensors; None if a call must run uncaptured."""
        recording = torch.is_grad_enabled()
        seen: dict[int, int] = {}
        parts: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                if type(leaf) not in (torch.Tensor, torch.nn.Parameter) or leaf.layout != torch.strided:
                    self._say_once(f"an argument is a {type(leaf).__name__} of layout {leaf.layout}")
                    return None
                if recording and leaf.requires_grad:
                    self._say_once(
                        "an argument requires a gradient, and PyTorch's autograd may follow it; detach it, or"
                        " call under no_grad"
                    )
                    return None
                place = seen.setdefault(id(leaf), len(seen))
                views = leaf.is_conj(), leaf.is_neg()
                parts.append((place, leaf.shape, leaf.stride(), leaf.dtype, leaf.device, *views))
            elif isinstance(leaf, float):
                parts.append((float, repr(leaf)))  # different: 0.0 and -0.0; equal: NaN
            elif isinstance(leaf, PLAIN):
                parts.append((type(leaf), leaf))
            else:
                self._say_once(f"an argument is a {type(leaf).__name__}, whose content may change")
                return None
        return recording, torch.get_default_dtype(), autocast, structure, tuple(parts)

    def _say_once(self, why: str) -> None:
        if not self.warned:
            self.warned = True
            self.say(why)


def agree(one: Any, other: Any, rounding: float) -> bool:
    """Whether all values of two trees are the same, and all tensors but for rounding, relative to the largest
    number in each; 0 for the same bits.
    """
    ones, others = flatten(one)[0], flatten(other)[0]
    return len(ones) == len(others) and all(
        _same_tensor(a, b, rounding) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(ones, others, strict=True)
    )


def _same_tensor(a: torch.Tensor, b: Any, rounding: float) -> bool:
    if not isinstance(b, torch.Tensor) or (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
        return False
    if not rounding or not (a.is_floating_point() or a.is_complex()):
        return bool(((a == b) | ((a != a) & (b != b))).all())
    finite = a[torch.isfinite(a)].abs()
    largest = float(finite.max()) if finite.numel() else 0.0
    return torch.allclose(a, b, rtol=rounding, atol=rounding * largest, equal_nan=True)


def _transform_or_mode_is_active() -> bool:
    """Whether another transform, ours or torch.func's, or a mode is active between the function and its
    kernels.
    """
    return bool(
        state.stack
        or torch.is_inference_mode_enabled()
        or dispatch_modes()
        or function_modes()
        or torch_func_runs()
    )


def _autocast() -> Autocast:
    if not autocast_is_on():
        return ()
    return tuple(
        (kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)
    )
