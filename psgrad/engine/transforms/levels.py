"""Levels: the stack of active transforms, and the settings of PyTorch while they run the user's function.

PyTorch's autograd layer is switched off, so operators arrive as the user called them, composite ones
(`linear`, `scaled_dot_product_attention`) whole, at every level alike, and nothing is recorded on the user's
parameters. If PyTorch's own autograd records from outside, it is switched on again for operators on plain
tensors only (`Attached` in interpreter.py).

A branch on data inside a batched function is taken if all samples agree; otherwise the batch is split by the
outcome (`Divergence`).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch

from psgrad.engine.transforms import diagnostics
from psgrad.engine.transforms.interpreter import Interpreter, attachable, below_autograd
from psgrad.engine.transforms.operators import Op
from psgrad.engine.transforms.private_torch import (
    current_mode,
    forward_mode_runs,
    set_grad_enabled,
    torch_func_runs,
    write_count,
)
from psgrad.engine.transforms.state import state
from psgrad.engine.transforms.tracer import Tracer
from psgrad.errors import TransformError


class Divergence(BaseException):
    """Samples of a level disagree on a number that the function's Python code reads.

    The caller of the function runs it again, for the samples of each outcome. It is not an Exception, so that
    the function's own error handling does not catch it. If a bare `except` does, the level still knows.
    """

    def __init__(self, level: Any, outcomes: list[Any], where: str) -> None:
        super().__init__(f"samples disagree: {outcomes}{where}")
        self.level = level
        level.diverged = outcomes, where
        self.outcomes = outcomes
        self.where = where

    def groups(self, device: torch.device) -> list[torch.Tensor]:
        """For each outcome the numbers of its samples, int64, in ascending order."""
        places: dict[Any, list[int]] = {}
        for sample, outcome in enumerate(self.outcomes):
            places.setdefault(outcome, []).append(sample)
        return [torch.tensor(samples, device=device) for samples in places.values()]


class WriteCounts:
    """Whether arguments were written to since: a function that changed them can't run on them again."""

    def __init__(self, tensors: list[Any]) -> None:
        self.versions = [
            (x, write_count(x)) for x in tensors if isinstance(x, torch.Tensor) and not x.is_inference()
        ]

    def was_written(self) -> bool:
        return any(write_count(x) != version for x, version in self.versions)


_level_ids = itertools.count(1)


