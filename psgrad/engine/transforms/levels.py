"""Levels: the stack of active transforms, and the settings of PyTorch while they run the user's function.

PyTorch's autograd layer is switched off. So every level receives the operators that the user called, also
composite ones (`linear`, `scaled_dot_product_attention`), and nothing is recorded on the user's parameters.
If PyTorch's autograd records outside of the transforms, it is switched on again for operators on plain
tensors (`Attached` in interpreter.py).

If all samples of a batch agree on a branch, the function takes it. Otherwise the batch is split by the
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
from psgrad.engine.transforms.interpreter import (
    Interpreter,
    attachable,
    below_autograd,
    interpret,
    run_definition,
)
from psgrad.engine.transforms.operators import (
    Op,
    aten,
    facts,
    functional_variant,
    refuse_mutation,
    reshape_tracer,
    reshapes_in_place,
)
from psgrad.engine.transforms.private_torch import (
    current_mode,
    forward_mode_runs,
    set_grad_enabled,
    torch_func_runs,
    write_count,
)
from psgrad.engine.transforms.refused_writes import refuse_overlapping_memory
from psgrad.engine.transforms.rules.registry import decompose, decomposition_of, rules_of
from psgrad.engine.transforms.shape_checks import refuse_shapes
from psgrad.engine.transforms.state import Divergence as Divergence
from psgrad.engine.transforms.state import state
from psgrad.engine.transforms.tracer import Tracer, map_tracers, top_level
from psgrad.errors import TransformError


class WriteCounts:
    """The counts of writes to some arguments. A function that wrote to them can't run on them again."""

    def __init__(self, tensors: list[Any]) -> None:
        self.versions = [
            (x, write_count(x)) for x in tensors if isinstance(x, torch.Tensor) and not x.is_inference()
        ]

    def was_written(self) -> bool:
        return any(write_count(x) != version for x, version in self.versions)


_level_ids = itertools.count(1)


