"""The state of the transforms in this thread: the levels, the watchers of operators, and the settings of
PyTorch outside of the transforms.

The interpreter uses a level (levels.py) through the interface `ActiveLevel`, and the saved values of a tape
(tape.py) through `OperatorWatch`.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch

from psgrad.engine.transforms.operators import Op


class Divergence(BaseException):
    """Samples of a level disagree on a number that the function's Python code reads.

    The caller of the function runs it again, for the samples of each outcome. This is not an Exception, so
    that the function's own error handling does not catch it. If a bare `except` catches it, the level raises
    it again at the end.
    """

    def __init__(self, level: Any, outcomes: list[Any], where: str) -> None:
        super().__init__(f"samples disagree: {outcomes}{where}")
        self.level = level
        level.diverged = outcomes, where
        self.outcomes = outcomes
        self.where = where

    def groups(self, device: torch.device) -> list[torch.Tensor]:
        """For each outcome the indices of its samples, int64 [k], in ascending order."""
        places: dict[Any, list[int]] = {}
        for sample, outcome in enumerate(self.outcomes):
            places.setdefault(outcome, []).append(sample)
        return [torch.tensor(samples, device=device) for samples in places.values()]


class ActiveLevel(Protocol):
    """The interface of an active transform to the interpreter."""

    index: int  # its position in the stack, from 1
    is_active: bool  # whether it is in the stack
    adopts: bool  # whether it handles operators of the function without tracers of its own
    # For vmap: the outcomes of a branch on which samples disagree, and its place in the user's code.
    diverged: tuple[list[Any], str] | None

    def process(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an operator with tracers of this level among its arguments."""

    def process_untraced(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an operator without tracers of this level or one above. Only if `adopts`."""

    def adopt_from_below(self, value: torch.Tensor) -> torch.Tensor:
        """A tracer of this level for a value from below. Only if `adopts`."""

    def draws(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether this level handles a random operator without tracers of its own."""


class OperatorWatch(Protocol):
    """An object that is called with each operator while it exists: a tape whose values must not change."""

    def watch(self, op: Op, args: Any, kwargs: dict[str, Any]) -> None:
        """Called with each operator, before it runs."""


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.stack: list[ActiveLevel] = []  # the innermost last
        # Whether operators are the user's function's, which an Interpreter gets; those of rules in the
        # backward pass are not.
        self.interpreting = False
        self.switched = False  # whether the process-wide switches are set for this thread (levels.py)
        # While a random operator runs: only levels below this index handle the operators inside it.
        self.random_below = math.inf
        # The include and exclude sets of PyTorch's dispatcher outside of the outermost transform, if autograd
        # records there; and whether the function has used a tensor that requires a gradient.
        self.outside: tuple[Any, Any] | None = None
        self.attached = False
        # Whether values may be conjugates or negatives that PyTorch has only marked, not computed.
        self.marked = False
        # Called with each operator of the user's function before it runs (refused_writes.py, calls.py).
        self.watchers: tuple[Callable[[Op, Any, Any], None], ...] = ()
        # Called with each operator that draws, its arguments and its generator, before it does
        # (checkpoint.py).
        self.draws: tuple[Callable[[Op, Any, Any], None], ...] = ()
        # What a call that is recorded assumes of its numbers, by class (recorder.py); None where none is.
        self.assumptions: dict[type, Any] | None = None
        # The values that tapes need later; each is called with the operators that write.
        self.saved: set[weakref.ref[OperatorWatch]] = set()

    # How many forwards of autograd.Functions run, or may run without a call of psgrad's replacement (see
    # autograd_function.py).
    forwards: int = 0


state = _ThreadState()
