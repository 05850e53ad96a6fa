"""Forward mode: a level whose tracers carry a tangent beside their value.

The tangent of an operator's result comes from its JVP if the table has one: elementwise operators have a
diagonal Jacobian, linear operators are applied to the tangent. For other operators the JVP is the transpose
of the VJP. The closure from cotangents to cotangents is linear, so its VJP, taken at any point, maps tangents
to tangents (https://j-towns.github.io/2017/06/12/A-new-trick.html).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from psgrad.engine.transforms.derivatives import DerivativeLevel, DerivativeTracer, Position, make_tracer
from psgrad.engine.transforms.interpreter import cast
from psgrad.engine.transforms.levels import Level
from psgrad.engine.transforms.operators import Op, aten
from psgrad.engine.transforms.reverse import GradLevel
from psgrad.engine.transforms.rules.registry import DerivativeRule, JointVJP
from psgrad.engine.transforms.tape import pull_back
from psgrad.engine.transforms.tracer import is_differentiable, note_autograd, rewritten


class ForwardTracer(DerivativeTracer):
    """A value and its tangent, of the same shape and dtype; None stands for a zero tangent."""

    __slots__ = ("tangent",)

    level: ForwardLevel
    tangent: torch.Tensor | None

    @property
    def varies(self) -> bool:
        return self.tangent is not None

    def become(self, other: ForwardTracer) -> None:
        self.value, self.tangent = other.value, other.tangent

    def rewritten(self, new: Any) -> Any:
        """As Tracer.rewritten. Forward mode ignores no_grad, so the tangent is the new one. It is also
        written at the levels below.
        """
        if not self.level.owns(new):
            return new
        tangent = new.tangent
        if self.tangent is not None:
            tangent = rewritten(self.tangent, torch.zeros_like(self.tangent) if tangent is None else tangent)
        return traced(rewritten(self.value, new.value), self.level, tangent)


def traced(value: torch.Tensor, level: ForwardLevel, tangent: torch.Tensor | None = None) -> ForwardTracer:
    tracer = make_tracer(ForwardTracer, value, level)
    tracer.tangent = tangent
    return tracer


class ForwardLevel(DerivativeLevel):
    """Forward-mode differentiation along the tangents of its tracers."""

    def dual(self, value: torch.Tensor, tangent: torch.Tensor | None) -> ForwardTracer:
        if tangent is not None:
            note_autograd(tangent)
        return traced(value, self, tangent)

    def constant(self, value: torch.Tensor) -> ForwardTracer:
        return traced(value, self)

    def is_on(self) -> bool:
        return True  # no_grad concerns reverse mode only

    def apply(
        self, rule: DerivativeRule, op: Op, args: Any, kwargs: Any, inputs: list[tuple[Position, Any]]
    ) -> Any:
        result = self.lower(op, args, kwargs)
        inputs = [(position, x) for position, x in inputs if x.dtype.is_floating_point or x.dtype.is_complex]
        if not isinstance(result, (tuple, list)):
            return self._place(result, self._tangents([result], rule, op, result, args, kwargs, inputs)[0])
        tangents = self._tangents(result, rule, op, result, args, kwargs, inputs)
        tracers = [
            self._place(item, tangent) if isinstance(item, torch.Tensor) else item
            for item, tangent in zip(result, tangents, strict=True)
        ]
        return tracers if isinstance(result, list) else tuple(tracers)

    def _place(self, result: torch.Tensor, tangent: torch.Tensor | None) -> ForwardTracer:
        """The tracer of a result, with its tangent in the result's dtype. An operator of several dtypes may
        have promoted the tangent. An integer gets no tangent: a linear operator such as a cast would compute
        a wrong one.
        """
        if not (result.dtype.is_floating_point or result.dtype.is_complex):
            tangent = None
        if tangent is not None and tangent.dtype != result.dtype:
            tangent = cast(tangent, result.dtype)
        return traced(result, self, tangent)

    def _tangents(
        self, results: Any, rule: DerivativeRule, op: Op, out: Any, args: Any, kwargs: Any, inputs: Any
    ) -> list[Any]:
        """The tangents of an operator's results: the sum of each input's contribution."""
        total: list[Any] = [None] * len(results)
        rest: dict[Position, torch.Tensor] = {}
        # argument -> item of it (None: the argument itself) -> tangent
        linear: dict[int, dict[int | None, torch.Tensor]] = {}
        for position, tracer in inputs:
            argument, item = (position, None) if isinstance(position, int) else position
            if argument in rule.linear:
                linear.setdefault(argument, {})[item] = tracer.tangent
                continue
            make = rule.jvp.get(argument) if item is None else None
            push = make(out, *args, **kwargs) if make is not None else None
            if push is None:
                rest[position] = tracer.tangent
            else:
                _accumulate(total, push(tracer.tangent))
        for argument, tangents in linear.items():
            _accumulate(total, op(*_with_tangents(args, argument, tangents), **kwargs))
        if rest:
            _accumulate(total, transposed_vjp(rule, out, args, kwargs, rest))
        return total


def _accumulate(total: list[Any], contribution: Any) -> None:
    for place, tangent in enumerate(
        contribution if isinstance(contribution, (tuple, list)) else [contribution]
    ):
        if tangent is not None:
            total[place] = tangent if total[place] is None else aten.add.Tensor(total[place], tangent)


def _with_tangents(
    args: tuple[Any, ...], argument: int, tangents: dict[int | None, torch.Tensor]
) -> tuple[Any, ...]:
    """An operator's arguments, one of them replaced by its tangent (zeros for the items of a list that have
    none).
    """
    given = args[argument]
    if isinstance(given, torch.Tensor):
        replaced: Any = tangents[None]
    else:
        replaced = [tangents[i] if i in tangents else torch.zeros_like(item) for i, item in enumerate(given)]
    return (*args[:argument], replaced, *args[argument + 1 :])


def transposed_vjp(
    rule: DerivativeRule, out: Any, args: Any, kwargs: Any, tangents: dict[Position, torch.Tensor]
) -> Any:
    """The tangent(s) of an operator's result(s), as the transpose of its VJP."""
    several = isinstance(out, (tuple, list))

    def backwards(leaves: list[Any]) -> list[torch.Tensor | None]:
        arrived = leaves if several else leaves[0]
        if isinstance(rule.vjp, JointVJP):
            found = rule.vjp.make(out, *args, **kwargs)(arrived, list(tangents))
            return [x() if callable(x) else x for x in map(found.get, tangents)]
        closures = [rule.closure(position, out, args, kwargs) for position in tangents]
        return [closure(arrived) if closure is not None else None for closure in closures]

    pushed = transpose(backwards, list(out) if several else [out], list(tangents.values()))
    return pushed if several else pushed[0]


def transpose(
    linear: Callable[[list[Any]], list[torch.Tensor | None]],
    inputs: list[Any],
    cotangents: list[torch.Tensor],
    above: Level | None = None,
    at: float = 0.0,
) -> list[Any]:
    """The transpose of a linear function of tensors shaped like `inputs`, applied to `cotangents`. None
    stands for zero.

    `linear` receives None for inputs without a derivative (integers, non-tensors). It may use active levels;
    it runs above the level `above`. It is transposed at tensors filled with the number `at`; for a linear
    function the result does not depend on it.
    """
    level = GradLevel()
    with level.active(above), torch.set_grad_enabled(True):
        leaves = [
            (
                level.leaf(torch.full(x.shape, at, dtype=x.dtype, device=x.device))
                if is_differentiable(x)
                else None
            )
            for x in inputs
        ]
        nodes = [leaf.node if leaf is not None else None for leaf in leaves]
        results = linear(list(leaves))
        seeds = [
            (result, t)
            for result, t in zip(results, cotangents, strict=True)
            if result is not None and level.owns(result)
        ]
    return pull_back(seeds, nodes, keep=False)
