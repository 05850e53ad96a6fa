"""Capture and replay: the kernels of a function are stored once as a program, which runs again without
Python.

`capture(f)` runs `f` for each signature (shapes, dtypes, devices, Python values among the arguments) on
tensors without values, and keeps the list of kernels that PyTorch's tracer saw (program.py). A transform
costs microseconds of Python for each operator, a replay none.

Some functions can't be repeated by a list of kernels: those with branches that depend on data, those that set
random states, and those that store tensors from one call to the next (capture_guard.py). They run uncaptured,
with one warning. Any other value that `f` reads from Python (an attribute, a global number) stays as it was
at the capture. This can't be detected; the caller must avoid it.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import torch

from psgrad.engine.transforms.capture_guard import NotCapturable, properties
from psgrad.engine.transforms.private_torch import (
    autocast_is_on,
    dispatch_modes,
    function_modes,
    torch_func_runs,
    tree_flatten,
)
from psgrad.engine.transforms.program import PLAIN, Compiler, Program, capture_program
from psgrad.engine.transforms.state import state
from psgrad.errors import TransformError

_MAX_PROGRAMS = 8
Autocast = tuple[
    tuple[str, torch.dtype], ...
]  # the types of device with autocast, and the dtype of its casts


def capture(
    function: Callable[..., Any],
    *example: Any,
    compile: Compiler = "none",
    say: Callable[[str], None] | None = None,
) -> Captured:
    """`function`, captured at the first call with each signature, and replayed afterwards.

    Args:
        function: takes and returns pytrees of tensors and Python values, and has no other effects that must
            be repeated. Tensors from outside (a module's buffers) are read again at each call, with their
            current values.
        example: arguments for a capture now.
        compile: 'inductor' passes each program to PyTorch's compiler, which takes seconds to a minute.
        say: called once with the reason why calls run uncaptured; by default it gives a warning.

    Random operators draw new numbers at each call, as many and in the same order as `function` itself. At
    most eight signatures are captured; calls with other signatures run uncaptured, because a function with
    many different shapes would spend its time on captures.
    """
    name = getattr(function, "__name__", type(function).__name__)
    captured = Captured(
        function,
        compile,
        say or (lambda why: warnings.warn(f"{name} is not replayed but run uncaptured: {why}", stacklevel=2)),
    )
    if example:
        captured.program_of(*example)
    return captured


class Captured:
    """A function with its programs, by signature. Made by `capture`."""

    def __init__(self, function: Callable[..., Any], compile: Compiler, say: Callable[[str], None]) -> None:
        if compile not in ("none", "inductor"):
            raise TransformError(f"capture: compile={compile!r}", expected="'none' or 'inductor'")
        self.function, self.compile, self.say = function, compile, say
        self.programs: dict[Any, Program | None] = {}  # None: runs uncaptured
        self.warned = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, spec = tree_flatten((args, kwargs))
        program, autocast = self._program_for(leaves, spec)
        if program is None:
            return self.function(*args, **kwargs)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if not autocast:
            return program(tensors)
        with contextlib.ExitStack() as exits:  # the program holds the casts
            for kind, _ in autocast:
                exits.enter_context(torch.autocast(kind, enabled=False))
            return program(tensors)

    def program_of(self, *args: Any, **kwargs: Any) -> Program | None:
        """The program for these arguments, captured without values; None if calls with them run
        uncaptured.
        """
        return self._program_for(*tree_flatten((args, kwargs)))[0]

    def _program_for(self, leaves: list[Any], spec: Any) -> tuple[Program | None, Autocast]:
        """The program for a call with these arguments and the current autocast."""
        if _transform_or_mode_is_active():
            return None, ()
        autocast = _autocast()
        signature = self._signature(leaves, spec, autocast)
        program = self.programs.get(signature)
        if (
            signature is None
            or (program is None and signature in self.programs)
            or (program is not None and program.fits())
        ):
            return program, autocast
        if program is None and len(self.programs) >= _MAX_PROGRAMS:
            self._say_once(f"of its signatures only the first {_MAX_PROGRAMS} are captured")
            return None, ()
        try:
            self.programs[signature] = capture_program(self.function, leaves, spec, self.compile)
        except Exception as error:
            first_line = str(error).partition("\n")[0]
            self._say_once(
                first_line if isinstance(error, NotCapturable) else f"{type(error).__name__}: {first_line}"
            )
            self.programs[signature] = None
        return self.programs[signature], autocast

    def _signature(self, leaves: list[Any], spec: Any, autocast: Autocast) -> Any:
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
                parts.append((seen.setdefault(id(leaf), len(seen)), *properties(leaf)))
            elif isinstance(leaf, float):
                parts.append((float, repr(leaf)))  # different: 0.0 and -0.0; equal: NaN
            elif isinstance(leaf, PLAIN):
                parts.append((type(leaf), leaf))
            else:
                self._say_once(f"an argument is a {type(leaf).__name__}, whose content may change")
                return None
        return recording, torch.get_default_dtype(), autocast, spec, tuple(parts)

    def _say_once(self, why: str) -> None:
        if not self.warned:
            self.warned = True
            self.say(why)


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
