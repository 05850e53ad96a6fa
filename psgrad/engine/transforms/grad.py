"""grad, grad_and_value and vjp, with the arguments, results and semantics of torch.func."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from psgrad.engine.transforms import diagnostics
from psgrad.engine.transforms.derivatives import DerivativeLevel
from psgrad.engine.transforms.interpreter import rules_only
from psgrad.engine.transforms.private_torch import tree_flatten, tree_unflatten
from psgrad.engine.transforms.reverse import GradLevel, GradTracer
from psgrad.engine.transforms.state import state
from psgrad.engine.transforms.tape import SavedValues, TapePosition, pull_back
from psgrad.engine.transforms.tracer import Tracer, is_differentiable
from psgrad.engine.transforms.trees import Structure, flatten, map_leaves, unflatten
from psgrad.errors import TransformArgumentError, TransformError

Argnums = int | tuple[int, ...]


def grad(func: Callable[..., Any], argnums: Argnums = 0, has_aux: bool = False) -> Callable[..., Any]:
    """The gradient of a function that returns one number.

    Args:
        func: returns a tensor of shape () (with `has_aux`, a pair of it and anything).
        argnums: the positional argument(s) to differentiate; each a pytree of floating-point tensors.
        has_aux: whether `func` returns something besides its value.

    Returns a function of the same arguments that returns the gradient, shaped like the argument (a tuple of
    gradients for a tuple of argnums), with `has_aux` the pair (gradient, aux). The gradient is zero for
    arguments on which the value does not depend.

    `torch.no_grad()` inside `func` switches recording off; outside of it, it does not, as in torch.func.
    """

    both = grad_and_value(func, argnums, has_aux)

    @functools.wraps(func)
    def gradient(*args: Any, **kwargs: Any) -> Any:
        result, value = both(*args, **kwargs)
        return (result, value[1]) if has_aux else result

    return gradient


def grad_and_value(
    func: Callable[..., Any], argnums: Argnums = 0, has_aux: bool = False
) -> Callable[..., Any]:
    """As `grad`, but returns (gradient, value), with `has_aux` (gradient, (value, aux))."""

    @functools.wraps(func)
    def gradient_and_value(*args: Any, **kwargs: Any) -> Any:
        positions = positions_of(argnums, len(args))
        found = cotangents_and_value(func, positions, args, kwargs, has_aux)
        for argument, new in found.written:
            argument.copy_(new)
        gradients = [_gradient(g, x) for g, x in zip(found.cotangents, found.primals, strict=True)]
        trees = _unflatten(gradients, found.structures)
        result = trees[0] if isinstance(argnums, int) else tuple(trees)
        return (result, (found.value, found.aux)) if has_aux else (result, found.value)

    return gradient_and_value


class Gradients(NamedTuple):
    """The results of one forward and one backward pass over a function."""

    cotangents: list[torch.Tensor | None]  # one for each leaf of the differentiated arguments; None is zero
    primals: list[torch.Tensor]
    structures: list[Structure]  # one for each differentiated argument
    value: Any
    aux: Any
    written: list[
        tuple[torch.Tensor, torch.Tensor]
    ]  # arguments that the function wrote to, and the new values


def cotangents_and_value(
    func: Callable[..., Any],
    positions: tuple[int, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    has_aux: bool,
    of_shared: Callable[..., Any] | None = None,
    consume: Callable[[int, torch.Tensor | None], None] | None = None,
) -> Gradients:
    """The gradient of `func` in the arguments at `positions`, before zeros are filled in; `of_shared` and
    `consume` as for `pull_back`.
    """
    level = GradLevel(of_shared=of_shared)
    with level.body(grad_mode=True):
        constants: list[tuple[torch.Tensor, GradTracer]] = []
        traced, leaves, structures = _trace_arguments(level, args, positions, constants)
        starts = [TapePosition.of(leaf) for leaf in leaves]
        primals = [leaf.value for leaf in leaves]
        by_name = map_leaves(functools.partial(_constant, level, constants), kwargs)
        out, aux = split_aux(func(*traced, **by_name), has_aux)
        _check_value(out)
        value = lower(level, out)
        end = TapePosition.of(out) if level.owns(out) else None
        aux = map_leaves(lambda x: lower(level, x), aux) if has_aux else None
        # written after the backward pass only, because the tape may need the old value
        written = [
            (x, lower(level, tracer)) for x, tracer in constants if tracer.writes and tracer.shape == x.shape
        ]
        # free the values that the tape does not need before the backward pass
        del traced, by_name, constants, leaves, out
    with rules_only():  # the function can't write to this number
        seeds = [(end, torch.ones((), dtype=value.dtype, device=value.device))] if end is not None else []
    cotangents = pull_back(
        seeds,
        [start.node for start in starts],
        keep=False,
        attached=level.attached,
        of_shared=of_shared,
        consume=consume,
    )
    return Gradients(cotangents, primals, structures, value, aux, written)


def vjp(func: Callable[..., Any], *primals: Any, has_aux: bool = False) -> Any:
    """The value of `func(*primals)` and the function from cotangents of that value to cotangents of the
    primals.

    Returns (value, vjp_fn), with `has_aux` (value, vjp_fn, aux). `vjp_fn(cotangents)` takes a pytree shaped
    like the value and returns a tuple with one entry for each primal. It may be called any number of times,
    under any other transform. Its argument `create_graph` overrides the grad mode: whether outer transforms
    and autograd may differentiate the result.
    """
    saved = SavedValues()
    level = GradLevel(saved)
    with level.body(grad_mode=True):
        traced, leaves, structures = _trace_arguments(level, primals, tuple(range(len(primals))), [])
        starts = [TapePosition.of(leaf) for leaf in leaves]
        primals_flat = [leaf.value for leaf in leaves]
        out, aux = split_aux(func(*traced), has_aux)
        flat, out_spec = tree_flatten(out)
        for item in flat:
            if not isinstance(item, torch.Tensor):
                raise TransformError(
                    f"vjp(f, *primals): f returned a {type(item).__name__}; expected tensors, in any pytree",
                    hint="return tensors only",
                )
        values = [lower(level, item) for item in flat]
        ends = [TapePosition.of(item) if level.owns(item) else TapePosition(None, 0) for item in flat]
        aux = map_leaves(lambda x: lower(level, x), aux)
        saved.follow(x for x in (*values, *tree_flatten(aux)[0]) if isinstance(x, torch.Tensor))

    def vjp_fn(cotangents: Any, retain_graph: bool = True, create_graph: bool | None = None) -> Any:
        given, spec = tree_flatten(cotangents)
        if spec != out_spec:
            raise TransformArgumentError(
                "Expected pytree structure of cotangents to be the same as pytree structure of outputs:"
                f" {spec} != {out_spec}"
            )
        for cotangent, value in zip(given, values, strict=True):
            _check_cotangent(cotangent, value)
        saved.check()
        for outer in state.stack:
            if isinstance(outer, GradLevel) and outer.saved is not None:
                outer.saved.depend_on(saved)
        with torch.set_grad_enabled(torch.is_grad_enabled() if create_graph is None else create_graph):
            pulled = pull_back(
                list(zip(ends, given, strict=True)),
                [start.node for start in starts],
                keep=True,
                attached=level.attached,
            )
        gradients = [_gradient(g, x) for g, x in zip(pulled, primals_flat, strict=True)]
        return tuple(_unflatten(gradients, structures))

    value = tree_unflatten(values, out_spec)
    return (value, vjp_fn, aux) if has_aux else (value, vjp_fn)


diagnostics.boundary(cotangents_and_value)
diagnostics.boundary(vjp)


def _unflatten(leaves: list[Any], structures: list[Structure]) -> list[Any]:
    """One tree for each structure, from all leaves in order."""
    trees, used = [], 0
    for structure in structures:
        trees.append(unflatten(leaves[used : used + structure.leaves], structure))
        used += structure.leaves
    return trees


def positions_of(argnums: Argnums, count: int) -> tuple[int, ...]:
    if not isinstance(argnums, (int, tuple)) or isinstance(argnums, bool):
        raise TransformArgumentError(f"argnums must be int or Tuple[int, ...], but is {argnums!r}")
    wanted = (argnums,) if isinstance(argnums, int) else argnums
    if not wanted:
        raise TransformArgumentError("argnums must be non-empty")
    for position in wanted:
        if not isinstance(position, int):
            raise TransformArgumentError(f"argnums must be int or Tuple[int, ...], but is {argnums!r}")
        if not -count <= position < count:
            raise TransformArgumentError(f"Got argnum={position}, but only {count} positional inputs")
    wrapped = tuple(position % count for position in wanted)
    if len(set(wrapped)) != len(wrapped):
        raise TransformArgumentError(f"argnums elements must be unique, got {argnums}")
    return wrapped


def _trace_arguments(
    level: GradLevel,
    args: tuple[Any, ...],
    positions: tuple[int, ...],
    constants: list[tuple[torch.Tensor, GradTracer]],
) -> tuple[list[Any], list[GradTracer], list[Structure]]:
    """The arguments as tracers, the leaves, and the structures: leaves at `positions`, in their order,
    constants elsewhere. Constants are also added to `constants`.
    """
    leaves: dict[int, list[GradTracer]] = {}
    structures: dict[int, Structure] = {}
    traced: list[Any] = []
    for position, argument in enumerate(args):
        if position not in positions:
            traced.append(map_leaves(functools.partial(_constant, level, constants), argument))
            continue
        flat, structures[position] = flatten(argument)
        for item in flat:
            if not isinstance(item, torch.Tensor):
                raise TransformArgumentError(
                    f"Thing passed to transform API must be Tensor, got {type(item)} in argument {position}"
                )
            if not is_differentiable(item):
                raise TransformArgumentError(
                    f"argument {position} holds a tensor of dtype {item.dtype}: only Tensors of floating"
                    " point dtype can require gradients",
                    hint="leave integer arguments out of argnums",
                )
        leaves[position] = [level.leaf(item) for item in flat]
        traced.append(unflatten(leaves[position], structures[position]))
    return (
        traced,
        [leaf for position in positions for leaf in leaves[position]],
        [structures[position] for position in positions],
    )


def _constant(level: GradLevel, constants: list[tuple[torch.Tensor, GradTracer]], value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    tracer = level.constant(value)
    constants.append((value, tracer))
    return tracer


def lower(level: DerivativeLevel, value: Any) -> Any:
    if level.owns(value):
        level.refresh(value)
        return value.value
    return value


def split_aux(out: Any, has_aux: bool) -> tuple[Any, Any]:
    if not has_aux:
        return out, None
    if not (isinstance(out, tuple) and len(out) == 2):
        raise TransformError(
            f"has_aux=True, but the function returned {type(out).__name__}; expected output of function to"
            " be a tuple of (value, aux)",
        )
    return out


def _check_value(out: Any) -> None:
    if not isinstance(out, torch.Tensor):
        raise TransformError(
            f"the function to differentiate returned {type(out).__name__}; expected a Tensor of shape ()",
            hint="return other results as aux, with has_aux=True",
        )
    if out.dim() != 0:
        raise TransformError(
            f"the function to differentiate returned a tensor of shape {tuple(out.shape)}; expected a scalar"
            " tensor, of shape ()",
            hint="reduce the loss with .sum() or .mean(); for a vector's derivatives use vjp",
        )
    if not out.dtype.is_floating_point:
        raise TransformError(
            f"the function to differentiate returned a tensor of dtype {out.dtype}; expected a real"
            " floating-point number",
        )


def _check_cotangent(cotangent: Any, value: torch.Tensor) -> None:
    if not isinstance(cotangent, torch.Tensor):
        raise TransformArgumentError(
            f"a {type(cotangent).__name__} as the cotangent of an output of shape {tuple(value.shape)};"
            " expected a tensor",
            hint="pass torch.zeros_like or torch.ones_like of the output",
        )
    if cotangent.shape != value.shape or cotangent.is_complex() != value.is_complex():
        raise TransformArgumentError(
            f"a cotangent of shape {tuple(cotangent.shape)} and dtype {cotangent.dtype} for an output of"
            f" shape {tuple(value.shape)} and dtype {value.dtype}; expected cotangents of the outputs'"
            " shapes, complex for complex outputs",
        )


def _gradient(cotangent: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    """The gradient in `x`. It is contiguous if `x` is, as in PyTorch: programs take views of it."""
    if cotangent is None:
        return torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    return (
        cotangent.with_contiguous_strides()
        if isinstance(cotangent, Tracer) and x.is_contiguous()
        else cotangent
    )
