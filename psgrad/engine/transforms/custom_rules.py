"""custom_vjp, custom_jvp and custom_vmap: functions with a rule from the user, as in JAX.

The rules are ordinary programs. They can be differentiated and mapped too, so the functions work in any
nesting. A function and its rule may close over mapped values, but not over values that are differentiated,
because the rule has no derivative for them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch

from psgrad.engine.transforms import diagnostics
from psgrad.engine.transforms.batching import BatchLevel
from psgrad.engine.transforms.calls import (
    Cotangents,
    Flat,
    Mapped,
    dispatch_call,
    kind_of,
    lowered,
    pair_of,
    without_adoption,
)
from psgrad.engine.transforms.checkpoint import RecomputedCall
from psgrad.engine.transforms.private_torch import tree_flatten, tree_unflatten
from psgrad.engine.transforms.refused_writes import read_only
from psgrad.engine.transforms.tracer import is_differentiable
from psgrad.engine.transforms.user_rules import UserRuleCall, wrong_cotangent
from psgrad.errors import TransformError


class _Custom:
    """A function with the attributes of the one that it wraps, and its name in error messages."""

    def __init__(self, function: Callable[..., Any], kind: str, setter: str) -> None:
        for name in functools.WRAPPER_ASSIGNMENTS:
            if hasattr(function, name):
                setattr(self, name, getattr(function, name))
        self.function = function
        self.title = f"{kind} {getattr(function, '__name__', function)!s}"
        self.setter = setter

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def positional(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """All arguments by position."""
        if not kwargs:
            return args
        bound = inspect.signature(self.function).bind(*args, **kwargs)
        bound.apply_defaults()
        if bound.kwargs:
            raise TransformError(
                f"{self.title} takes {sorted(bound.kwargs)} by keyword only{diagnostics.where()}; expected"
                " arguments that have a position, because the rule gets them by position",
            )
        return bound.args

    def missing(self) -> TransformError:
        return TransformError(
            f"{self.title} has no rule{diagnostics.where()}",
            hint=f"give it one: {self.function.__name__}.{self.setter}(...)",
        )

    def flat_tensors(self, tree: Any, what: str = "returned") -> tuple[Flat, Any]:
        flat, spec = tree_flatten(tree)
        for item in flat:
            if not isinstance(item, torch.Tensor):
                raise TransformError(
                    f"{self.title} {what} a {kind_of(item)}{diagnostics.where()}; expected tensors, in any"
                    " pytree",
                    hint="return tensors only; compute fixed numbers outside of the function",
                )
        return flat, spec


class _Differentiated(_Custom):
    """The common part of custom_vjp and custom_jvp: arguments without a derivative, which are passed to the
    rule separately.
    """

    def __init__(
        self, function: Callable[..., Any], kind: str, setter: str, nondiff_argnums: Sequence[int]
    ) -> None:
        super().__init__(function, kind, setter)
        self.nondiff_argnums = tuple(nondiff_argnums)

    def split(self, args: tuple[Any, ...]) -> tuple[list[Any], tuple[Any, ...]]:
        """The arguments without a derivative, and the others."""
        for position in self.nondiff_argnums:
            if not -len(args) <= position < len(args):
                raise TransformError(
                    f"{self.title}: nondiff_argnums={self.nondiff_argnums}, but only {len(args)} positional"
                    " arguments"
                )
        apart = sorted(position % len(args) for position in self.nondiff_argnums)
        return [args[i] for i in apart], tuple(x for i, x in enumerate(args) if i not in apart)

    def joined(self, apart: list[Any], others: Sequence[Any]) -> tuple[Any, ...]:
        whole, total = list(others), len(apart) + len(others)
        for position, x in zip(sorted(p % total for p in self.nondiff_argnums), apart, strict=True):
            whole.insert(position, x)
        return tuple(whole)


class custom_vjp(_Differentiated):
    """A function whose reverse mode is a rule from the user.

        @custom_vjp
        def f(x, y): ...

        f.defvjp(fwd, bwd)

    `fwd(x, y)` returns the pair (f(x, y), residuals), with any pytree of residuals. `bwd(residuals,
    cotangents)` gets cotangents shaped like the result, and returns a tuple with one cotangent for each
    argument: a tree like the argument, or None for zero. The cotangent of an unused result is zeros. Forward
    mode is the transpose of `bwd`, which must be linear in the cotangents.

    nondiff_argnums: arguments without a derivative, of any type; they are the first arguments of `bwd`:
    `bwd(x, residuals, cotangents)`.
    """

    def __init__(self, function: Callable[..., Any], nondiff_argnums: Sequence[int] = ()) -> None:
        super().__init__(function, "custom_vjp", "defvjp(fwd, bwd)", nondiff_argnums)
        self.fwd: Callable[..., Any] | None = None
        self.bwd: Callable[..., Any] | None = None

    def defvjp(self, fwd: Callable[..., Any], bwd: Callable[..., Any]) -> None:
        self.fwd, self.bwd = fwd, bwd

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.fwd is None or self.bwd is None:
            raise self.missing()
        fwd, bwd = self.fwd, self.bwd
        apart, others = self.split(self.positional(args, kwargs))
        flat, spec = tree_flatten(others)
        trees = [
            ([getattr(leaf, "shape", None) for leaf in leaves], tree)
            for leaves, tree in map(tree_flatten, others)
        ]
        out_spec: Any = None

        def function(values: Flat) -> Flat:
            nonlocal out_spec
            results, out_spec = self.flat_tensors(
                self.function(*self.joined(apart, tree_unflatten(values, spec)))
            )
            return results

        def prepare(values: Flat, outs: Flat | None, needed: list[int]) -> tuple[Flat, Any, frozenset[int]]:
            nonlocal out_spec
            result, residuals = pair_of(
                fwd(*self.joined(apart, tree_unflatten(values, spec))),
                f"the forward rule of {self.title}",
                "the function's result, and the residuals for the backward rule",
            )
            results, out_spec = self.flat_tensors(result)
            return results, (residuals, results, out_spec), frozenset()

        def backward(context: Any, cotangents: Cotangents) -> Cotangents:
            residuals, results, spec_of_results = context
            given = [
                torch.zeros_like(x) if g is None else g for g, x in zip(cotangents, results, strict=True)
            ]
            return self._flat_cotangents(
                bwd(*apart, residuals, tree_unflatten(given, spec_of_results)), trees
            )

        return tree_unflatten(
            dispatch_call(UserRuleCall(self.title, function, prepare, backward), flat), out_spec
        )

    def _flat_cotangents(self, given: Any, trees: list[tuple[list[torch.Size | None], Any]]) -> Cotangents:
        """The rule's cotangents, one for each leaf of the arguments."""
        if not isinstance(given, (tuple, list)) or len(given) != len(trees):
            what = f"{len(given)} cotangents" if isinstance(given, (tuple, list)) else f"a {kind_of(given)}"
            raise TransformError(
                f"the backward rule of {self.title} returned {what} for {len(trees)} arguments; expected a"
                " tuple with one cotangent for each argument, None for zero",
            )
        cotangents: Cotangents = []
        for position, (tree, (shapes, spec)) in enumerate(zip(given, trees, strict=True)):
            if tree is None:
                cotangents += [None] * len(shapes)
                continue
            flat, found_spec = tree_flatten(tree, is_leaf=lambda x: x is None)
            if found_spec != spec:
                raise TransformError(
                    f"the backward rule of {self.title} returned {found_spec} for argument {position},"
                    f" which is {spec}; expected a cotangent of the argument's structure, None for zero",
                )
            for g, shape in zip(flat, shapes, strict=True):
                if shape is not None and g is not None and getattr(g, "shape", None) != shape:
                    raise wrong_cotangent(self.title, g, position, shape)
            cotangents += flat
        return cotangents


