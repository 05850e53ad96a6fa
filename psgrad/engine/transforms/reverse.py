"""Reverse mode: a level that records each operator with the VJP rules of its inputs (see record.py).

In-place operators are carried out of place: the tracer is given the new value. A tracer that is a view remembers its base and
the operator that made it; a write through a view writes the base, and a view whose base was written is taken again.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from psgrad.engine.transforms import diagnostics
from psgrad.engine.transforms.levels import Level, Tracer, in_pieces, innermost, interpret, map_tracers, strides_of
from psgrad.engine.transforms.operators import Op, aten, facts, is_random, out_of_place, refuse_mutation
from psgrad.engine.transforms.record import Edge, Node
from psgrad.engine.transforms.rules.registry import JointVJP, decompose, derivative_rule, is_composite, is_constant
from psgrad.engine.transforms.rules.views import write_through
from psgrad.errors import TransformError


class GradTracer(Tracer):
    """A value that is recorded (`node` set) or constant (`node` None) at a reverse-mode level."""

    level: GradLevel
    value: torch.Tensor
    node: Node | None
    output: int

    @staticmethod
    def __new__(cls, value: torch.Tensor, level: GradLevel, node: Node | None = None, output: int = 0) -> GradTracer:
        tracer = torch.Tensor._make_wrapper_subclass(
            cls, value.shape, strides=strides_of(value), storage_offset=0, dtype=value.dtype, device=value.device
        )
        tracer.level, tracer.value, tracer.node, tracer.output = level, value, node, output
        tracer.view_of = None
        tracer.writes = tracer.writes_seen = 0
        return tracer  # type: ignore[no-any-return]

    def __init__(self, *args: Any) -> None:
        pass

    def below(self) -> torch.Tensor:
        self.level.refresh(self)
        return self.value

    # A view: the tracer it was taken from, the operator, its arguments behind the first, and which of its results this is.
    view_of: tuple[GradTracer, Op, tuple[Any, ...], dict[str, Any], int | None] | None
    writes: int  # how often this tracer was written to
    writes_seen: int  # the base's `writes` when this view was taken


class GradLevel(Level):
    """Reverse-mode differentiation with respect to the tracers made by `leaf`."""

    adopts = True

    def __init__(self, *, outlives_body: bool = False) -> None:
        """outlives_body: whether the record is used after the function has ended, when its values may have been written to."""
        super().__init__()
        self.needed: list[tuple[weakref.ref[torch.Tensor], int]] | None = [] if outlives_body else None
        # What the caller does not want to be recorded is not recorded below either.
        self.callers_grad_mode = torch.is_grad_enabled()

    def leaf(self, value: torch.Tensor) -> GradTracer:
        return GradTracer(value, self, Node())

    def constant(self, value: torch.Tensor) -> GradTracer:
        return GradTracer(value, self)

    def owns(self, value: Any) -> bool:
        return isinstance(value, GradTracer) and value.level is self

    def check_unchanged(self) -> None:
        """Refuse to go back where a value that the record may need was written to since: PyTorch counts the writes."""
        for reference, version in self.needed or ():
            value = reference()
            if value is not None and value._version != version:
                raise TransformError(
                    f"a tensor of shape {tuple(value.shape)} that vjp's function used was changed in place before vjp_fn was called",
                    cause="an optimiser's step, or another operator that ends in an underscore",
                    next_step="call vjp_fn before the change, or give the function a clone",
                )

    def _remember(self, values: Any, kwargs: Any) -> None:
        assert self.needed is not None
        for tensor in map(innermost, _tensors(values, kwargs)):
            if isinstance(tensor, torch.Tensor) and not tensor.is_inference():
                self.needed.append((weakref.ref(tensor), tensor._version))

    # -- one operator -------------------------------------------------------------------------------------------------

    def process_untraced(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        operator = facts(op)
        if operator.mutated or operator.mutated_kwargs:
            return self._write_outside(op, args, kwargs)
        if is_composite(op) and derivative_rule(op) is None and not is_constant(op):
            return in_pieces(op, args, kwargs)
        result = self._lower(op, args, kwargs)
        # A view is still somebody else's memory; into a fresh tensor traced values may be written.
        fresh = not operator.is_view or op is aten.lift_fresh.default  # what torch.tensor(..) made
        return map_tracers(self.constant, result) if fresh else result

    def _write_outside(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """In place on a tensor from outside the function. A counter may be counted; a value may be needed for the way back."""
        counters = all(not t.dim() and not t.dtype.is_floating_point for t in _tensors(args[:1], {}))
        if op is not aten.detach_.default and (not counters or facts(op).mutated != (0,)):
            refuse_mutation(
                op,
                "a tensor from outside the transformed function",
                "operators before it may need the old value for their gradient, which would be wrong without a word",
            )
        return self._lower(op, args, kwargs)

    def process(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        operator = facts(op)
        if operator.mutated or operator.mutated_kwargs:
            return self._in_place(op, args, kwargs)
        tracked = self._tracked(args)
        kwargs_tracked = any(self.owns(v) and v.node is not None for v in kwargs.values())
        recording = (tracked or kwargs_tracked) and not is_constant(op)
        if recording:
            enabled = torch.is_grad_enabled()
            if name := diagnostics.running_autograd_function(inside=enabled):
                raise TransformError(
                    f"torch.autograd.Function {name} is used in the transformed function{diagnostics.where()}",
                    expected="operators that psgrad sees; the backward of such a Function is invisible to it",
                    cause="the gradient that passes through the Function would be another than its backward's, without a word",
                    next_step="write the computation with ordinary tensor operations (for a checkpoint: use_reentrant=False)",
                )
            recording = enabled
        if not recording:
            # Composite operators may return views or write in place: taken apart, their pieces are handled one by one.
            if is_composite(op) and derivative_rule(op) is None and not is_constant(op):
                return decompose(op, args, kwargs)
            result = self._lower(op, self._unwrap(args), self._unwrap(kwargs))
            return self._wrap_constant(op, args, kwargs, result)
        rule = derivative_rule(op)
        if rule is None or kwargs_tracked:
            return decompose(op, args, kwargs)
        custom = rule.instead(self, args, kwargs) if rule.instead is not None else None
        if custom is not None:
            return custom
        values, value_kwargs = self._unwrap(args), self._unwrap(kwargs)
        result = self._lower(op, values, value_kwargs)
        node = self._record(rule, tracked, result, values, value_kwargs)
        return self._wrap_recorded(op, args, kwargs, result, node)

    def _lower(self, op: Op, values: Any, kwargs: Any) -> Any:
        if is_random(op, values, kwargs):
            return interpret(op, values, kwargs, below=self)
        if self.callers_grad_mode or not torch.is_grad_enabled():
            return op(*values, **kwargs)
        with torch.set_grad_enabled(False):
            return op(*values, **kwargs)

    def _tracked(self, args: tuple[Any, ...]) -> list[tuple[Any, GradTracer]]:
        """The inputs that need a cotangent, each with its position."""
        found: list[tuple[Any, GradTracer]] = []
        for position, argument in enumerate(args):
            if isinstance(argument, GradTracer):
                if argument.level is self:
                    self.refresh(argument)
                    if argument.node is not None:
                        found.append((position, argument))
            elif isinstance(argument, (list, tuple)):
                for place, item in enumerate(argument):
                    if isinstance(item, GradTracer) and item.level is self:
                        self.refresh(item)
                        if item.node is not None:
                            found.append(((position, place), item))
        return found

    def _unwrap(self, tree: Any) -> Any:
        if isinstance(tree, GradTracer) and tree.level is self:
            self.refresh(tree)
            return tree.value
        if isinstance(tree, (list, tuple)):
            items = [self._unwrap(item) for item in tree]
            return items if isinstance(tree, list) else tuple(items)
        if isinstance(tree, dict):
            return {key: self._unwrap(item) for key, item in tree.items()}
        return tree

    def _record(self, rule: Any, tracked: Sequence[tuple[Any, GradTracer]], result: Any, values: Any, kwargs: Any) -> Node | None:
        node = Node(len(result) if isinstance(result, (tuple, list)) else None)
        if self.needed is not None:
            self._remember(values, kwargs)
        grad_mode = torch.is_grad_enabled()
        torch._C._set_grad_enabled(self.callers_grad_mode)
        try:
            joint = rule.vjp if isinstance(rule.vjp, JointVJP) else None
            if joint is not None:
                node.joint = joint.make(result, *values, **kwargs)
            for position, tracer in tracked:
                if not (tracer.dtype.is_floating_point or tracer.dtype.is_complex):
                    continue
                closure = None
                if joint is None:
                    make = rule.vjp.get(position if isinstance(position, int) else position[0])
                    if make is None:
                        continue  # the derivative with respect to this argument is zero
                    closure = make(result, *values, **kwargs)
                    if isinstance(position, tuple):
                        closure = closure(position[1])
                assert tracer.node is not None
                node.edges.append(Edge(tracer.node, tracer.output, position, closure, not isinstance(tracer.value, Tracer)))
        finally:
            torch._C._set_grad_enabled(grad_mode)
        return node if node.edges else None

    def _wrap_recorded(self, op: Op, args: Any, kwargs: Any, result: Any, node: Node | None) -> Any:
        is_view = facts(op).is_view
        if isinstance(result, torch.Tensor):
            if node is None or not (result.dtype.is_floating_point or result.dtype.is_complex):
                tracer = GradTracer(result, self)
            else:
                tracer = GradTracer(result, self, node)
            if is_view:
                self._remember_view(tracer, op, args, kwargs, None)
            return tracer
        if not isinstance(result, (tuple, list)):
            return result
        tracers: list[Any] = []
        for output, item in enumerate(result):
            if not isinstance(item, torch.Tensor):
                tracers.append(item)
                continue
            differentiable = node is not None and (item.dtype.is_floating_point or item.dtype.is_complex)
            tracer = GradTracer(item, self, node if differentiable else None, output)
            if is_view:
                self._remember_view(tracer, op, args, kwargs, output)
            tracers.append(tracer)
        return type(result)(tracers) if isinstance(result, list) else tuple(tracers)

    def _wrap_constant(self, op: Op, args: Any, kwargs: Any, result: Any) -> Any:
        return self._wrap_recorded(op, args, kwargs, result, None)

    # -- in-place operators and views -----------------------------------------------------------------------------------

    def _remember_view(self, tracer: GradTracer, op: Op, args: Any, kwargs: Any, output: int | None) -> None:
        base = args[0] if args else None
        if isinstance(base, GradTracer) and base.level is self:
            tracer.view_of = (base, op, args[1:], kwargs, output)
            tracer.writes_seen = base.writes

    def refresh(self, tracer: GradTracer) -> None:
        """Take a view again whose base was written to since."""
        if tracer.view_of is None:
            return
        base, op, rest, kwargs, output = tracer.view_of
        self.refresh(base)
        if tracer.writes_seen == base.writes:
            return
        again = op(base, *rest, **kwargs)
        again = again if output is None else again[output]
        tracer.value, tracer.node, tracer.output = again.value, again.node, again.output
        tracer.writes_seen = base.writes
        tracer.writes += 1

    def _in_place(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        operator = facts(op)
        if operator.mutated_kwargs or operator.mutated != (0,):
            refuse_mutation(op, "an output argument (out=) or several arguments", "psgrad carries out in-place operators out of place")
        target = args[0]
        if not self.owns(target):
            refuse_mutation(
                op,
                "a tensor that the transform does not follow",
                "the tensor was made outside the transformed function (a buffer, a cache), so what is written would be lost",
            )
        new = out_of_place(op, args, kwargs)
        if new.dtype != target.dtype:
            new = new.to(target.dtype)
        if not torch.is_grad_enabled() and target.node is not None:
            new = _with_history_of(new, target)
        self._write(target, new)
        return target

    def _write(self, target: GradTracer, new: GradTracer) -> None:
        if target.view_of is not None:
            base, op, rest, kwargs, output = target.view_of
            written = write_through(op, base, new, rest, kwargs, output)
            if written is None:
                refuse_mutation(op, f"a view made by {op}", "a write through this kind of view is not supported")
            self._write(base, written)
            target.writes_seen = base.writes
        target.value, target.node, target.output = new.value, new.node, new.output
        target.writes += 1


def _with_history_of(new: Any, old: Any) -> Any:
    """As in PyTorch: a write under no_grad changes the value, and derivatives, of each level, go by as if it had not."""
    if isinstance(new, GradTracer) and isinstance(old, GradTracer) and new.level is old.level:
        return GradTracer(_with_history_of(new.value, old.value), new.level, old.node, old.output)
    return new


def _tensors(args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    for argument in itertools.chain(args, kwargs.values()):
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, (list, tuple)):
            yield from (item for item in argument if isinstance(item, torch.Tensor))
