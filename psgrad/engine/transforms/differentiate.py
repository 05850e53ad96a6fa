"""grad, grad_and_value and vjp, with the arguments, results and semantics of their namesakes in torch.func."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from psgrad.engine.transforms.reverse import GradLevel, GradTracer, Node, pull_back
from psgrad.errors import TransformError

Argnums = int | tuple[int, ...]


def grad(func: Callable[..., Any], argnums: Argnums = 0, has_aux: bool = False) -> Callable[..., Any]:
    """The gradient of a function that returns one number.

    Args:
        func: returns a tensor of shape () (with `has_aux`, a pair of it and anything).
        argnums: the positional argument(s) to differentiate; each a pytree of floating-point tensors.
        has_aux: whether `func` returns something besides its value; it comes back beside the gradient.

    Returns a function of the same arguments that gives the gradient, shaped like the argument (a tuple of such for a tuple of
    argnums), with `has_aux` the pair (gradient, aux). Arguments that the value does not depend on have zero gradient.

    Recording is switched off by `torch.no_grad()` inside `func` and not by one outside of it, as in torch.func.
    """

    def gradient(*args: Any, **kwargs: Any) -> Any:
        result, value = grad_and_value(func, argnums, has_aux)(*args, **kwargs)
        return (result, value[1]) if has_aux else result

    return gradient


def grad_and_value(func: Callable[..., Any], argnums: Argnums = 0, has_aux: bool = False) -> Callable[..., Any]:
    """As `grad`, but returns (gradient, value), with `has_aux` (gradient, (value, aux))."""

    def gradient_and_value(*args: Any, **kwargs: Any) -> Any:
        positions = _positions(argnums, len(args))
        level = GradLevel()
        with level.body(grad_mode=True):
            traced, leaves, specs = _trace_arguments(level, args, positions)
            out = func(*traced, **tree_map(lambda x: _constant(level, x), kwargs))
            out, aux = _split_aux(out, has_aux)
            _check_value(out)
            seeds = [(out, torch.ones((), dtype=out.dtype, device=out.device))] if level.owns(out) else []
            level.refresh(out) if level.owns(out) else None
            nodes = [leaf.node for leaf in leaves]
            value = _lower(level, out)
            aux = tree_map(lambda x: _lower(level, x), aux)
        starting = [leaf.value for leaf in leaves]
        cotangents = pull_back(_snapshot(seeds), [n for n in nodes if n is not None], keep=False)
        gradients = [_zeros_like(x) if g is None else g for g, x in zip(cotangents, starting, strict=True)]
        trees, used = [], 0
        for spec in specs:
            trees.append(tree_unflatten(gradients[used : used + spec.num_leaves], spec))
            used += spec.num_leaves
        result = trees[0] if isinstance(argnums, int) else tuple(trees)
        return (result, (value, aux)) if has_aux else (result, value)

    return gradient_and_value


def vjp(func: Callable[..., Any], *primals: Any, has_aux: bool = False) -> Any:
    """The value of `func(*primals)` and the function that pulls cotangents of that value back to the primals.

    Returns (value, vjp_fn), with `has_aux` (value, vjp_fn, aux). `vjp_fn(cotangents)` takes a pytree shaped like the value and
    returns a tuple, one entry a primal; it may be called any number of times, under any other transform.
    """
    level = GradLevel()
    with level.body(grad_mode=True):
        traced, leaves, specs = _trace_arguments(level, primals, tuple(range(len(primals))))
        nodes = [leaf.node for leaf in leaves]
        starting = [leaf.value for leaf in leaves]
        out, aux = _split_aux(func(*traced), has_aux)
        flat, out_spec = tree_flatten(out)
        for item in flat:
            if not isinstance(item, torch.Tensor):
                raise TransformError(
                    f"vjp(f, *primals): f returned a {type(item).__name__}", expected="tensors, in any pytree", next_step="return tensors only"
                )
        seeds = []
        for item in flat:
            if level.owns(item):
                level.refresh(item)
            seeds.append((item.node, item.output) if level.owns(item) else (None, 0))
        values = [_lower(level, item) for item in flat]
        aux = tree_map(lambda x: _lower(level, x), aux)

    def vjp_fn(cotangents: Any, retain_graph: bool = True, create_graph: bool | None = None) -> Any:
        given, spec = tree_flatten(cotangents)
        if spec != out_spec:
            raise TransformError(f"Expected pytree structure of cotangents to be the same as pytree structure of outputs: {spec} != {out_spec}")
        for cotangent, value in zip(given, values, strict=True):
            if cotangent.shape != value.shape:
                raise TransformError(
                    f"a cotangent of shape {tuple(cotangent.shape)} for an output of shape {tuple(value.shape)}",
                    expected="cotangents shaped like the outputs",
                )
        stand_ins = [_Seed(node, output) for node, output in seeds]
        found = pull_back(list(zip(stand_ins, given, strict=True)), [n for n in nodes if n is not None], keep=True)  # type: ignore[arg-type]
        gradients = [_zeros_like(x) if g is None else g for g, x in zip(found, starting, strict=True)]
        trees, used = [], 0
        for spec_ in specs:
            trees.append(tree_unflatten(gradients[used : used + spec_.num_leaves], spec_))
            used += spec_.num_leaves
        return tuple(trees)

    value = tree_unflatten(values, out_spec)
    return (value, vjp_fn, aux) if has_aux else (value, vjp_fn)


class _Seed:
    """Where a cotangent enters the record: a node and the number of its result."""

    def __init__(self, node: Node | None, output: int) -> None:
        self.node, self.output = node, output


def _snapshot(seeds: list[Any]) -> list[Any]:
    return [(_Seed(tracer.node, tracer.output), cotangent) for tracer, cotangent in seeds]


def _positions(argnums: Argnums, count: int) -> tuple[int, ...]:
    if not isinstance(argnums, (int, tuple)) or isinstance(argnums, bool):
        raise TransformError(f"argnums must be int or Tuple[int, ...], but is {argnums!r}")
    wanted = (argnums,) if isinstance(argnums, int) else argnums
    if not wanted:
        raise TransformError("argnums must be non-empty")
    for position in wanted:
        if not isinstance(position, int):
            raise TransformError(f"argnums must be int or Tuple[int, ...], but is {argnums!r}")
        if not -count <= position < count:
            raise TransformError(f"Got argnum={position}, but only {count} positional inputs")
    wrapped = tuple(position % count for position in wanted)
    if len(set(wrapped)) != len(wrapped):
        raise TransformError(f"argnums elements must be unique, got {argnums}")
    return wrapped


def _trace_arguments(level: GradLevel, args: tuple[Any, ...], positions: tuple[int, ...]) -> tuple[list[Any], list[GradTracer], list[Any]]:
    """The arguments as tracers: leaves at `positions`, in their order, constants elsewhere."""
    leaves: dict[int, list[GradTracer]] = {}
    specs: dict[int, Any] = {}
    traced: list[Any] = []
    for position, argument in enumerate(args):
        if position not in positions:
            traced.append(tree_map(lambda x: _constant(level, x), argument))
            continue
        flat, specs[position] = tree_flatten(argument)
        for item in flat:
            if not isinstance(item, torch.Tensor):
                raise TransformError(f"Thing passed to transform API must be Tensor, got {type(item)} in argument {position}")
            if not (item.dtype.is_floating_point or item.dtype.is_complex):
                raise TransformError(
                    f"argument {position} holds a tensor of dtype {item.dtype}: only Tensors of floating point dtype can require gradients",
                    next_step="leave integer arguments out of argnums",
                )
        leaves[position] = [level.leaf(_detached(item)) for item in flat]
        traced.append(tree_unflatten(leaves[position], specs[position]))
    return traced, [leaf for position in positions for leaf in leaves[position]], [specs[position] for position in positions]


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _constant(level: GradLevel, value: Any) -> Any:
    return level.constant(value) if isinstance(value, torch.Tensor) else value


def _lower(level: GradLevel, value: Any) -> Any:
    if level.owns(value):
        level.refresh(value)
        return value.value
    return value


def _split_aux(out: Any, has_aux: bool) -> tuple[Any, Any]:
    if not has_aux:
        return out, None
    if not (isinstance(out, tuple) and len(out) == 2):
        raise TransformError(
            f"has_aux=True, but the function returned {type(out).__name__}",
            expected="output of function to be a tuple of (value, aux)",
        )
    return out


def _check_value(out: Any) -> None:
    if not isinstance(out, torch.Tensor):
        raise TransformError(
            f"the function to differentiate returned {type(out).__name__}",
            expected="a Tensor (a single number)",
            next_step="return a tensor of shape (); return other results as aux, with has_aux=True",
        )
    if out.dim() != 0:
        raise TransformError(
            f"the function to differentiate returned a tensor of shape {tuple(out.shape)}",
            expected="a scalar tensor, of shape ()",
            cause="the loss was not reduced to one number (reduction='none'), or kept an axis of length 1",
            next_step="reduce with .sum() or .mean(), or call .squeeze(); for a vector's derivatives use vjp",
        )
    if not out.dtype.is_floating_point:
        raise TransformError(
            f"the function to differentiate returned a tensor of dtype {out.dtype}", expected="a real floating-point number"
        )


def _zeros_like(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