class Level:
    """One active transform. Subclasses define what it does at an operator."""

    # Whether it handles operators without tracers of its own: they make tensors that traced values may be
    # written into.
    adopts: bool = False
    # For vmap: the outcomes of a branch on which samples disagree, and where it stands.
    diverged: tuple[list[Any], str] | None = None

    def __init__(self) -> None:
        self.index = 0
        self.id = next(_level_ids)
        self.is_active = False
        self.attached = False  # whether PyTorch's autograd followed an argument of the function

    def process(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError

    def process_untraced(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operator of the user's function without tracers of this level or one above. Only for levels with
        `adopts`.
        """
        raise NotImplementedError

    def adopt(self, value: torch.Tensor) -> torch.Tensor:
        """A tracer of this level for a value from below. Only for levels with `adopts`."""
        raise NotImplementedError

    def adopt_from_below(self, value: torch.Tensor) -> torch.Tensor:
        """`adopt`, unless this level or one above has adopted the value already."""
        return value if isinstance(value, Tracer) and value.level.index >= self.index else self.adopt(value)

    def draws(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether this level handles a random operator without tracers of its own."""
        return False

    def body(self, grad_mode: bool | None = None, *, attach: bool = True) -> Body:
        """Run the user's function inside: `with level.body(): out = f(*tracers)`. Leaves no trace behind,
        whatever happens.

        attach: whether PyTorch's autograd may differentiate the result, where the function meets tensors that
        require a gradient.
        """
        return Body(self, torch.is_grad_enabled() if grad_mode is None else grad_mode, attach)

    def explained(self, error: BaseException) -> TransformError | None:
        """The error that replaces one from the user's function; None lets it pass as it is."""
        if isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_GRAPH):
            return TransformError(
                f"torch.autograd or .backward() inside the transformed function{diagnostics.where(error)}",
                expected="derivatives by transforms, which nest: grad, vjp, jvp",
                cause="PyTorch's autograd records nothing there",
            )
        if isinstance(error, RuntimeError) and _WRITE_INTO_MULTI_VIEW in str(error):
            return TransformError(
                "the function writes in place into one of several views that one operator"
                f" made{diagnostics.where(error)}",
                expected="a view that was made by itself: x[0], x.select(..), x.narrow(..)",
                cause=(
                    "PyTorch's autograd, which follows the computation, takes no writes into results of"
                    " unbind, split or chunk"
                ),
                next_step=(
                    "take the view by its index, or compute a new tensor; a mapped function that no autograd"
                    " follows may write there"
                ),
            )
        return None

    @contextmanager
    def again(self) -> Iterator[Level]:
        """Inside the level once more, after it was left: the backward pass runs a function of the user."""
        with ExitStack() as exits:
            if not state.stack:
                exits.enter_context(attachable(torch.is_grad_enabled()))
            exits.enter_context(below_autograd())
            exits.enter_context(users_program())
            exits.enter_context(self.active())
            yield self

    @contextmanager
    def active(self, above: Level | None = None) -> Iterator[Level]:
        """Only the level, on top of the stack, without the settings for a user's function: for what rules
        compute.

        above: the level on top of which it is put, under those that are there already.
        """
        self.enter(above)
        try:
            yield self
        finally:
            self.leave()

    def enter(self, above: Level | None = None) -> None:
        place = state.stack.index(above) + 1 if above is not None else len(state.stack)
        self.is_active = True
        state.stack.insert(place, self)
        _number_from(place)

    def leave(self) -> None:
        self.is_active, self.attached = False, state.attached
        state.stack.remove(self)
        _number_from(self.index - 1)
        if not state.stack:
            state.marked = False


class Body:
    """While the user's function runs inside a level. A class, because generators would be slow at each call
    of a transform.
    """

    def __init__(self, level: Level, grad_mode: bool, attach: bool) -> None:
        self.level, self.grad_mode, self.attach = level, grad_mode, attach
        self.entered: list[Any] = []

    def __enter__(self) -> Level:
        _refuse_inside_torch_func()
        try:
            if not state.stack:
                self._enter(attachable(self.attach and torch.is_grad_enabled()))
            self._enter(
                torch.inference_mode(False)
            )  # which switches recording on, and when it is left, back to what it was
            set_grad_enabled(self.grad_mode)
            self._enter(below_autograd())
            if not state.switched:
                self._enter(switched())
            if not state.interpreting:
                self._enter(Interpreter())
            self.level.enter()
        except BaseException:
            self._leave()
            raise
        return self.level

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            if error is not None:
                explained = self.level.explained(error)
                if explained is not None:
                    raise explained from error
                return
            for level in state.stack:
                if level.diverged is not None:  # the function has caught what it must not catch
                    raise Divergence(level, *level.diverged)
        finally:
            self.level.leave()
            self._leave()

    def _enter(self, context: Any) -> None:
        context.__enter__()
        self.entered.append(context)

    def _leave(self) -> None:
        while self.entered:
            self.entered.pop().__exit__(None, None, None)


_WRITE_INTO_MULTI_VIEW = "output of a function that returns multiple views"
_NO_GRAPH = ("does not require grad and does not have a grad_fn", "can't retain_grad on Tensor")


def _refuse_inside_torch_func() -> None:
    if torch_func_runs() or forward_mode_runs():
        raise TransformError(
            "a transform of psgrad inside one of torch.func, or inside PyTorch's forward"
            f" mode{diagnostics.where()}",
            expected=(
                "transforms of one kind; those of psgrad nest in any order, and PyTorch's autograd may go"
                " through their results"
            ),
            cause=(
                "PyTorch's transforms would not see what happens inside: derivatives would be lost without a"
                " word"
            ),
            next_step=(
                "take grad, vjp, jvp, vmap, jacrev, jacfwd or hessian from psgrad.engine.transforms on the"
                " outside, too"
            ),
        )


def _number_from(place: int) -> None:
    """Levels are compared by their place in the stack."""
    for above, level in enumerate(state.stack[place:]):
        level.index = place + above + 1


class _WithoutFastPaths:
    """Without the fused inference kernels of nn.MultiheadAttention and nn.TransformerEncoderLayer, which have
    no derivative.

    The switch is one for the whole process: the first transform to begin turns it off, the last to end turns
    it back.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.running = 0
        self.enabled_before = True

    def __enter__(self) -> None:
        with self.lock:
            if self.running == 0:
                self.enabled_before = torch.backends.mha.get_fastpath_enabled()
                torch.backends.mha.set_fastpath_enabled(False)
            self.running += 1

    def __exit__(self, *error: Any) -> None:
        with self.lock:
            self.running -= 1
            if self.running == 0:
                torch.backends.mha.set_fastpath_enabled(self.enabled_before)


# What is set differently in the whole process while a transform runs (also: autograd_function.py).
switches: list[AbstractContextManager[None]] = [_WithoutFastPaths()]


@contextmanager
def switched() -> Iterator[None]:
    """In this thread, a transform runs."""
    entered: list[AbstractContextManager[None]] = []
    try:
        for switch in switches:
            switch.__enter__()
            entered.append(switch)
        state.switched = True
        yield
    finally:
        state.switched = False
        for switch in reversed(entered):
            switch.__exit__(None, None, None)


@contextmanager
def users_program() -> Iterator[None]:
    """While the backward pass runs a function of the user: its operators are seen as in a level's body, also
    those without tracers.
    """
    with ExitStack() as exits:
        if not state.switched:
            exits.enter_context(switched())
        if not isinstance(current_mode(), Interpreter):
            exits.enter_context(Interpreter())
        in_backward_pass, state.in_backward_pass = state.in_backward_pass, False
        try:
            yield
        finally:
            state.in_backward_pass = in_backward_pass
