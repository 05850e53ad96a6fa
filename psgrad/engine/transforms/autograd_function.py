"""torch.autograd.Function inside a transformed function: its backward, jvp and vmap are used as rules.

PyTorch has no hook for the call. Up to PyTorch 2.13, `Function.apply` calls an attribute of a base class that
is written in C. While a transform runs, psgrad replaces this attribute. This also changes calls by a name
that was bound before (`f = MyFunction.apply`). Since PyTorch 2.14, `Function.apply` itself is written in C,
and psgrad replaces it. A name that was bound before then calls PyTorch's own function, and is refused if its
backward is needed.

A Function must be written with `setup_context`, as for torch.func. Otherwise the level of the values that its
forward saves is not known. PyTorch runs a Function without `setup_context`; it is refused if its backward is
needed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from psgrad.engine.transforms import diagnostics
from psgrad.engine.transforms.batching import BatchLevel
from psgrad.engine.transforms.calls import Cotangents, Flat, dispatch_call, kind_of, without_adoption
from psgrad.engine.transforms.levels import switches
from psgrad.engine.transforms.private_torch import (
    APPLIES_IN_TWO_STEPS,
    FUNCTION_APPLY,
    ForceDispatchKeys,
    Function,
    Replacement,
    SingleLevelFunction,
)
from psgrad.engine.transforms.refused_writes import read_only
from psgrad.engine.transforms.rules.families import sum_to
from psgrad.engine.transforms.state import state
from psgrad.engine.transforms.user_rules import Derived, UserRuleCall
from psgrad.errors import TransformError

if not APPLIES_IN_TWO_STEPS:  # a name that was bound before may be called at any time
    type(state).forwards = 1


class Context:
    """The `ctx` of a Function's `setup_context`, `backward` and `jvp`. Any attribute can be set on it, as on
    PyTorch's.
    """

    def __init__(self, name: str, needs_input_grad: tuple[bool, ...]) -> None:
        self.name = name
        self.needs_input_grad = needs_input_grad
        self.materialize_grads = True
        self.to_save: tuple[Any, ...] = ()
        self.saved_for_forward: tuple[Any, ...] | None = None
        self.non_differentiable: tuple[torch.Tensor, ...] = ()
        self.pushing = False  # whether `jvp` reads it

    def save_for_backward(self, *tensors: Any) -> None:
        self.to_save = tensors

    def save_for_forward(self, *tensors: Any) -> None:
        self.saved_for_forward = tensors

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        return self.saved_for_forward if self.pushing and self.saved_for_forward is not None else self.to_save

    def mark_non_differentiable(self, *tensors: torch.Tensor) -> None:
        self.non_differentiable = tensors

    def set_materialize_grads(self, value: bool) -> None:
        self.materialize_grads = value

    def mark_dirty(self, *tensors: torch.Tensor) -> None:
        raise TransformError(
            f"torch.autograd.Function {self.name} writes in place into an argument"
            f" (mark_dirty){diagnostics.where()}",
            hint="clone the argument in forward and write into the clone",
        )


class VmapInfo(NamedTuple):
    """What a Function's `vmap` receives about the axis."""

    batch_size: int
    randomness: str


def applied(function: Any, args: tuple[Any, ...]) -> Any:
    """`function.apply(*args)` by its own rules, at all active levels."""
    call = _Application(function)
    outs = dispatch_call(call, list(args))
    return call.structured(outs)


