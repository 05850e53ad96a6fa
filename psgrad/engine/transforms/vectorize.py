"""vmap, with the arguments, results and semantics of torch.func's."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from psgrad.engine.transforms.batching import RANDOMNESS, BatchLevel
from psgrad.errors import TransformError

InDims = int | None | tuple[Any, ...]


def vmap(
    func: Callable[..., Any],
    in_dims: Any = 0,
    out_dims: Any = 0,
    randomness: str = "error",
    *,
    chunk_size: int | None = None,
) -> Callable[..., Any]:
    """`func` over an axis of its arguments that it does not see.

    Args:
        func: a function of tensors (pytrees of them); it is called once, with one axis less.
        in_dims: which axis of each positional argument is mapped: an int, None (not mapped), or a tuple with one entry an
            argument, each an int, None, or a structure that is a prefix of the argument's. Keyword arguments are never mapped.
        out_dims: where the axis stands in each output; None for an output that does not depend on mapped arguments.
        randomness: 'error', 'same' (one draw for all) or 'different' (a draw for each, as a batched program would draw).
        chunk_size: at most so many at a time; the outputs are joined.
    """
    if randomness not in RANDOMNESS:
        raise TransformError(f"Only allowed values for randomness are 'error', 'different', or 'same'. Got {randomness}")
    if chunk_size is not None and (not isinstance(chunk_size, int) or chunk_size <= 0):
        raise TransformError(f"vmap: chunk_size should be None or greater than 0. (got {chunk_size})")
    name = getattr(func, "__name__", repr(func))

    def mapped(*args: Any, **kwargs: Any) -> Any:
        flat, spec = tree_flatten(args)
        dims = flat_in_dims(in_dims, args, flat, spec, name)
        size = mapped_size(flat, dims, name)
        if chunk_size is None or size <= chunk_size:
            return _run(func, flat, spec, dims, size, out_dims, randomness, kwargs, name)
        parts = []
        state = torch.get_rng_state()
        for start in range(0, size, chunk_size):
            count = min(chunk_size, size - start)
            if randomness == "same":
                torch.set_rng_state(state)
            piece = [x if d is None else x.narrow(d, start, count) for x, d in zip(flat, dims, strict=True)]
            parts.append(_run(func, piece, spec, dims, count, out_dims, randomness, kwargs, name))
        return _join(parts, out_dims, name)

    return functools.wraps(func)(mapped) if hasattr(func, "__name__") else mapped


def _run(
    func: Callable[..., Any],
    flat: list[Any],
    spec: Any,
    dims: list[int | None],
    size: int,
    out_dims: Any,
    randomness: str,
    kwargs: Any,
    name: str,
) -> Any:
    level = BatchLevel(size, randomness)
    in_front = [x.movedim(d, 0) if d else x for x, d in zip(flat, dims, strict=True)]
    with level.body():
        traced = [x if d is None else level.lift(x) for x, d in zip(in_front, dims, strict=True)]
        out = func(*tree_unflatten(traced, spec), **kwargs)
    flat_out, out_spec = tree_flatten(out)
    places = _broadcast_prefix(out_dims, out, out_spec, name)
    physical = [_leave(level, x, d, name) for x, d in zip(flat_out, places, strict=True)]
    return tree_unflatten(physical, out_spec)


def _leave(level: BatchLevel, value: Any, dim: int | None, name: str) -> Any:
    value = level.content(value)
    if dim is None:
        if level.owns(value):
            raise TransformError(f"vmap({name}, ...): `{name}` can not return a BatchedTensor when out_dim is None")
        return value
    if not isinstance(value, torch.Tensor):
        raise TransformError(
            f"vmap({name}, ...): `{name}` must only return Tensors, got type {type(value)}. "
            "Did you mean to set out_dims= to None for output?"
        )
    rank = value.dim() + 1
    if not -rank <= dim < rank:
        raise TransformError(f"vmap({name}, ...): out_dims={dim} is out of range for an output with {rank} axes")
    physical = level.batch.physical(value)
    return physical.movedim(0, dim) if dim else physical


def _join(parts: list[Any], out_dims: Any, name: str) -> Any:
    flats = [tree_flatten(part)[0] for part in parts]
    spec = tree_flatten(parts[0])[1]
    places = _broadcast_prefix(out_dims, parts[0], spec, name)
    joined = [items[0] if d is None else torch.cat(items, d) for items, d in zip(zip(*flats, strict=True), places, strict=True)]
    return tree_unflatten(joined, spec)


def flat_in_dims(in_dims: Any, args: tuple[Any, ...], flat: list[Any], spec: Any, name: str) -> list[int | None]:
    if not isinstance(in_dims, (int, tuple)) or isinstance(in_dims, bool):
        raise TransformError(
            f"vmap({name}, in_dims={in_dims}, ...)(<inputs>): expected `in_dims` to be int or a (potentially nested) tuple "
            f"matching the structure of inputs, got: {type(in_dims)}."
        )
    if not args:
        raise TransformError(
            f"vmap({name})(<inputs>): got no inputs. Maybe you forgot to add inputs, or you are trying to vmap over a function "
            "with no inputs. The latter is unsupported."
        )
    dims = _prefix_leaves(in_dims, args)
    if dims is None:
        raise TransformError(
            f"vmap({name}, in_dims={in_dims}, ...)(<inputs>): in_dims is not compatible with the structure of inputs. "
            f"in_dims has structure {tree_flatten(in_dims)[1]} but inputs has structure {spec}."
        )
    wrapped: list[int | None] = []
    for x, d in zip(flat, dims, strict=True):
        if d is None:
            wrapped.append(None)
            continue
        if not isinstance(d, int):
            raise TransformError(
                f"vmap({name}, in_dims={in_dims}, ...)(<inputs>): Got in_dim={d} for an input but in_dim must be either "
                "an integer dimension or None."
            )
        if not isinstance(x, torch.Tensor):
            raise TransformError(
                f"vmap({name}, in_dims={in_dims}, ...)(<inputs>): Got in_dim={d} for an input but the input is of type {type(x)}. "
                "We cannot vmap over non-Tensor arguments, please use None as the respective in_dim"
            )
        if not -x.dim() <= d < x.dim():
            raise TransformError(
                f"vmap({name}, in_dims={in_dims}, ...)(<inputs>): Got in_dim={d} for some input, but that input is a Tensor of "
                f"dimensionality {x.dim()} so expected in_dim to satisfy -{x.dim()} <= in_dim < {x.dim()}."
            )
        wrapped.append(d % x.dim())
    return wrapped


def mapped_size(flat: list[Any], dims: list[int | None], name: str) -> int:
    sizes = [x.shape[d] for x, d in zip(flat, dims, strict=True) if d is not None]
    if not sizes:
        raise TransformError(f"vmap({name}, ...): Expected at least one Tensor to vmap over.")
    if len(set(sizes)) > 1:
        raise TransformError(
            f"vmap({name}, ...): Expected all tensors to have the same size in the mapped dimension, "
            f"got sizes {sizes} for the mapped dimension"
        )
    return int(sizes[0])


def _prefix_leaves(prefix: Any, tree: Any) -> list[Any] | None:
    """The leaves of `prefix`, repeated for the leaves of `tree` that each stands over; None where the two do not fit."""
    if prefix is None or isinstance(prefix, int):
        return [prefix] * len(tree_flatten(tree)[0])
    if isinstance(prefix, (tuple, list)):
        if not isinstance(tree, (tuple, list)) or len(prefix) != len(tree):
            return None
        pairs = list(zip(prefix, tree, strict=True))
    elif isinstance(prefix, dict):
        if not isinstance(tree, dict) or set(prefix) != set(tree):
            return None
        pairs = [(prefix[key], tree[key]) for key in tree]
    else:
        return [prefix]
    leaves: list[Any] = []
    for part, sub in pairs:
        found = _prefix_leaves(part, sub)
        if found is None:
            return None
        leaves += found
    return leaves


def _broadcast_prefix(out_dims: Any, out: Any, spec: Any, name: str) -> list[Any]:
    if isinstance(out, torch.Tensor) and isinstance(out_dims, tuple) and len(out_dims) == 1:
        out_dims = out_dims[0]
    if isinstance(out_dims, list):
        out_dims = tuple(out_dims)
    dims = _prefix_leaves(out_dims, out)
    if dims is None or len(dims) != spec.num_leaves:
        raise TransformError(
            f"vmap({name}, ..., out_dims={out_dims})(<inputs>): out_dims is not compatible with the structure of outputs. "
            f"out_dims has structure {tree_flatten(out_dims)[1]} but outputs has structure {spec}."
        )
    return dims
