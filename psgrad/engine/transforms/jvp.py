"""jvp and linearize, with the arguments, results and semantics of torch.func."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from psgrad.engine.transforms.forward import ForwardLevel, ForwardTracer
from psgrad.engine.transforms.grad import lower, split_aux, vjp
from psgrad.engine.transforms.private_torch import tree_flatten, tree_map, tree_unflatten
from psgrad.engine.transforms.tracer import is_differentiable
from psgrad.errors import TransformArgumentError, TransformError


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
                f"jvp(f, primals, tangents): {name} hold {what}",
                expected="floating-point tensors, in any pytree",
                next_step="close over the others: jvp(lambda x: f(x, other), (x,), (t,))",
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
            f" {primal.dtype}",
            expected="tangents of the primals' shapes, complex for complex primals",
        )
    return tangent.to(primal.dtype)


def _value_and_tangent(
    level: ForwardLevel, item: Any, strict: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if not isinstance(item, torch.Tensor):
        raise TransformError(
            f"jvp(f, primals, tangents): f returned a {type(item).__name__}",
            expected="tensors, in any pytree",
            next_step="return other results as aux, with has_aux=True",
        )
    value = lower(level, item)
    tangent = item.tangent if isinstance(item, ForwardTracer) and item.level is level else None
    if tangent is None and strict:
        raise TransformError(
            "jvp(f, primals, tangents, strict=True): an output of f does not depend on the primals",
            next_step="leave out strict=True to get a zero tangent for it",
        )
    return value, tangent