class _Application(UserRuleCall):
    """One call of a Function."""

    def __init__(self, function: Any) -> None:
        self.kind = function
        self.single: bool | None = None  # whether the Function returned something other than a tuple
        has_backward = (
            function.backward is not SingleLevelFunction.backward
            or function.vjp is not SingleLevelFunction.vjp
        )
        super().__init__(
            f"torch.autograd.Function {function.__name__}",
            self._forward,
            self._derive if has_backward else None,
            self._jvp if function.jvp is not SingleLevelFunction.jvp else None,
        )
        self.batches = function.vmap is not Function.vmap

    def structured(self, outs: Flat) -> Any:
        return outs[0] if self.single else tuple(outs)

    def run(self, args: Flat) -> Flat:
        if state.attached and any(isinstance(x, torch.Tensor) and x.requires_grad for x in args):
            # PyTorch's autograd differentiates the result by the Function's own backward
            assert state.outside is not None
            with read_only(args), ForceDispatchKeys(*state.outside):
                return self._flat(super(SingleLevelFunction, self.kind).apply(*args))  # type: ignore[misc]
        return super().run(args)

    def _forward(self, args: Flat) -> Flat:
        with torch.no_grad(), _forward_runs():
            return self._flat(self.kind.forward(*args))

    def _flat(self, result: Any) -> Flat:
        self.single = not isinstance(result, tuple)
        return [result] if self.single else list(result)

    def _context(self, args: Flat, outs: Flat, needed: list[int]) -> Context:
        context = Context(self.name, tuple(i in needed for i in range(len(args))))
        self.kind.setup_context(context, tuple(args), self.structured(outs))
        return context

    def _derive(self, args: Flat, outs: Flat, needed: list[int]) -> Derived:
        context = self._context(args, outs, needed)
        constant = frozenset(i for i, x in enumerate(outs) if any(x is y for y in context.non_differentiable))
        shapes = [getattr(x, "shape", None) for x in args]
        backward = (
            self.kind.backward if self.kind.backward is not SingleLevelFunction.backward else self.kind.vjp
        )

        def pull(cotangents: Cotangents) -> Cotangents:
            if context.materialize_grads:
                cotangents = [
                    torch.zeros_like(x) if g is None and isinstance(x, torch.Tensor) else g
                    for g, x in zip(cotangents, outs, strict=True)
                ]
            if _is_once_differentiable(backward):
                return self._counted(_once(self.name, backward.__wrapped__, context, cotangents), shapes)
            return self._counted(backward(context, *cotangents), shapes)

        return pull, constant

    def _counted(self, given: Any, shapes: list[Any]) -> Cotangents:
        """One cotangent for each argument. A cotangent that was not summed over broadcast axes is summed
        here, as in PyTorch.
        """
        cotangents = list(given) if isinstance(given, tuple) else [given]
        surplus = cotangents[len(shapes) :]
        if len(cotangents) < len(shapes) or any(g is not None for g in surplus):
            raise TransformError(
                f"{self.name}: backward returned {len(cotangents)} gradients, forward takes {len(shapes)}"
                " arguments; expected one for each, None for what is no tensor",
            )
        return [
            (
                sum_to(g, shape, g.dtype)
                if isinstance(g, torch.Tensor) and shape is not None and _broadcasts(shape, g.shape)
                else g
            )
            for g, shape in zip(cotangents, shapes, strict=False)
        ]

    def _jvp(self, args: Flat, outs: Flat, tangents: Flat) -> Flat:
        context = self._context(args, outs, [i for i, t in enumerate(tangents) if t is not None])
        if context.materialize_grads:
            tangents = [
                (
                    torch.zeros_like(x)
                    if t is None and isinstance(x, torch.Tensor) and x.dtype.is_floating_point
                    else t
                )
                for t, x in zip(tangents, args, strict=True)
            ]
        context.pushing = True
        pushed = self.kind.jvp(context, *tangents)
        pushed = list(pushed) if isinstance(pushed, tuple) else [pushed]
        if len(pushed) != len(outs) or any(
            t is not None and t.shape != x.shape for t, x in zip(pushed, outs, strict=True)
        ):
            raise TransformError(
                f"{self.name}: jvp returned tangents of shapes"
                f" {[getattr(t, 'shape', None) for t in pushed]}; expected the results' shapes,"
                f" {[getattr(x, 'shape', None) for x in outs]}"
            )
        return [
            None if any(x is y for y in context.non_differentiable) else t
            for t, x in zip(pushed, outs, strict=True)
        ]

    def batch(self, level: BatchLevel, args: Flat) -> Flat:
        args = [level.content(x) for x in args]
        if not self.batches:
            return super().batch(level, args)
        if not any(level.owns(x) for x in args):
            return dispatch_call(self, args, below=level)
        in_dims = tuple(0 if level.owns(x) else None for x in args)
        values = [level.batch.raw(x) for x in args]
        with without_adoption(level), read_only(values):
            pair = self.kind.vmap(VmapInfo(level.size, level.randomness), in_dims, *values)
        if not (isinstance(pair, tuple) and len(pair) == 2):
            raise TransformError(
                f"{self.name}: vmap returned a {kind_of(pair)}{diagnostics.where()}; expected a pair"
                " (output, out_dims)",
            )
        outs = self._flat(pair[0])
        out_dims = [pair[1]] * len(outs) if not isinstance(pair[1], tuple) else list(pair[1])
        if len(out_dims) != len(outs):
            raise TransformError(
                f"{self.name}: vmap returned {len(outs)} outputs and {len(out_dims)}"
                f" out_dims{diagnostics.where()}"
            )
        return [
            x if dim is None else level.lift(x.movedim(dim, 0)) for x, dim in zip(outs, out_dims, strict=True)
        ]


