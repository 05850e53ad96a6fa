"""The interpreter: every operator of a transformed function arrives here, and is passed to the transform that
handles it.

Each active transform is a *level* on a stack (levels.py). A value at a level is a `Tracer`: a tensor without
storage that stands for something else (a recorded value, a whole batch). PyTorch passes every operator with a
tracer among its arguments to `interpret`, which passes it to the highest level among the arguments. That
level's rule calls operators on the values below, which are plain tensors or tracers of lower levels, and so
on down to the kernels.

While a level runs the user's function, a mode also sees the operators without any tracer among their
arguments: random draws must obey `randomness`, and a fresh tensor (`zeros`) must be able to receive traced
values.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, ClassVar, NoReturn, Self

import torch

from psgrad.engine.transforms import diagnostics, operators
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
    no_torch_function,
    without_innermost_mode,
)
from psgrad.engine.transforms.shape_checks import refuse_shapes
from psgrad.engine.transforms.state import ActiveLevel, state
from psgrad.errors import TransformError


class Tracer(torch.Tensor):
    """A value at one level. Its shape, strides, dtype and device are those that the user's function sees."""

    __slots__ = ("level", "value")  # attributes of every tracer, for speed and memory

    level: ActiveLevel
    value: Any
    carries_samples: ClassVar[bool] = False  # whether the value has a sample axis that the tracer hides

    __torch_function__ = no_torch_function  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, op: Op, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if state.marked:
            resolve_marks()
        return interpret(op, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(level={self.level.index}, value={self.value!r})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.clone()

    def below(self) -> torch.Tensor:
        """The value of this tracer, one level below."""
        raise NotImplementedError

    def rewritten(self, new: Any) -> Any:
        """What a write of `new` under no_grad leaves in this place: the new value, with the derivative of the
        old one.
        """
        return new

    def contiguously(self) -> Any:
        """The same value with contiguous strides, for a program that takes views of it."""
        return self

    def tolist(self) -> Any:
        return [item.tolist() for item in self.unbind()] if self.dim() else self.item()

    def data_ptr(self) -> int:
        raise TransformError(
            f"the address of a traced tensor{diagnostics.where()}",
            cause=("a traced tensor has no memory; a kernel that gets the address would read other memory"),
            next_step=(
                "make the kernel an operator (torch.library.custom_op), and give it a rule:"
                " docs/guides/adding-an-operator.md"
            ),
        )

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        if not requires_grad:
            raise TransformError(
                f"requires_grad_(False) on a traced tensor{diagnostics.where()}",
                cause=(
                    "a transform differentiates what its argnums name; the gradient would be computed"
                    " nevertheless"
                ),
                next_step="call .detach(), or use torch.no_grad() where the gradient should end",
            )
        return self

    def numpy(self, *, force: bool = False) -> Any:
        raise TransformError(
            f"a traced tensor can't become a NumPy array{diagnostics.where()}",
            cause=(
                "NumPy works on memory, which a traced tensor has none of; what NumPy computes has no"
                " derivative either"
            ),
            next_step="write the computation with torch, or do it outside the transformed function",
        )

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        return self.numpy()

    @property
    def data(self) -> torch.Tensor:
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined,no-any-return]

    @data.setter
    def data(self, new: Any) -> None:
        refuse_new_data()

    def register_hook(self, hook: Any) -> Any:
        raise TransformError(
            f"a hook on a traced tensor{diagnostics.where()}",
            cause="PyTorch's autograd records nothing inside a transform, and would never call it",
            next_step="write what it does to the gradient as a custom_vjp",
        )

    register_post_accumulate_grad_hook = register_hook


def refuse_new_data() -> NoReturn:
    raise TransformError(
        f"an assignment to .data of a traced tensor{diagnostics.where()}",
        cause="the value would be replaced where no transform sees it",
        next_step="write into it under torch.no_grad() (x.copy_(y)), or use another variable",
    )