class custom_jvp(_Differentiated):
    """A function whose forward mode is a rule from the user; reverse mode is its transpose.

        @custom_jvp
        def f(x, y): ...

        f.defjvp(jvp)

    `jvp((x, y), (tangent of x, tangent of y))` returns the pair (f(x, y), tangent of the result), which must
    be linear in the tangents. An argument without a tangent gets zeros, or None if it is not a floating-point
    tensor.

    nondiff_argnums: arguments without a derivative, of any type; they are the first arguments of `jvp`.
    """

    def __init__(self, function: Callable[..., Any], nondiff_argnums: Sequence[int] = ()) -> None:
        super().__init__(function, "custom_jvp", "defjvp(jvp)", nondiff_argnums)
        self.jvp: Callable[..., Any] | None = None

    def defjvp(self, jvp: Callable[..., Any]) -> None:
        self.jvp = jvp

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.jvp is None:
            raise self.missing()
        jvp = self.jvp
        apart, others = self.split(self.positional(args, kwargs))
        flat, spec = tree_flatten(others)
        out_spec: Any = None

        def function(values: Flat) -> Flat:
            nonlocal out_spec
            results, out_spec = self.flat_tensors(
                self.function(*self.joined(apart, tree_unflatten(values, spec)))
            )
            return results

        def forward(values: Flat, outs: Flat | None, tangents: Flat) -> tuple[Flat, Flat]:
            nonlocal out_spec
            along = [
                torch.zeros_like(x) if t is None and is_differentiable(x) else t
                for t, x in zip(tangents, values, strict=True)
            ]
            result, tangent = pair_of(
                jvp(*apart, tree_unflatten(values, spec), tree_unflatten(along, spec)),
                f"the rule of {self.title}",
                "the function's result, and its tangent",
            )
            results, out_spec = self.flat_tensors(result)
            pushed, pushed_spec = tree_flatten(tangent)
            if pushed_spec != out_spec or any(
                not isinstance(t, torch.Tensor) or t.shape != x.shape
                for t, x in zip(pushed, results, strict=True)
            ):
                raise TransformError(
                    f"the rule of {self.title} returned a tangent {pushed_spec} of shapes"
                    f" {[getattr(t, 'shape', None) for t in pushed]} for a result {out_spec} of shapes"
                    f" {[x.shape for x in results]}; expected a tangent shaped like the result",
                )
            return results, pushed

        return tree_unflatten(
            dispatch_call(UserRuleCall(self.title, function, forward=forward), flat), out_spec
        )


