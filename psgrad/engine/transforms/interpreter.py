"""The interpreter: it passes every operator of a transformed function to the transform that handles it.

Each active transform is a *level* on a stack (levels.py). A value at a level is a `Tracer` (tracer.py).
PyTorch passes every operator with a tracer among its arguments to `interpret`, which passes it to the highest
level among the arguments. That level's rule calls operators on the values below, which are plain tensors or
tracers of lower levels. This repeats down to the kernels.

While a level runs the user's function, a mode also gets the operators without any tracer among their
arguments: random draws must obey `randomness`, and a fresh tensor (`zeros`) must be able to receive traced
values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch

from psgrad.engine.transforms import operators
from psgrad.engine.transforms.operators import RANDOM_COMPOSITES, Op, contiguous, facts, is_random, written_by
from psgrad.engine.transforms.private_torch import (
    CONJUGATE,
    NEGATIVE,
    BelowAutograd,
    DispatchMode,
    ForceDispatchKeys,
    autocast_is_on,
    current_mode,
    dispatch_modes,
    exclude_layer,
    excluded_layers,
    included_layers,
    without_innermost_mode,
)
from psgrad.engine.transforms.shape_checks import refuse_shapes
from psgrad.engine.transforms.state import ActiveLevel, state
from psgrad.engine.transforms.tracer import (
    ENDED,
    Tracer,
    map_tracers,
    on_active_levels,
    tensors_in,
    top_level,
)

_MARKS = (CONJUGATE, NEGATIVE)


def resolve_marks() -> None:
    """Make PyTorch compute conjugates and negatives that are only marked, before kernels read them.

    PyTorch switches this off while it passes an operator to psgrad, and on again afterwards. Without it a
    kernel would read a marked value without its mark, and return a wrong number.
    """
    for mark in _MARKS:
        exclude_layer(mark, False)


class InterpretedTracer(Tracer):
    """A tracer whose operators PyTorch passes to `interpret`."""

    __slots__ = ()

    @classmethod
    def __torch_dispatch__(cls, op: Op, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if state.marked:
            resolve_marks()
        return interpret(op, args, kwargs or {})


class Interpreter(DispatchMode):
    """Sees every operator of the user's function, also those on plain tensors."""

    def __enter__(self) -> Any:
        self.interpreting_before = state.interpreting
        state.interpreting = True
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        state.interpreting = self.interpreting_before
        super().__exit__(*error)

    def __torch_dispatch__(self, op: Op, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        resolve_marks()
        kwargs = kwargs or {}
        for watcher in state.watchers:
            watcher(op, args, kwargs)
        if op in operators.WHOLE:
            args, kwargs = operators.cast(args, kwargs)
        top = top_level(args, kwargs)
        if top is not None:
            refuse_shapes(op, args, kwargs)
        adopter: ActiveLevel | None = None
        for level in reversed(state.stack):
            if level is top or level.adopts:
                adopter = level
                break
        if adopter is None or (top is not None and (top is ENDED or top.index >= adopter.index)):
            return dispatch(top, op, args, kwargs)
        if op in RANDOM_COMPOSITES:
            return run_definition(op.decompose, args, kwargs)
        if is_random(op, args, kwargs):
            drawn = interpret(op, args, kwargs)
            return drawn if facts(op).mutated else map_tracers(adopter.adopt_from_below, drawn)
        if state.attached:
            with Attached():
                return adopter.process_untraced(op, args, kwargs)
        return adopter.process_untraced(op, args, kwargs)


class Attached(DispatchMode):
    """A mode for rules: PyTorch's autograd records operators on plain tensors, with the settings that it has
    outside of all transforms.
    """

    def __torch_dispatch__(self, op: Op, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if top_level(args, kwargs) is not None or state.outside is None:
            return interpret(op, args, kwargs)
        written = autograd_replacements.get(op)
        if written is not None and torch.is_grad_enabled():
            tensors = list(tensors_in(args, kwargs))
            if any(x.requires_grad for x in tensors) and (
                op not in not_replaced_if_empty or all(x.numel() for x in tensors)
            ):
                with Attached():
                    return written(*args, **kwargs)
        with _without_interpreter_modes(), ForceDispatchKeys(*state.outside):
            for target in written_by(op, args, kwargs):
                # After a write through another view, PyTorch treats a view as a leaf and refuses the write,
                # until its grad_fn is read once.
                _ = target.grad_fn
            return op(*args, **kwargs)


@contextmanager
def _without_interpreter_modes() -> Iterator[None]:
    """Switch psgrad's modes off while PyTorch's autograd records an operator, so that the operators inside it
    are not recorded again.
    """
    with ExitStack() as exits:
        while isinstance(current_mode(), (Interpreter, Attached)):
            exits.enter_context(without_innermost_mode())
        yield


# For operators that PyTorch's autograd can't differentiate correctly, the function that replaces them (see
# torch_autograd.py).
autograd_replacements: dict[Op, Callable[..., Any]] = {}
not_replaced_if_empty: set[Op] = set()  # of these, the operators that are not replaced if a tensor is empty


@contextmanager
def attachable(recording: bool) -> Iterator[None]:
    """Store the dispatcher's settings outside of the outermost transform. recording: whether PyTorch's
    autograd may record inside.
    """
    before = state.outside, state.attached
    if not recording:
        state.outside = None
    elif state.outside is None:  # else a transform inside the backward pass: recorded already
        state.outside = included_layers(), excluded_layers()
    state.attached = False
    try:
        yield
    finally:
        state.outside, state.attached = before


def below_autograd() -> Any:
    """A context in which operators skip PyTorch's autograd and its bookkeeping of views: nothing is recorded,
    and composite operators stay whole.
    """
    return BelowAutograd()


@contextmanager
def recorded_outside() -> Iterator[None]:
    """Let PyTorch's autograd record the backward pass, if it records outside."""
    with ExitStack() as exits:
        if not state.stack:
            exits.enter_context(attachable(torch.is_grad_enabled()))
            exits.enter_context(below_autograd())
        exits.enter_context(Attached())
        yield


def run_definition(definition: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a composite operator by its definition, whose operators the interpreter handles."""
    with Interpreter():
        return definition(*args, **kwargs)


@contextmanager
def rules_only() -> Iterator[None]:
    """Switch the interpreter off during the backward pass. The operators of rules do not need it, because a
    tracer has its level as an attribute.
    """
    before, state.interpreting = state.interpreting, False
    try:
        with without_innermost_mode() if isinstance(current_mode(), Interpreter) else nullcontext():
            yield
    finally:
        state.interpreting = before


def interpret(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], below: ActiveLevel | None = None) -> Any:
    """The result of `op` at the highest level among its arguments; of a random operator, at the highest level
    that handles it.

    below: only levels under this one are used; a level passes itself here to go one level below.
    """
    return dispatch(top_level(args, kwargs), op, args, kwargs, below)


def run(op: Op, *args: Any, **kwargs: Any) -> Any:
    """`op(*args, **kwargs)`, for rules: passed directly to the level of its tracers, if no mode is active."""
    if positions := facts(op).contiguous:  # plain tensors go to the kernel without another check
        args = contiguous(positions, args)
    if dispatch_modes() or autocast_is_on():
        return op(*args, **kwargs)
    level = top_level(args, kwargs)
    return op(*args, **kwargs) if level is None else dispatch(level, op, args, kwargs)


def cast(g: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`g` in another dtype; the real part where a real value was promoted to complex."""
    if g.dtype.is_complex and not dtype.is_complex:
        g = torch.real(g)
    return operators.aten._to_copy.default(g, dtype=dtype) if g.dtype != dtype else g


def dispatch(
    level: ActiveLevel | None,
    op: Op,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    below: ActiveLevel | None = None,
) -> Any:
    """`interpret` for arguments whose highest level is known."""
    # PyTorch's autograd must record a view when it is made: a value that autograd follows may be written into
    # the view later.
    if state.attached or (state.outside is not None and facts(op).is_view):
        with nullcontext() if isinstance(current_mode(), Attached) else Attached():
            return _dispatch_checked(level, op, args, kwargs, below)
    operator = facts(op)
    if level is ENDED or state.saved or operator.is_random or operator.contiguous:
        return _dispatch_checked(level, op, args, kwargs, below)
    return op(*args, **kwargs) if level is None else level.process(op, args, kwargs)


def _dispatch_checked(
    level: ActiveLevel | None,
    op: Op,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    below: ActiveLevel | None,
) -> Any:
    if level is ENDED:
        args, kwargs = map_tracers(on_active_levels, args), map_tracers(on_active_levels, kwargs)
        return interpret(op, args, kwargs, below)
    for reference in list(state.saved):
        if (saved := reference()) is not None:
            saved.watch(op, args, kwargs)
    if level is None and (positions := facts(op).contiguous):
        args = contiguous(positions, args)
    if not is_random(op, args, kwargs):
        return op(*args, **kwargs) if level is None else level.process(op, args, kwargs)
    for watcher in state.draws:
        watcher(op, args, kwargs.get("generator"))
    before, state.random_below = state.random_below, state.random_below if below is None else below.index
    try:
        for candidate in reversed(state.stack):
            if level is not None and candidate.index <= level.index:
                break
            if candidate.index < state.random_below and candidate.draws(op, args, kwargs):
                return candidate.process(op, args, kwargs)
        return op(*args, **kwargs) if level is None else level.process(op, args, kwargs)
    finally:
        state.random_below = before