def rewritten(old: Any, new: Any) -> Any:
    """`new` written under no_grad in place of `old`: see Tracer.rewritten. A value that no level follows is
    replaced.
    """
    if isinstance(old, Tracer):
        return old.rewritten(new)
    if state.outside is None or not (state.attached and old.requires_grad):
        return new
    with ForceDispatchKeys(*state.outside):
        with torch.enable_grad():
            place = old.clone()
        return place.copy_(new)


def innermost(value: Any) -> Any:
    """The plain tensor under all tracers (or a deferred value, where one is in between)."""
    while isinstance(value, Tracer):
        value = value.value
    return value


def strides_of(value: torch.Tensor) -> tuple[int, ...]:
    """The strides of a value that is to be traced. Also notes whether autograd follows it, or a mark is on
    it.
    """
    if value.requires_grad and state.outside is not None:
        state.attached = True
    if value.dtype.is_complex or value.is_neg():
        state.marked = True
    try:
        return value.stride()
    except RuntimeError as error:
        raise TransformError(
            f"a tensor of layout {value.layout}{diagnostics.where()}",
            expected="a dense tensor",
            next_step="call .to_dense() on it outside the transformed function",
        ) from error


_MARKS = (CONJUGATE, NEGATIVE)


def resolve_marks() -> None:
    """Let kernels see computed conjugates and negatives.

    PyTorch switches that off while it passes us an operator (and on again afterwards): a marked value would
    silently be taken without its mark.
    """
    for mark in _MARKS:
        exclude_layer(mark, False)


def note_autograd(value: Any) -> None:
    """Note whether autograd follows a plain tensor; called for each that a tracer is made of or an operator
    receives.
    """
    if value.requires_grad and state.outside is not None:
        state.attached = True


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
        if adopter is None or (top is not None and (top is _DEAD or top.index >= adopter.index)):
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
    """While rules run: PyTorch's autograd records operators on plain tensors only, as it was set outside of
    all transforms.
    """

    def __torch_dispatch__(self, op: Op, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if top_level(args, kwargs) is not None or state.outside is None:
            return interpret(op, args, kwargs)
        written = written_for_autograd.get(op)
        if written is not None and torch.is_grad_enabled():
            tensors = list(tensors_in(args, kwargs))
            if any(x.requires_grad for x in tensors) and (
                op not in divides_by_sizes or all(x.numel() for x in tensors)
            ):
                with Attached():
                    return written(*args, **kwargs)
        with _without_modes_of_ours(), ForceDispatchKeys(*state.outside):
            for target in written_by(op, args, kwargs):
                # PyTorch takes a view for a leaf, and refuses the write, until its history after writes
                # through other views was read.
                _ = target.grad_fn
            return op(*args, **kwargs)


@contextmanager
def _without_modes_of_ours() -> Iterator[None]:
    """While PyTorch's autograd records an operator: the operators inside it must not be recorded again."""
    with ExitStack() as exits:
        while isinstance(current_mode(), (Interpreter, Attached)):
            exits.enter_context(without_innermost_mode())
        yield


# Operators that PyTorch's autograd must not see as they are, and what replaces them (see
# autograd_outside.py).
written_for_autograd: dict[Op, Callable[..., Any]] = {}
divides_by_sizes: set[Op] = set()  # those of them that are as they are where a tensor is empty


@contextmanager
def attachable(recording: bool) -> Iterator[None]:
    """For the outermost transform: store the dispatcher's settings outside."""
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
    """Operators go past PyTorch's autograd and its bookkeeping of views: nothing is recorded, and composite
    operators stay whole.
    """
    return BelowAutograd()


@contextmanager
def recorded_outside() -> Iterator[None]:
    """While the backward pass runs: PyTorch's autograd records it, if it records at all."""
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
    """While the backward pass runs: the operators of rules need no interpreter, as tracers find their level
    by themselves.
    """
    if isinstance(current_mode(), Interpreter):
        with without_innermost_mode():
            yield
    else:
        yield


def interpret(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any], below: ActiveLevel | None = None) -> Any:
    """Pass `op` to the highest level among its arguments (a random operator: to the highest level that
    handles it).

    `below`: only levels under this one; a level passes itself here to go one level below.
    """
    return dispatch(top_level(args, kwargs), op, args, kwargs, below)