class custom_vmap(_Custom):
    """A function with a rule from the user for many samples at once.

        @custom_vmap
        def f(x, y): ...

        @f.def_vmap
        def rule(axis_size, in_batched, x, y): ...

    `in_batched` is a list of trees of bools like the arguments: whether a leaf has the sample axis in front.
    The rule returns the pair (result, tree of bools like the result: whether a leaf has the sample axis in
    front).

    Derivatives are those of `f`, whose operators are mapped one by one. The rule must compute the same values
    and need not be differentiable.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function, "custom_vmap", "def_vmap(rule)")
        self.rule: Callable[..., Any] | None = None

    def def_vmap(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        self.rule = rule
        return rule

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.rule is None:
            raise self.missing()
        flat, spec = tree_flatten(self.positional(args, kwargs))
        call = _MappedByRule(self, spec)
        outs = dispatch_call(call, flat)
        return tree_unflatten(outs, call.out_spec)


class _MappedByRule(RecomputedCall):
    """A call of a custom_vmap function."""

    batches = True

    def __init__(self, custom: _Custom, spec: Any) -> None:
        super().__init__(custom.title, self._function)
        self.custom, self.spec = custom, spec
        self.out_spec: Any = None

    def _function(self, values: Flat) -> Flat:
        results, self.out_spec = self.custom.flat_tensors(
            self.custom.function(*tree_unflatten(values, self.spec))
        )
        return results

    def batch(self, level: BatchLevel, args: Flat) -> Flat:
        args = [level.content(x) for x in args]
        mapped = Mapped(level, [level.owns(x) for x in args])
        if not any(mapped.args):
            return lowered(dispatch_call(self, args, below=level), level.index, self.name)

        def by_rule(values: Flat) -> Flat:
            with without_adoption(level), read_only(values):
                return self._by_rule(level.size, mapped.args, values)

        call = RecomputedCall(self.name, self._through(mapped, self._function), by_rule)
        outs = dispatch_call(call, [level.batch.raw(x) for x in args], below=level)
        return [level.lift(x) for x in lowered(outs, level.index, self.name)]

    def _by_rule(self, size: int, in_batched: list[bool], values: Flat) -> Flat:
        assert isinstance(self.custom, custom_vmap)
        assert self.custom.rule is not None
        result, flags = pair_of(
            self.custom.rule(
                size, list(tree_unflatten(in_batched, self.spec)), *tree_unflatten(values, self.spec)
            ),
            f"the rule of {self.name}",
            "the result, and which of its leaves have the sample axis in front",
        )
        results, self.out_spec = self.custom.flat_tensors(result)
        out_batched, flags_spec = tree_flatten(flags)
        if flags_spec != self.out_spec:
            raise TransformError(
                f"the rule of {self.name} returned a result {self.out_spec} with flags {flags_spec}"
            )
        for x, batched in zip(results, out_batched, strict=True):
            if batched and (not x.dim() or x.shape[0] != size):
                raise TransformError(
                    f"the rule of {self.name} returned a batched result of shape {tuple(x.shape)};"
                    f" expected the sample axis, of size {size}, in front",
                )
        return [
            x if batched else x.unsqueeze(0).expand(size, *x.shape)
            for x, batched in zip(results, out_batched, strict=True)
        ]
