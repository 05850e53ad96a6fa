"""The common part of reverse and forward mode: tracers that hold a value with its derivative, in-place
operators, and views.

In-place operators run out of place, and the tracer gets the new value. A tracer that is a view stores its
base and the operator that made it. A write into a view also writes the base. A view is taken again after a
write to its base.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar, Protocol, TypeVar

import torch

from psgrad.engine.transforms import diagnostics
from psgrad.engine.transforms.interpreter import InterpretedTracer
from psgrad.engine.transforms.levels import Level
from psgrad.engine.transforms.operators import (
    Op,
    aten,
    facts,
    out_of_place,
    refuse_mutation,
)
from psgrad.engine.transforms.private_torch import make_wrapper, without_modes
from psgrad.engine.transforms.rules.registry import DerivativeRule, decompose, rules_of
from psgrad.engine.transforms.rules.strides import write_through
from psgrad.engine.transforms.state import state
from psgrad.engine.transforms.tracer import (
    SEQUENCE,
    TRACER,
    Tracer,
    kinds,
    map_tracers,
    strides_of,
    tensors_in,
)
from psgrad.errors import TransformError

Position = int | tuple[int, int]  # of an argument, or of an item of an argument that is a list
creation_numbers = itertools.count()


class DerivativeTracer(InterpretedTracer):
    """A value with a derivative at a level, or a constant without one. Subclasses define the derivative."""

    __slots__ = ("created",)

    level: DerivativeLevel
    value: torch.Tensor
    # For a view: its base, the operator, the operator's other arguments, and the number of its result.
    view_of: tuple[DerivativeTracer, Op, tuple[Any, ...], dict[str, Any], int | None] | None = None
    writes: int = 0  # the number of writes to this tracer
    writes_seen: int = 0  # the base's `writes` when this view was taken
    created: int  # larger for tracers that were made later
    read_by: str | None = None  # a function that reads it and will run again: writes are refused
    # Whether it stands for a tensor from outside of the level, which in-place operators write to; and whether
    # a tape needs that tensor, so that writes are refused.
    from_outside: bool = False
    needed: bool = False

    @property
    def varies(self) -> bool:
        """Whether it has a derivative; otherwise the value is a constant."""
        raise NotImplementedError

    def become(self, other: Any) -> None:
        """Replace this tracer's value and derivative by those of `other`."""
        raise NotImplementedError

    def below(self) -> torch.Tensor:
        self.level.refresh(self)
        return self.value

    def with_contiguous_strides(self) -> DerivativeTracer:
        value = self.below()
        if not isinstance(value, Tracer) or (contiguous := value.with_contiguous_strides()) is value:
            return self
        same = self.level.constant(contiguous)
        same.become(self)
        same.value = contiguous
        return same

    def twin(self) -> DerivativeTracer:
        same = self.level.constant(self.below())
        same.become(self)
        same.view_of, same.writes_seen = self.view_of, self.writes_seen
        return same

    def become_view(self, view: DerivativeTracer) -> None:
        self.become(view)
        self.view_of, self.writes_seen = view.view_of, view.writes_seen


AnyTracer = TypeVar("AnyTracer", bound=DerivativeTracer)


def make_tracer(kind: type[AnyTracer], value: torch.Tensor, level: DerivativeLevel) -> AnyTracer:
    """A tracer of `value` at `level`, which is not a view and has not been written to."""
    strides = strides_of(value)
    tracer: Any = make_wrapper(kind, value.shape, strides, 0, dtype=value.dtype, device=value.device)
    tracer.value, tracer.level, tracer.created = value, level, next(creation_numbers)
    return tracer  # type: ignore[no-any-return]