def run(op: Op, *args: Any, **kwargs: Any) -> Any:
    """`op(*args, **kwargs)`, for rules: passed to the level of its tracers at once, if no mode is active."""
    if positions := facts(op).contiguous:  # the plain tensors among the arguments reach the kernel from here
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
    # PyTorch's autograd must see a view from the start: a value that it follows may be written through the
    # view later.
    if state.attached or (state.outside is not None and facts(op).is_view):
        with nullcontext() if isinstance(current_mode(), Attached) else Attached():
            return _dispatch_checked(level, op, args, kwargs, below)
    operator = facts(op)
    if level is _DEAD or state.saved or operator.is_random or operator.contiguous:
        return _dispatch_checked(level, op, args, kwargs, below)
    return op(*args, **kwargs) if level is None else level.process(op, args, kwargs)


def _dispatch_checked(
    level: ActiveLevel | None,
    op: Op,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    below: ActiveLevel | None,
) -> Any:
    if level is _DEAD:
        args, kwargs = map_tracers(on_living_level, args), map_tracers(on_living_level, kwargs)
        return interpret(op, args, kwargs, below)
    for reference in list(state.saved):
        if (saved := reference()) is not None:
            saved.watch(op, args, kwargs)
    if level is None and (positions := facts(op).contiguous):
        args = contiguous(positions, args)
    if not is_random(op, args, kwargs):
        return op(*args, **kwargs) if level is None else level.process(op, args, kwargs)
    for watcher in state.draws:
        watcher(kwargs.get("generator"))
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


_DEAD: Any = object()  # in place of a level: of a tracer whose transform has ended

OTHER, TENSOR, TRACER, SEVERAL = range(
    4
)  # what an argument may be: a number, a plain tensor, a tracer, a list


class _Kinds(dict[type, int]):
    """The kinds of classes. Looked up for each argument of each operator, because isinstance is slow for
    classes of tensors.
    """

    def __missing__(self, kind: type) -> int:
        if issubclass(kind, torch.Tensor):
            what = TRACER if issubclass(kind, Tracer) else TENSOR
        else:
            what = SEVERAL if issubclass(kind, (list, tuple)) else OTHER
        self[kind] = what
        return what


kinds = _Kinds()


def top_level(args: Any, kwargs: dict[str, Any]) -> ActiveLevel | None:
    """The highest level among the arguments, None without any tracer, `_DEAD` if the transform of one has
    ended.
    """
    top: ActiveLevel | None = None
    for argument in (*args, *kwargs.values()) if kwargs else args:
        kind = kinds[type(argument)]
        if kind == TRACER:
            level = argument.level
        elif kind == TENSOR:
            if argument.requires_grad:
                note_autograd(argument)
            continue
        elif kind == SEVERAL:  # `cat`, `stack`, `index`; most lists are sizes
            if not argument or type(argument[0]) is int:
                continue
            inner = top_level(argument, {})
            if inner is None:
                continue
            if inner is _DEAD:
                return inner
            level = inner
        else:
            continue
        if level is top:
            continue
        if not level.alive:
            return _DEAD  # type: ignore[no-any-return]
        if top is None or level.index > top.index:
            top = level
    return top


def map_tracers(function: Callable[[Any], Any], tree: Any) -> Any:
    """`function` applied to each tensor in an operator's arguments or results."""
    kind = kinds[type(tree)]
    if kind in (TENSOR, TRACER):
        return function(tree)
    if kind == SEVERAL:
        items = [map_tracers(function, item) for item in tree]
        return items if isinstance(tree, list) else tuple(items)
    if isinstance(tree, dict):
        return {key: map_tracers(function, item) for key, item in tree.items()}
    return tree


def on_living_level(tensor: torch.Tensor) -> torch.Tensor:
    """The value of a tracer on the remaining levels, if its transform has ended."""
    while isinstance(tensor, Tracer) and not tensor.level.alive:
        tensor = tensor.below()
    return tensor


def tensors_in(args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """The tensors among an operator's arguments."""
    for argument in itertools.chain(args, kwargs.values()):
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from (item for item in argument if isinstance(item, torch.Tensor))
