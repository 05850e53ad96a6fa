"""Reverse mode: a level that records each operator with the VJP rules of its inputs (see tape.py)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from psgrad.engine.transforms.derivatives import DerivativeLevel, DerivativeTracer, Position, make_tracer
from psgrad.engine.transforms.fresh_tensors import is_shared
from psgrad.engine.transforms.interpreter import dispatch
from psgrad.engine.transforms.operators import Op, facts
from psgrad.engine.transforms.private_torch import set_grad_enabled
from psgrad.engine.transforms.rules.registry import DerivativeRule, JointVJP
from psgrad.engine.transforms.tape import Closure, Edge, Node, SavedValues
from psgrad.engine.transforms.tracer import rewritten, tensors_in, top_level


class GradTracer(DerivativeTracer):
    """A value that is recorded (`node` set) or constant (`node` None) at a reverse-mode level."""

    __slots__ = ("node", "output")

    level: GradLevel
    node: Node | None
    output: int

    @property
    def varies(self) -> bool:
        return self.node is not None

    def become(self, other: GradTracer) -> None:
        self.value, self.node, self.output = other.value, other.node, other.output

    def rewritten(self, new: Any) -> Any:
        return (
            traced(rewritten(self.value, new.value), self.level, self.node, self.output)
            if self.level.owns(new)
            else new
        )


def traced(value: torch.Tensor, level: GradLevel, node: Node | None = None, output: int = 0) -> GradTracer:
    tracer = make_tracer(GradTracer, value, level)
    tracer.node, tracer.output = node, output
    return tracer


class GradLevel(DerivativeLevel):
    """Reverse-mode differentiation with respect to the tracers made by `leaf`."""

    def __init__(self, saved: SavedValues | None = None, of_shared: Callable[..., Any] | None = None) -> None:
        """saved: given for a tape that is used after the function has ended. Its values may have changed.
        of_shared: as for `pull_back`.
        """
        super().__init__()
        self.saved, self.of_shared = saved, of_shared
        # If the caller has switched recording off, nothing is recorded below either.
        self.callers_grad_mode = torch.is_grad_enabled()

    def leaf(self, value: torch.Tensor) -> GradTracer:
        return traced(value, self, Node())

    def constant(self, value: torch.Tensor) -> GradTracer:
        return traced(value, self)

    def is_on(self) -> bool:
        return torch.is_grad_enabled()

    def lower(self, op: Op, values: Any, kwargs: Any) -> Any:
        if self.callers_grad_mode or not torch.is_grad_enabled():
            return dispatch(top_level(values, kwargs), op, values, kwargs, self)
        with torch.set_grad_enabled(False):
            return super().lower(op, values, kwargs)

    def lower_untraced(self, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.saved is not None and facts(op).is_view:
            self.saved.follow(args[:1])
        return super().lower_untraced(op, args, kwargs)

    def apply(
        self, rule: DerivativeRule, op: Op, args: Any, kwargs: Any, inputs: list[tuple[Position, Any]]
    ) -> Any:
        result = self.lower(op, args, kwargs)
        if self.saved is not None:
            linear = (0,) if facts(op).is_view else rule.linear
            self._keep(
                self.saved,
                linear,
                {p if isinstance(p, int) else p[0] for p, _ in inputs},
                result,
                args,
                kwargs,
            )
        node = self._record(rule, inputs, result, args, kwargs)
        if isinstance(result, torch.Tensor):
            return self._traced(result, node, 0)
        if not isinstance(result, (tuple, list)):
            return result
        tracers = [
            self._traced(item, node, output) if isinstance(item, torch.Tensor) else item
            for output, item in enumerate(result)
        ]
        return tracers if isinstance(result, list) else tuple(tracers)

    def _traced(self, result: torch.Tensor, node: Node | None, output: int) -> GradTracer:
        if node is not None:
            dtype = result.dtype
            if not (dtype.is_floating_point or dtype.is_complex):
                node = None
        return traced(result, self, node, output if node is not None else 0)

    def _record(
        self,
        rule: DerivativeRule,
        inputs: Sequence[tuple[Position, Any]],
        result: Any,
        values: Any,
        kwargs: Any,
    ) -> Node | None:
        node = Node(len(result) if isinstance(result, (tuple, list)) else None)
        grad_mode = torch.is_grad_enabled()
        if grad_mode != self.callers_grad_mode:
            set_grad_enabled(self.callers_grad_mode)
        try:
            joint = rule.vjp if isinstance(rule.vjp, JointVJP) else None
            if joint is not None:
                node.joint = joint.make(result, *values, **kwargs)
            for position, tracer in inputs:
                if not (tracer.dtype.is_floating_point or tracer.dtype.is_complex):
                    continue
                closure = None
                if joint is None:
                    closure = rule.closure(position, result, values, kwargs)
                    if closure is None:
                        continue  # the derivative with respect to this argument is zero
                node.edges.append(Edge(tracer, position, closure, shared=is_shared(tracer.value)))
        finally:
            if grad_mode != self.callers_grad_mode:
                set_grad_enabled(grad_mode)
        return node if node.edges else None

    def _keep(
        self,
        saved: SavedValues,
        linear: tuple[int, ...],
        varying: set[int],
        result: Any,
        values: Any,
        kwargs: Any,
    ) -> None:
        """Note the values that the VJP needs. The VJP of a linear operator needs neither its result nor the
        argument in which it is linear.
        """
        if not varying <= set(linear):
            saved.need(
                tensors_in((*values, *(result if isinstance(result, (tuple, list)) else [result])), kwargs)
            )
        elif len(varying) > 1:
            saved.need(tensors_in(values, kwargs))
        else:
            saved.need(tensors_in([value for i, value in enumerate(values) if i not in varying], kwargs))
            saved.follow(tensors_in([value for i, value in enumerate(values) if i in varying], {}))

    def add_call(
        self, outs: list[Any], pull: Closure, inputs: Sequence[tuple[Position, Any]], constant: frozenset[int]
    ) -> list[Any]:
        """The results of a call with its own rule, recorded. `pull` maps the list of the results' cotangents
        to those of the inputs, by position.
        """
        node = Node(len(outs))
        node.joint = lambda arrived, positions: pull(arrived)
        node.edges = [Edge(tracer, position) for position, tracer in inputs]
        return [
            (
                self._traced(x, None if i in constant or not node.edges else node, i)
                if isinstance(x, torch.Tensor)
                else x
            )
            for i, x in enumerate(outs)
        ]