class Level:
    """One active transform. Subclasses define its behaviour at an operator."""

    # Whether it makes tracers of the tensors that the user's function makes, as traced values may be written
    # into them later. Off while a call or a rule runs below it (calls.py).
    adopts: bool = True
    # For vmap: the outcomes of a branch on which samples disagree, and its place in the user's code.
    diverged: tuple[list[Any], str] | None = None
    not_owned: str  # the targets that in-place operators can't write to, for an error

    def __init__(self) -> None:
        self.index = 0
        self.id = next(_level_ids)
        self.is_active = False
        self.attached = False  # whether PyTorch's autograd followed an argument of the function

    def process(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError

    def adopt(self, value: torch.Tensor) -> torch.Tensor:
        """A tracer of this level for a value from below."""
        raise NotImplementedError

    def adopt_from_below(self, value: torch.Tensor) -> torch.Tensor:
        """`adopt`, unless this level or one above has adopted the value already."""
        return value if isinstance(value, Tracer) and value.level.index >= self.index else self.adopt(value)

    def in_place(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The target of an in-place operator, after the write: of the operator's result as a new tensor."""
        operator, target = facts(op), args[0]
        several = operator.mutated != (0,)
        if several and not operator.mutated_kwargs and decomposition_of(op) is not None:
            return decompose(op, args, kwargs)
        if several or operator.mutated_kwargs:
            refuse_mutation(op, "an output argument (out=) or several arguments")
        if not self.owns(target):
            refuse_mutation(op, self.not_owned)
        refuse_overlapping_memory(op, args)
        if reshapes_in_place(op):
            self.reshape(op, args, kwargs)
        else:
            self.overwrite(op, args, kwargs)
        return target

    def owns(self, value: Any) -> bool:
        """Whether a value is a tracer of this level that can be written to."""
        raise NotImplementedError

    def overwrite(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Write the result of an in-place operator to its target, the first argument."""
        raise NotImplementedError

    def reshape(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Change the shape of an in-place operator's target. It becomes a view of its former value, so that
        writes to it still reach the same memory.
        """
        target = args[0]
        if target.has_views:
            refuse_mutation(op, "a tensor that has views")
        view = functional_variant(op)(target.twin(), *args[1:], **kwargs)  # type: ignore[misc]
        reshape_tracer(op, args, kwargs)
        target.become_view(view)

    def write_outside(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an in-place operator on a tensor that this level does not follow."""
        raise NotImplementedError

    def lower(self, op: Op, values: Any, kwargs: Any) -> Any:
        """The result of `op` one level below, on values below this level's tracers."""
        return interpret(op, values, kwargs, below=self)

    def process_untraced(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an operator of the function without tracers of this level or one above. A fresh
        tensor is adopted; a view has memory from outside.
        """
        operator = facts(op)
        if operator.mutated or operator.mutated_kwargs:
            return self.write_outside(op, args, kwargs)
        if rules_of(op).is_decomposed:
            refuse_shapes(op, args, kwargs)  # the operators of its definition may accept wrong shapes
            return run_definition(decomposition_of(op), args, kwargs)  # type: ignore[arg-type]
        result = self.lower_untraced(op, args, kwargs)
        # torch.tensor(..) ends with lift_fresh, whose result is new
        fresh = not operator.is_view or op is aten.lift_fresh.default
        return map_tracers(self.adopt, result) if fresh else result

    def lower_untraced(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result one level below. Every level adopts a fresh tensor, so that it can be written to at all
        of them.
        """
        top = top_level(args, kwargs)
        first = top.index if top is not None else 0
        adopter = next(
            (level for level in reversed(state.stack) if level.adopts and first < level.index < self.index),
            None,
        )
        return self.lower(op, args, kwargs) if adopter is None else adopter.process_untraced(op, args, kwargs)

    def draws(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether this level handles a random operator without tracers of its own."""
        return False

    def body(self, grad_mode: bool | None = None, *, attach: bool = True) -> Body:
        """The context in which the user's function runs: `with level.body(): out = f(*tracers)`. It restores
        all settings at the end, also after an error.

        attach: whether PyTorch's autograd may differentiate the result, if the function uses tensors that
        require a gradient.
        """
        return Body(self, torch.is_grad_enabled() if grad_mode is None else grad_mode, attach)

    def explained(self, error: BaseException) -> TransformError | None:
        """The error that replaces an error of the user's function; None if it is not replaced."""
        if isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_GRAPH):
            return TransformError(
                f"torch.autograd or .backward() inside the transformed function{diagnostics.where(error)}",
                hint="use transforms, which nest: grad, vjp, jvp",
            )
        if isinstance(error, RuntimeError) and _WRITE_INTO_MULTI_VIEW in str(error):
            return TransformError(
                "the function writes in place into one of several views that one operator"
                f" made{diagnostics.where(error)}, and PyTorch's autograd, which records it, refuses that",
                hint="take the view by itself: x[0], x.select(..), x.narrow(..)",
            )
        return None

    @contextmanager
    def again(self) -> Iterator[Level]:
        """Enter the level again after its end: the backward pass runs a function of the user."""
        with ExitStack() as exits:
            if not state.stack:
                exits.enter_context(attachable(torch.is_grad_enabled()))
            exits.enter_context(below_autograd())
            exits.enter_context(users_program())
            exits.enter_context(self.active())
            yield self

    @contextmanager
    def active(self, above: Level | None = None) -> Iterator[Level]:
        """Enter the level without the settings for a user's function, for the computations of rules.

        above: the level directly below this one in the stack; None for the highest.
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
    """The context in which the user's function runs inside a level. A class, because a generator would slow
    down each call of a transform.
    """

    def __init__(self, level: Level, grad_mode: bool, attach: bool) -> None:
        self.level, self.grad_mode, self.attach = level, grad_mode, attach
        self.entered: list[Any] = []

    def __enter__(self) -> Level:
        _refuse_inside_torch_func()
        try:
            if not state.stack:
                self._enter(attachable(self.attach and torch.is_grad_enabled()))
            # this switches recording on, and restores it at the end
            self._enter(torch.inference_mode(False))
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
                if level.diverged is not None:  # the function has caught the Divergence
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
            f"a transform of psgrad inside one of torch.func or PyTorch's forward mode{diagnostics.where()}",
            hint="use the transform of psgrad.engine.transforms outside, too",
        )


def _number_from(place: int) -> None:
    """Set the index of the levels from this position of the stack on."""
    for above, level in enumerate(state.stack[place:]):
        level.index = place + above + 1


class _WithoutFastPaths:
    """Switches off the fused inference kernels of nn.MultiheadAttention and nn.TransformerEncoderLayer, which
    have no derivative.

    PyTorch has one setting for the whole process: the first transform that begins switches the kernels off,
    the last one that ends restores the setting.
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


# Settings of the whole process that differ while a transform runs (autograd_function.py and
# torch_autograd.py add others).
switches: list[AbstractContextManager[None]] = [_WithoutFastPaths()]


@contextmanager
def switched() -> Iterator[None]:
    """Enter the process-wide settings, for a transform in this thread."""
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
    """The context in which the backward pass runs a function of the user: the interpreter gets its operators
    as in a level's body, also those without tracers.
    """
    with ExitStack() as exits:
        if not state.switched:
            exits.enter_context(switched())
        if not isinstance(current_mode(), Interpreter):
            exits.enter_context(Interpreter())
        yield