def _broadcasts(shape: torch.Size, other: torch.Size) -> bool:
    """Whether a tensor of `shape` can be expanded to another shape."""
    extra = len(other) - len(shape)
    return extra >= 0 and all(size in (1, longer) for size, longer in zip(shape, other[extra:], strict=True))


def _is_once_differentiable(backward: Any) -> bool:
    code = getattr(backward, "__code__", None)
    return (
        code is not None
        and code.co_qualname == "once_differentiable.<locals>.wrapper"
        and code.co_filename == _ONCE_FILE
    )


_ONCE_FILE = SingleLevelFunction.forward.__code__.co_filename


def _once(name: str, backward: Callable[..., Any], context: Context, cotangents: Cotangents) -> Any:
    """A backward whose own derivative raises an error."""
    saved = context.to_save
    single = False

    def function(values: Flat) -> Flat:
        nonlocal single
        context.to_save = tuple(values[: len(saved)])
        try:
            with torch.no_grad():
                results = backward(context, *values[len(saved) :])
        finally:
            context.to_save = saved
        single = not isinstance(results, tuple)
        return [results] if single else list(results)

    def refuse(*args: Any) -> Any:
        raise TransformError(
            f"the backward of {name} is differentiated, but marked @once_differentiable",
            hint="write it with differentiable operators and remove the mark; forward mode needs a jvp alone",
        )

    call = UserRuleCall(f"the backward of {name}", function, lambda *_: (refuse, frozenset()), refuse)
    outs = dispatch_call(call, [*saved, *cotangents])
    return outs[0] if single else tuple(outs)


def _apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
    if state.stack and cls.setup_context is not SingleLevelFunction.setup_context:
        full, by_keyword = (args, kwargs) if APPLIES_IN_TWO_STEPS else _completed(cls.forward, args, kwargs)
        if not by_keyword:
            return applied(cls, full)
    if not state.stack:
        return super(SingleLevelFunction, cls).apply(*args, **kwargs)
    with _forward_runs():
        return super(SingleLevelFunction, cls).apply(*args, **kwargs)


@contextmanager
def _forward_runs() -> Iterator[None]:
    """Count, in the state, that the forward of a Function runs."""
    state.forwards += 1
    try:
        yield
    finally:
        state.forwards -= 1


def _completed(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """All arguments with defaults filled in, by position where possible."""
    bound = inspect.signature(forward).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.args, bound.kwargs


# If no transform runs in the calling thread, `_apply` calls PyTorch's own function.
switches.append(Replacement(FUNCTION_APPLY, lambda own: classmethod(_apply)))
