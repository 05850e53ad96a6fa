"""vmap, with the arguments, results and semantics of torch.func."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from psgrad import random_state
from psgrad.engine.transforms.batching import RANDOMNESS, BatchLevel
from psgrad.engine.transforms.derivatives import DerivativeLevel
from psgrad.engine.transforms.levels import Divergence, WriteCounts
from psgrad.engine.transforms.private_torch import broadcast_to_and_flatten, tree_flatten
from psgrad.engine.transforms.state import state
from psgrad.engine.transforms.trees import Structure, flatten, unflatten
from psgrad.errors import TransformArgumentError, TransformError


def vmap(
    func: Callable[..., Any],
    in_dims: Any = 0,
    out_dims: Any = 0,
    randomness: str = "error",
    *,
    chunk_size: int | None = None,
) -> Callable[..., Any]:
    """`func`, mapped over one axis of its arguments.

    Args:
        func: a function of tensors, or of pytrees of tensors; it is called once, on tensors without the axis.
        in_dims: the mapped axis of each positional argument: an int, None (not mapped), or a tuple with one
            entry for each argument, which is an int, None, or a prefix of the argument's structure. Keyword
            arguments are never mapped.
        out_dims: the position of the axis in each output; None for an output that does not depend on mapped
            arguments.
        randomness: 'error', 'same' (one draw for all samples) or 'different' (a draw for each sample, as in a
            batched program).
        chunk_size: the largest number of samples at a time; the outputs are joined.

    If `func` branches on a truth value or a whole number (`if`, `.item()`) and samples disagree, it runs once
    for the samples of each outcome. The outputs are joined in the samples' order.
    """
    if randomness not in RANDOMNESS:
        raise TransformArgumentError(
            f"Only allowed values for randomness are 'error', 'different', or 'same'. Got {randomness}"
        )
    if chunk_size is not None and (
        not isinstance(chunk_size, int) or isinstance(chunk_size, bool) or chunk_size <= 0
    ):
        raise TransformArgumentError(f"vmap: chunk_size should be None or greater than 0. (got {chunk_size})")
    name = getattr(func, "__name__", repr(func))

    def mapped(*args: Any, **kwargs: Any) -> Any:
        flat, structure = flatten(args)
        dims = flat_in_dims(in_dims, args, flat, name)
        size = mapped_size(flat, dims, name)
        job = _MappedCall(func, structure, dims, out_dims, randomness, kwargs, name)
        if chunk_size is None or size <= chunk_size:
            return job.run(flat, size)
        bounds = [(start, min(chunk_size, size - start)) for start in range(0, size, chunk_size)]
        return job.run_parts(
            [
                [x if d is None else x.narrow(d, *bound) for x, d in zip(flat, dims, strict=True)]
                for bound in bounds
            ]
        )

    return functools.wraps(func)(mapped)


@dataclass(frozen=True)
class _MappedCall:
    """One call of a mapped function, on all samples or on some."""

    func: Callable[..., Any]
    structure: Structure
    dims: list[int | None]
    out_dims: Any
    randomness: str
    kwargs: dict[str, Any]
    name: str

    def run(self, flat: list[Any], size: int) -> Any:
        level, watch = BatchLevel(size, self.randomness), WriteCounts(flat)
        in_front = [x.movedim(d, 0) if d else x for x, d in zip(flat, self.dims, strict=True)]
        before = random_state.states() if self.randomness == "same" else None
        try:
            with level.body():
                traced = [
                    x if d is None else level.lift(_known_below(x))
                    for x, d in zip(in_front, self.dims, strict=True)
                ]
                out = self.func(*unflatten(traced, self.structure), **self.kwargs)
                flat_out, structure = flatten(out)
                # inside the level, because a view of a written value is taken again here
                flat_out = [level.content(x) for x in flat_out]
        except Divergence as divergence:
            if divergence.level is not level:
                raise
            if before is not None:
                random_state.restore(before)
            return self._run_groups(flat, divergence, watch)
        places = _broadcast_prefix(self.out_dims, out, len(flat_out), self.name)
        physical = [_leave(level, x, d, self.name) for x, d in zip(flat_out, places, strict=True)]
        return unflatten(physical, structure)

    def run_parts(self, parts: list[list[Any]], order: torch.Tensor | None = None) -> Any:
        """The outputs of all parts, computed one after the other and joined; then in another order, if
        given.
        """
        outputs, before = [], random_state.states() if self.randomness == "same" else None
        for part in parts:
            if before is not None:
                random_state.restore(before)
            outputs.append(
                self.run(
                    part, next(x.shape[d] for x, d in zip(part, self.dims, strict=True) if d is not None)
                )
            )
        return self._joined(outputs, order)

    def _run_groups(self, flat: list[Any], divergence: Divergence, watch: WriteCounts) -> Any:
        if watch.was_written():
            raise TransformError(
                f"vmap({self.name}, ...): samples disagree on a branch{divergence.where}, after an argument"
                " was written to in place",
                hint="write into a clone of the argument",
            )
        device = next(x.device for x, d in zip(flat, self.dims, strict=True) if d is not None)
        groups = divergence.groups(device)
        parts = [
            [x if d is None else x.index_select(d, group) for x, d in zip(flat, self.dims, strict=True)]
            for group in groups
        ]
        return self.run_parts(parts, torch.cat(groups).argsort())

    def _joined(self, parts: list[Any], order: torch.Tensor | None) -> Any:
        flats, structures = zip(*[flatten(part) for part in parts], strict=True)
        if any(structure != structures[0] for structure in structures):
            raise TransformError(
                f"vmap({self.name}, ...): `{self.name}` returns results of several structures",
                hint="samples take different branches, and the branches return different things",
            )
        places = _broadcast_prefix(self.out_dims, parts[0], len(flats[0]), self.name)
        joined = [
            self._one_of(items) if d is None else self._cat(items, d, order)
            for items, d in zip(zip(*flats, strict=True), places, strict=True)
        ]
        return unflatten(joined, structures[0])

    def _cat(self, items: tuple[torch.Tensor, ...], dim: int, order: torch.Tensor | None) -> torch.Tensor:
        dim = dim % items[0].dim()
        shapes = [(*item.shape[:dim], *item.shape[dim + 1 :]) for item in items]
        if any(shape != shapes[0] for shape in shapes):
            raise TransformError(
                f"vmap({self.name}, ...): `{self.name}` returns tensors of shapes"
                f" {sorted(set(map(tuple, shapes)))}; expected one shape for all samples",
                hint="samples take different branches, or a length depends on the data",
            )
        return torch.cat(items, dim) if order is None else torch.cat(items, dim).index_select(dim, order)

    def _one_of(self, items: tuple[Any, ...]) -> Any:
        same = all(
            torch.equal(x, items[0]) if isinstance(x, torch.Tensor) else x == items[0] for x in items[1:]
        )
        if not same:
            raise TransformError(
                f"vmap({self.name}, ...): `{self.name}` returns different values for different samples where"
                " out_dims is None",
                hint="set the position of the sample axis in out_dims for that output",
            )
        return items[0]


def _known_below(x: Any) -> Any:
    """An argument of a vmap inside derivatives, as their tracer: derivatives may need the values that the
    function computes from it before it writes to them.
    """
    for level in state.stack:
        if isinstance(level, DerivativeLevel):
            x = level.adopt_from_outside(x)
    return x


def _leave(level: BatchLevel, value: Any, dim: int | None, name: str) -> Any:
    if dim is None:
        if level.owns(value):
            raise TransformArgumentError(
                f"vmap({name}, ...): `{name}` can not return a BatchedTensor when out_dim is None"
            )
        return value
    if not isinstance(value, torch.Tensor):
        raise TransformArgumentError(
            f"vmap({name}, ...): `{name}` must only return Tensors, got type {type(value)}. "
            "Did you mean to set out_dims= to None for output?"
        )
    rank = value.dim() + 1
    if isinstance(dim, bool) or not isinstance(dim, int) or not -rank <= dim < rank:
        raise TransformArgumentError(
            f"vmap({name}, ...): out_dims={dim!r} is out of range for an output with {rank} axes"
        )
    physical = level.batch.physical(value)
    return physical.movedim(0, dim) if dim else physical


def flat_in_dims(in_dims: Any, args: tuple[Any, ...], flat: list[Any], name: str) -> list[int | None]:
    """The mapped axis of each leaf of the arguments, as a non-negative number; None if it is not mapped."""
    what = f"vmap({name}, in_dims={in_dims}, ...)(<inputs>)"
    if not args:
        raise TransformArgumentError(f"{what}: got no inputs")
    known = isinstance(in_dims, (int, tuple)) and not isinstance(in_dims, bool)
    dims = _prefix_leaves(in_dims, args) if known else None
    if dims is None:
        raise TransformArgumentError(
            f"{what}: in_dims is not compatible with the structure of inputs, {tree_flatten(args)[1]};"
            " expected `in_dims` to be int or a (potentially nested) tuple matching it"
        )
    for x, d in zip(flat, dims, strict=True):
        is_axis = isinstance(d, int) and isinstance(x, torch.Tensor) and -x.dim() <= d < x.dim()
        if d is not None and not is_axis:
            given = f"a tensor of {x.dim()} axes" if isinstance(x, torch.Tensor) else f"type {type(x)}"
            raise TransformArgumentError(
                f"{what}: Got in_dim={d} for an input of {given}; expected an axis of a tensor, or None"
            )
    return [None if d is None else d % x.dim() for x, d in zip(flat, dims, strict=True)]


def mapped_size(flat: list[Any], dims: list[int | None], name: str) -> int:
    sizes = [x.shape[d] for x, d in zip(flat, dims, strict=True) if d is not None]
    if not sizes:
        raise TransformArgumentError(f"vmap({name}, ...): Expected at least one Tensor to vmap over.")
    if len(set(sizes)) > 1:
        raise TransformArgumentError(
            f"vmap({name}, ...): Expected all tensors to have the same size in the mapped dimension, "
            f"got sizes {sizes} for the mapped dimension"
        )
    return int(sizes[0])


def _prefix_leaves(prefix: Any, tree: Any) -> list[Any] | None:
    """The leaves of `prefix`, each repeated for the leaves of `tree` below it; None if the two do not fit."""
    if prefix is None or isinstance(prefix, int):
        return [prefix] * (1 if isinstance(tree, torch.Tensor) else len(flatten(tree)[0]))
    if isinstance(prefix, (tuple, list)):
        if not isinstance(tree, (tuple, list)) or len(prefix) != len(tree):
            return None
        pairs = list(zip(prefix, tree, strict=True))
    elif isinstance(prefix, dict):
        if not isinstance(tree, dict) or set(prefix) != set(tree):
            return None
        pairs = [(prefix[key], tree[key]) for key in tree]
    elif tree_flatten(prefix)[1].num_nodes == 1:
        return [prefix]
    else:
        return broadcast_to_and_flatten(prefix, tree_flatten(tree)[1])  # a pytree that a user registered
    leaves: list[Any] = []
    for part, sub in pairs:
        inner = _prefix_leaves(part, sub)
        if inner is None:
            return None
        leaves += inner
    return leaves


def _broadcast_prefix(out_dims: Any, out: Any, count: int, name: str) -> list[Any]:
    if isinstance(out, torch.Tensor) and isinstance(out_dims, tuple) and len(out_dims) == 1:
        out_dims = out_dims[0]
    if isinstance(out_dims, list):
        out_dims = tuple(out_dims)
    dims = [out_dims] * count if isinstance(out_dims, int) else _prefix_leaves(out_dims, out)
    if dims is None or len(dims) != count:
        raise TransformArgumentError(
            f"vmap({name}, ..., out_dims={out_dims})(<inputs>): out_dims is not compatible with the structure"
            f" of outputs. out_dims has structure {tree_flatten(out_dims)[1]} but outputs has structure"
            f" {tree_flatten(out)[1]}."
        )
    return dims
