"""jacrev, jacfwd and hessian, with the arguments, results and semantics of torch.func."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch

from psgrad.engine.transforms.forward import jvp
from psgrad.engine.transforms.grad import Argnums, positions_of, split_aux, vjp
from psgrad.engine.transforms.private_torch import tree_flatten, tree_unflatten
from psgrad.engine.transforms.vmap import vmap
from psgrad.errors import TransformArgumentError


def jacrev(
    func: Callable[..., Any],
    argnums: Argnums = 0,
    *,
    has_aux: bool = False,
    chunk_size: int | None = None,
    _preallocate_and_copy: bool = False,
) -> Callable[..., Any]:
    """The Jacobian of `func` by reverse mode: one backward pass for all elements of the output at once.

    Args:
        func: returns a pytree of real tensors (with `has_aux`, a pair of it and anything).
        argnums: the positional argument(s) to differentiate; each a pytree of real floating-point tensors.
        chunk_size: the largest number of elements of the output at a time.

    Returns a function of the same arguments. Its result has the structure of the output. Each tensor there is
    replaced by the structure of the argument (a tuple of structures for a tuple of argnums), with tensors of
    shape [*output, *argument]. With `has_aux` the function returns the pair (Jacobian, aux).
    """
    if chunk_size is not None and (
        not isinstance(chunk_size, int) or isinstance(chunk_size, bool) or chunk_size <= 0
    ):
        raise TransformArgumentError(f"jacrev: `chunk_size` should be greater than 0. (got {chunk_size})")

    @functools.wraps(func)
    def jacobian(*args: Any, **kwargs: Any) -> Any:
        function, primals = _of_positions(func, argnums, args, kwargs)
        value, vjp_fn, aux = vjp(lambda *xs: split_aux(function(*xs), has_aux), *primals, has_aux=True)
        outputs, out_spec = _real_leaves(value, "jacrev", "output")
        inputs, in_spec = _real_leaves(primals, "jacrev", "input")

        def rows(*basis: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return tuple(tree_flatten(vjp_fn(tree_unflatten(list(basis), out_spec)))[0])

        blocks = _over_basis(rows, outputs, chunk_size)  # one an input: [elements of all outputs, *input]
        trees = []
        for number, y in enumerate(outputs):
            start = sum(other.numel() for other in outputs[:number])
            parts = [
                block.narrow(0, start, y.numel()).reshape((*y.shape, *x.shape))
                for block, x in zip(blocks, inputs, strict=True)
            ]
            trees.append(_tree_of(parts, in_spec, argnums))
        result = tree_unflatten(trees, out_spec)
        return (result, aux) if has_aux else result

    return jacobian


def jacfwd(
    func: Callable[..., Any],
    argnums: Argnums = 0,
    has_aux: bool = False,
    *,
    randomness: str = "error",
    chunk_size: int | None = None,
) -> Callable[..., Any]:
    """The Jacobian of `func` by forward mode: one forward pass for all elements of the arguments at once.

    The arguments are those of `jacrev`, which is cheaper if the output has fewer elements than the arguments.
    `randomness` is vmap's; `chunk_size` is the largest number of elements of the arguments at a time.
    """

    @functools.wraps(func)
    def jacobian(*args: Any, **kwargs: Any) -> Any:
        function, primals = _of_positions(func, argnums, args, kwargs)
        inputs, in_spec = _real_leaves(primals, "jacfwd", "input")
        seen: dict[str, Any] = {}

        def column(*basis: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], Any]:
            along = tree_unflatten(list(basis), in_spec)
            value, tangent, aux = jvp(
                lambda *xs: split_aux(function(*xs), has_aux), primals, along, has_aux=True
            )
            outputs, seen["spec"] = _real_leaves(value, "jacfwd", "output")
            seen["shapes"] = [y.shape for y in outputs]
            leaves, seen["aux"] = tree_flatten(aux)
            seen["tensor"] = [isinstance(leaf, torch.Tensor) for leaf in leaves]
            seen["other"] = [leaf for leaf in leaves if not isinstance(leaf, torch.Tensor)]
            return tuple(tree_flatten(tangent)[0]), tuple(
                leaf for leaf in leaves if isinstance(leaf, torch.Tensor)
            )

        blocks, aux_tensors = _over_basis(
            column, inputs, chunk_size, out_dims=(-1, None), randomness=randomness
        )
        trees = []
        for block, shape in zip(blocks, seen["shapes"], strict=True):  # [*output, elements of all inputs]
            parts, start = [], 0
            for x in inputs:
                parts.append(block.narrow(-1, start, x.numel()).reshape((*shape, *x.shape)))
                start += x.numel()
            trees.append(_tree_of(parts, in_spec, argnums))
        result = tree_unflatten(trees, seen["spec"])
        if not has_aux:
            return result
        tensors, others = iter(aux_tensors), iter(seen["other"])
        return result, tree_unflatten(
            [next(tensors) if is_tensor else next(others) for is_tensor in seen["tensor"]], seen["aux"]
        )

    return jacobian


def hessian(func: Callable[..., Any], argnums: Argnums = 0) -> Callable[..., Any]:
    """The matrix of second derivatives of a real function: jacfwd of jacrev, with the structure of a
    Jacobian's Jacobian.
    """
    return jacfwd(jacrev(func, argnums), argnums)


def _of_positions(
    func: Callable[..., Any], argnums: Argnums, args: tuple[Any, ...], kwargs: Any
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """`func` as a function of the differentiated arguments only, and these arguments."""
    positions = positions_of(argnums, len(args))

    def function(*chosen: Any) -> Any:
        full = list(args)
        for position, argument in zip(positions, chosen, strict=True):
            full[position] = argument
        return func(*full, **kwargs)

    return function, tuple(args[position] for position in positions)


def _tree_of(parts: list[torch.Tensor], spec: Any, argnums: Argnums) -> Any:
    tree = tree_unflatten(parts, spec)
    return tree[0] if isinstance(argnums, int) else tree


def _real_leaves(tree: Any, name: str, what: str) -> tuple[list[torch.Tensor], Any]:
    flat, spec = tree_flatten(tree)
    for item in flat:
        if not isinstance(item, torch.Tensor):
            raise TransformArgumentError(
                f"{name}: Expected all {what}s to be Tensors, got {what} of type {type(item).__name__}"
            )
        if not item.dtype.is_floating_point:
            raise TransformArgumentError(
                f"{name}: an {what} of dtype {item.dtype}; expected real floating-point {what}s",
                hint="use torch.view_as_real on complex values, or vjp and jvp, which take them",
            )
    if not flat:
        raise TransformArgumentError(f"{name}: Expected at least one {what} that is a Tensor")
    return flat, spec


def _over_basis(
    function: Callable[..., Any], tensors: list[torch.Tensor], chunk_size: int | None, **options: Any
) -> Any:
    """`function`, mapped over the unit vectors of all `tensors` taken together."""
    ends = list(itertools.accumulate(x.numel() for x in tensors))

    def of_unit(place: torch.Tensor) -> Any:
        units = [
            (torch.arange(end - x.numel(), end, device=x.device) == place.to(x.device))
            .to(x.dtype)
            .reshape(x.shape)
            for x, end in zip(tensors, ends, strict=True)
        ]
        return function(*units)

    places = torch.arange(ends[-1], device=tensors[0].device)
    return vmap(of_unit, chunk_size=chunk_size, **options)(places)