class DerivativeLevel(Level):
    """One derivative. Subclasses define `apply`, for operators with a rule."""

    not_owned = "a tensor made outside the transformed function (a buffer, a cache)"
    tracer: ClassVar[type[DerivativeTracer]]
    reads: Reads | None = None  # set while a function runs that will run again
    has_outside: bool = False  # whether a tracer stands for a tensor from outside

    def constant(self, value: torch.Tensor) -> DerivativeTracer:
        raise NotImplementedError

    def is_on(self) -> bool:
        """Whether derivatives are followed at this point of the user's function."""
        raise NotImplementedError

    def apply(
        self, rule: DerivativeRule, op: Op, args: Any, kwargs: Any, inputs: list[tuple[Position, Any]]
    ) -> Any:
        """The result of `op`, traced. inputs: the tracers with a derivative among the arguments, each with
        its position.
        """
        raise NotImplementedError

    def owns(self, value: Any) -> bool:
        return isinstance(value, DerivativeTracer) and value.level is self

    # -- one operator ----------------------------------------------------------------------------------------

    def adopt(self, value: torch.Tensor) -> DerivativeTracer:
        return self.constant(value)

    def adopt_from_outside(self, value: Any) -> Any:
        """`adopt_from_below`, for a tensor that was not made by an operator at this level."""
        adopted: Any = self.adopt_from_below(value)
        if adopted is not value:
            adopted.from_outside = self.has_outside = True
        return adopted

    def write_outside(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an in-place operator on a tensor from outside the function. Only a counter may be
        changed, because the backward pass may need other values.
        """
        counters = all(not t.dim() and not t.dtype.is_floating_point for t in tensors_in(args[:1], {}))
        if op is not aten.detach_.default and (not counters or facts(op).mutated != (0,)):
            _refuse_write_outside(op)
        return self.lower(op, args, kwargs)

    def _write_from_outside(self, base: DerivativeTracer, op: Op, args: Any, kwargs: Any) -> None:
        """Run an in-place operator on a tensor of `adopt_from_outside` in its own memory, so that every view
        of it changes.
        """
        if base.needed or (self.inputs(args) and self.is_on()):
            _refuse_write_outside(op)
        self.lower(op, self.unwrap(args), self.unwrap(kwargs))

    def process(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        operator = rules_of(op)
        if self.reads is not None:
            self.reads.note(tensors_in(args, kwargs))
        if operator.writes:
            return self.in_place(op, args, kwargs)
        # the operators of its definition are handled one by one: some are views, some write in place
        if operator.is_decomposed:
            return decompose(op, args, kwargs)
        inputs, values = self.inputs_and_values(args)
        by_keyword = bool(kwargs) and any(self.owns(v) and v.varies for v in kwargs.values())
        follows = (
            (inputs or by_keyword) and not operator.constant and (self.reads is None or self.reads.follows)
        )
        if follows:
            follows = self.is_on()
            if state.forwards and (
                name := diagnostics.running_autograd_function(inside=torch.is_grad_enabled())
            ):
                raise TransformError(
                    f"torch.autograd.Function {name}{diagnostics.where()}, whose backward would not be used",
                    hint="give it a setup_context, and call it by its class, Class.apply; for a checkpoint:"
                    " use_reentrant=False",
                )
        below = op
        if op is aten.view.default and self.owns(args[0]) and values[0].stride() != args[0].stride():
            # a write has stored a value whose memory layout differs from the tracer's strides
            _require_view(*args)
            below = aten.reshape.default
        if not follows:
            result = self.lower(below, values, self.unwrap(kwargs) if kwargs else kwargs)
            result = (
                self.constant(result)
                if isinstance(result, torch.Tensor)
                else map_tracers(self.constant, result)
            )
        else:
            rule = operator.derivative
            if rule is None or by_keyword:
                return decompose(op, args, kwargs)
            if self.has_outside:
                for tracer in filter(self.owns, tensors_in(args, kwargs)):
                    _base_of(tracer).needed = True
            result = rule.instead(*args, **kwargs) if rule.instead is not None else None
            if result is None:
                result = self.apply(rule, below, values, self.unwrap(kwargs) if kwargs else kwargs, inputs)
        return self.note_views(op, args, kwargs, result) if operator.facts.is_view else result

    def inputs(self, args: tuple[Any, ...]) -> list[tuple[Position, Any]]:
        """The tracers of this level with a derivative among an operator's arguments, each with its
        position.
        """
        return self.inputs_and_values(args)[0]

    def inputs_and_values(self, args: tuple[Any, ...]) -> tuple[list[tuple[Position, Any]], tuple[Any, ...]]:
        """(the tracers of this level with a derivative, each with its position; the arguments with the values
        of this level's tracers in their place)
        """
        tracers: list[tuple[Position, Any]] = []
        values: list[Any] = []
        for position, argument in enumerate(args):
            kind = kinds[type(argument)]
            if kind == TRACER:
                if argument.level is self:
                    if argument.view_of is not None:
                        self.refresh(argument)
                    if argument.varies:
                        tracers.append((position, argument))
                    argument = argument.value
            elif kind == SEQUENCE and argument and type(argument[0]) is not int:  # most lists are sizes
                for place, item in enumerate(argument):
                    if isinstance(item, DerivativeTracer) and item.level is self:
                        self.refresh(item)
                        if item.varies:
                            tracers.append(((position, place), item))
                argument = self.unwrap(argument)
            values.append(argument)
        return tracers, tuple(values)

    def unwrap(self, tree: Any) -> Any:
        """An operator's arguments with the values of this level's tracers in their place."""
        kind = kinds[type(tree)]
        if kind == TRACER:
            if tree.level is self:
                if tree.view_of is not None:
                    self.refresh(tree)
                return tree.value
        elif kind == SEQUENCE:
            if not tree or type(tree[0]) is int:
                return tree
            items = [self.unwrap(item) for item in tree]
            return items if isinstance(tree, list) else tuple(items)
        elif isinstance(tree, dict):
            return {key: self.unwrap(item) for key, item in tree.items()}
        return tree

    # -- in-place operators and views ------------------------------------------------------------------------

    def note_views(self, op: Op, args: Any, kwargs: Any, result: Any) -> Any:
        base = args[0] if args else None
        if isinstance(base, DerivativeTracer) and base.level is self:
            for output, tracer in (
                enumerate(result) if isinstance(result, (tuple, list)) else [(None, result)]
            ):
                tracer.view_of = (base, op, args[1:], kwargs, output)
                tracer.writes_seen = base.writes
                base.has_views = True
        return result

    def refresh(self, tracer: DerivativeTracer) -> None:
        """Take a view again if its base was written to after the view was taken."""
        if tracer.view_of is None:
            return
        base, op, rest, kwargs, output = tracer.view_of
        self.refresh(base)
        if tracer.writes_seen == base.writes:
            return
        with torch.set_grad_enabled(
            tracer.varies or torch.is_grad_enabled()
        ):  # the view keeps its derivative at all levels
            again = op(base, *rest, **kwargs)
        tracer.become(again if output is None else again[output])
        tracer.writes_seen = base.writes
        tracer.writes += 1

    def in_place(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for tracer in filter(self.owns, args):
            self.refresh(tracer)
        return super().in_place(op, args, kwargs)

    def overwrite(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        target = args[0]
        if self.has_outside and (base := _base_of(target)).from_outside:
            self._write_from_outside(base, op, args, kwargs)
            return
        new = out_of_place(op, args, kwargs)
        self._write(target, new if new.dtype == target.dtype else new.to(target.dtype))

    def reshape(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        target = args[0]
        self._refuse_if_read(target)
        if not self.is_on() and target.varies:
            refuse_mutation(op, "a traced tensor under no_grad")
        super().reshape(op, args, kwargs)

    def _refuse_if_read(self, target: Any) -> None:
        if target.read_by is not None:
            raise TransformError(
                f"an in-place operator writes into a value that {target.read_by} reads{diagnostics.where()}",
                hint="write into a clone, or pass the value as an argument",
            )

    def _write(self, target: Any, new: Any) -> None:
        self._refuse_if_read(target)
        if not torch.is_grad_enabled():
            new = target.rewritten(new)
        if target.view_of is not None:
            base, op, rest, kwargs, output = target.view_of
            written = write_through(op, base, new, rest, kwargs, output)
            if written is None:
                refuse_mutation(op, f"a view made by {op}")
            self._write(base, written)
            target.writes_seen = base.writes
        target.become(new)
        target.writes += 1


def _require_view(x: torch.Tensor, shape: Sequence[int]) -> None:
    """Raises PyTorch's error where a tensor with the strides of `x` has no view of this shape."""
    with without_modes():
        torch.empty_strided(x.shape, x.stride(), device="meta").view(shape)


def _base_of(tracer: Any) -> Any:
    while tracer.view_of is not None:
        tracer = tracer.view_of[0]
    return tracer


def _refuse_write_outside(op: Op) -> None:
    refuse_mutation(op, "a tensor from outside the transformed function")


class Reads(Protocol):
    """An object that notes the values of a level that a function reads (see checkpoint.py)."""

    follows: bool  # whether derivatives are followed while the function runs

    def note(self, tensors: Iterable[Any]) -> None:
        """Called with the tensors among an operator's arguments."""
