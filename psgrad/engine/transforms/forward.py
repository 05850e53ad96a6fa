"""Forward mode: a level whose tracers have a tangent beside their value; and jvp and linearize, with the
arguments, results and semantics of torch.func.

The tangent of an operator's result comes from its JVP if the table has one: elementwise operators have a
diagonal Jacobian, linear operators are applied to the tangent. For other operators the JVP is the transpose
of the VJP. The closure from cotangents to cotangents is linear, so its VJP, taken at any point, maps tangents
to tangents (https://j-towns.github.io/2017/06/12/A-new-trick.html).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from psgrad.engine.transforms.derivatives import DerivativeLevel, DerivativeTracer, Position, make_tracer
from psgrad.engine.transforms.grad import lower, split_aux, vjp
from psgrad.engine.transforms.interpreter import cast
from psgrad.engine.transforms.levels import Level
from psgrad.engine.transforms.operators import Op, aten
from psgrad.engine.transforms.private_torch import tree_flatten, tree_map, tree_unflatten
from psgrad.engine.transforms.reverse import GradLevel
from psgrad.engine.transforms.rules.registry import DerivativeRule, JointVJP
from psgrad.engine.transforms.tape import pull_back
from psgrad.engine.transforms.tracer import is_differentiable, note_autograd, rewritten
from psgrad.errors import TransformArgumentError, TransformError


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
            return self._traced(result, self._tangents([result], rule, op, result, args, kwargs, inputs)[0])
        tangents = self._tangents(result, rule, op, result, args, kwargs, inputs)
        tracers = [
            self._traced(item, tangent) if isinstance(item, torch.Tensor) else item
            for item, tangent in zip(result, tangents, strict=True)
        ]
        return tracers if isinstance(result, list) else tuple(tracers)

    def _traced(self, result: torch.Tensor, tangent: torch.Tensor | None) -> ForwardTracer:
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


def jvp(
    func: Callable[..., Any], primals: Any, tangents: Any, *, strict: bool = False, has_aux: bool = False
) -> Any:
    """The value of `func(*primals)` and its derivative along `tangents`: Jacobian times vector, in one
    forward pass.

    Args:
        func: a function of pytrees of floating-point tensors that returns a pytree of tensors (with
            `has_aux`, a pair of it and anything).
        primals: a tuple, the arguments.
        tangents: a tuple of the same structure, shapes and dtypes.
        strict: whether an output that does not depend on the primals is an error; otherwise its tangent is
            zero.

    Returns (value, tangent of the value), with `has_aux` (value, tangent, aux). `torch.no_grad()` inside
    `func` has no effect.
    """
    values, spec = _flat_tensors(primals, "primals")
    along, along_spec = _flat_tensors(tangents, "tangents")
    if spec != along_spec:
        raise TransformArgumentError(
            "jvp(f, primals, tangents): Expected primals and tangents to have the same python structure:"
            f" {spec} != {along_spec}"
        )
    along = [_fitting(x, t, "jvp(f, primals, tangents)") for x, t in zip(values, along, strict=True)]
    level = ForwardLevel()
    with level.body():
        traced = tree_unflatten([level.dual(x, t) for x, t in zip(values, along, strict=True)], spec)
        out, aux = split_aux(func(*traced), has_aux)
        flat, out_spec = tree_flatten(out)
        pairs = [_value_and_tangent(level, item, strict) for item in flat]
        aux = tree_map(lambda x: lower(level, x), aux)
    # After the level has ended, so that the zeros are not traced by it.
    value = tree_unflatten([value for value, _ in pairs], out_spec)
    tangent = tree_unflatten(
        [torch.zeros_like(value) if tangent is None else tangent for value, tangent in pairs], out_spec
    )
    return (value, tangent, aux) if has_aux else (value, tangent)


def linearize(func: Callable[..., Any], *primals: Any) -> tuple[Any, Callable[..., Any]]:
    """The value of `func(*primals)` and the linear function that takes tangents of the primals to the value's
    tangent.

    `func` runs once, and its derivative is recorded once: each call of the second result runs linear
    operators only. For a single tangent `jvp` is cheaper.
    """
    value, vjp_fn = vjp(func, *primals)
    leaves, out_spec = tree_flatten(value)
    smooth = [place for place, x in enumerate(leaves) if is_differentiable(x)]

    def with_zeros(tensors: Sequence[torch.Tensor]) -> Any:
        """A tree like the value: tensors where it is smooth, zeros in the place of whole numbers."""
        full = [torch.zeros_like(x) for x in leaves]
        for place, x in zip(smooth, tensors, strict=True):
            full[place] = x
        return tree_unflatten(full, out_spec)

    _, jvp_fn = vjp(
        lambda *cotangents: vjp_fn(with_zeros(cotangents)),
        *[torch.zeros_like(leaves[place]) for place in smooth],
    )
    _, spec = tree_flatten(primals)

    def linear(*tangents: Any) -> Any:
        along, along_spec = tree_flatten(tangents)
        if along_spec != spec:
            raise TransformArgumentError(
                f"linearize: Expected tangents to have the structure of the primals: {along_spec} != {spec}"
            )
        along = [_fitting(x, t, "linearize") for x, t in zip(tree_flatten(primals)[0], along, strict=True)]
        return with_zeros(jvp_fn(tree_unflatten(along, spec)))

    return value, linear


def _flat_tensors(tree: Any, name: str) -> tuple[list[torch.Tensor], Any]:
    if not isinstance(tree, tuple):
        raise TransformArgumentError(
            f"jvp(f, primals, tangents): Expected {name} to be a tuple. E.g. it should be valid to call"
            f" f(*{name})."
        )
    flat, spec = tree_flatten(tree)
    if not flat:
        raise TransformArgumentError(
            f"jvp(f, primals, tangents): Expected {name} to contain at least one Tensor"
        )
    for item in flat:
        if not is_differentiable(item):
            what = (
                f"a tensor of dtype {item.dtype}"
                if isinstance(item, torch.Tensor)
                else f"a {type(item).__name__}"
            )
            raise TransformArgumentError(
                f"jvp(f, primals, tangents): {name} hold {what}; expected floating-point tensors, in any"
                " pytree",
                hint="close over the others: jvp(lambda x: f(x, other), (x,), (t,))",
            )
    return flat, spec


def _fitting(primal: torch.Tensor, tangent: Any, name: str) -> torch.Tensor:
    """The tangent in the primal's dtype."""
    if (
        not isinstance(tangent, torch.Tensor)
        or primal.shape != tangent.shape
        or primal.is_complex() != tangent.is_complex()
    ):
        what = (
            f"shape {tuple(tangent.shape)} and dtype {tangent.dtype}"
            if isinstance(tangent, torch.Tensor)
            else repr(type(tangent))
        )
        raise TransformArgumentError(
            f"{name}: a tangent of {what} for a primal of shape {tuple(primal.shape)} and dtype"
            f" {primal.dtype}; expected tangents of the primals' shapes, complex for complex primals",
        )
    return tangent.to(primal.dtype)


def _value_and_tangent(
    level: ForwardLevel, item: Any, strict: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if not isinstance(item, torch.Tensor):
        raise TransformError(
            f"jvp(f, primals, tangents): f returned a {type(item).__name__}; expected tensors, in any pytree",
            hint="return other results as aux, with has_aux=True",
        )
    value = lower(level, item)
    tangent = item.tangent if isinstance(item, ForwardTracer) and item.level is level else None
    if tangent is None and strict:
        raise TransformError(
            "jvp(f, primals, tangents, strict=True): an output of f does not depend on the primals",
            hint="leave out strict=True to get a zero tangent for it",
        )
    return value, tangent
