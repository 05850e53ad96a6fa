"""Sums, casts, reshapes and transposes of deferred gradients, term by term, which compute nothing. They
return NotImplemented where a term has no such map.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from psgrad.engine.gradients.deferred import DeferredGradient, Placed, merged, term_of
from psgrad.engine.gradients.layout import AxisLayout
from psgrad.engine.gradients.terms import Dense
from psgrad.engine.gradients.terms import placed as placed_maps
from psgrad.engine.transforms.batch_values import Batch
from psgrad.engine.transforms.operators import Op
from psgrad.engine.transforms.rules.families import wrap_dim

DeferredArguments = list[
    DeferredGradient | None
]  # for each argument of an operator its deferred value, if it is one


def of_each(value: DeferredGradient, shape: Sequence[int], change: Callable[[Placed], Placed | None]) -> Any:
    """The gradient with each term changed; NotImplemented if a change returns None."""
    terms: list[Placed] = []
    for placed in value.terms:
        if (changed := change(placed)) is None:
            return NotImplemented
        terms.append(changed)
    return value.with_terms(terms, torch.Size(shape))


def relabelled(value: DeferredGradient, layouts: list[AxisLayout | None]) -> Any:
    if any(layout is None for layout in layouts):
        return NotImplemented
    terms = [
        Placed(placed.term, layout)
        for placed, layout in zip(value.terms, layouts, strict=True)
        if layout is not None
    ]
    return value.with_terms(terms, terms[0].layout.shape)


def reshaped(value: DeferredGradient, shape: Sequence[int]) -> Any:
    if -1 in shape:
        given = -1
        for size in shape:
            given *= size
        shape = [value.shape.numel() // given if size == -1 and given else size for size in shape]
    return relabelled(value, [placed.layout.reshape(shape) for placed in value.terms])


def permuted(value: DeferredGradient, dims: list[int]) -> Any:
    return relabelled(value, [placed.layout.permute(dims) for placed in value.terms])


def narrowed(value: DeferredGradient, dim: int, start: int, length: int) -> Any:
    if length == value.shape[dim]:
        return value
    shape = [length if d == dim else size for d, size in enumerate(value.shape)]
    return of_each(value, shape, lambda placed: placed_maps.narrowed(placed, dim, start, length))


def embedded(value: DeferredGradient, dim: int, start: int, size: int) -> Any:
    return relabelled(value, [placed.layout.embed(dim, start, size) for placed in value.terms])


def scaled(value: DeferredGradient, factor: float) -> DeferredGradient:
    """The gradient times a factor. Factors in float16 are widened first: there a product may vanish."""
    wide = [p.at(slice(None), torch.float32) if p.term.dtype == torch.float16 else p for p in value.terms]
    return value.with_terms([placed.scaled(factor) for placed in wide])


aten = torch.ops.aten


def terms_of(batch: Batch, tensor: torch.Tensor, value: DeferredGradient | None) -> tuple[Placed, ...]:
    return value.terms if value is not None else (Placed.plain(term_of(batch, tensor)),)


def _add(batch: Batch, op: Op, deferred: DeferredArguments, args: Any, kwargs: Any) -> Any:
    alpha = kwargs.get("alpha", 1)
    if (
        not all(isinstance(a, torch.Tensor) for a in args)
        or args[0].shape != args[1].shape
        or args[0].dtype != args[1].dtype
    ):
        return NotImplemented
    if op is aten.sub.Tensor:
        alpha = -alpha
    one = next(w for w in deferred if w is not None)
    first, second = (terms_of(batch, argument, value) for argument, value in zip(args, deferred, strict=True))
    terms = [*first, *(placed if alpha == 1 else placed.scaled(float(alpha)) for placed in second)]
    if all(isinstance(p.term, Dense) for p in terms):  # values need no second one beside them
        terms = merged(terms)
    return one.with_terms(terms)


SUMS: dict[Op, Any] = {
    aten.add.Tensor: _add,
    aten.sub.Tensor: _add,
}


def _same(batch: Batch, op: Op, deferred: DeferredArguments, args: Any, kwargs: Any) -> Any:
    value = deferred[0]
    return value if value is not None and kwargs.get("dtype") in (None, value.dtype) else NotImplemented


def _cast(batch: Batch, op: Op, deferred: DeferredArguments, args: Any, kwargs: Any) -> Any:
    """A cast of a weight to another precision (autocast). The precision of the factors does not change.

    So queries sum products of half-precision factors in float32, and no intermediate is rounded to half
    precision.
    """
    value, dtype = deferred[0], kwargs.get("dtype")
    if value is None or kwargs.get("device") not in (None, value.device):
        return NotImplemented
    if dtype in (None, value.dtype):
        return value
    return replace(value, dtype=dtype) if dtype.is_floating_point else NotImplemented


def _reshape(batch: Batch, op: Op, deferred: Any, args: Any, kwargs: Any) -> Any:
    return reshaped(deferred[0], args[1])


def _squeeze(batch: Batch, op: Op, deferred: Any, args: Any, kwargs: Any) -> Any:
    value = deferred[0]
    dims = range(len(value.shape)) if len(args) == 1 else [args[1]] if isinstance(args[1], int) else args[1]
    gone = {wrap_dim(d, len(value.shape)) for d in dims}
    return reshaped(value, [s for i, s in enumerate(value.shape) if not (i in gone and s == 1)])


def _unsqueeze(batch: Batch, op: Op, deferred: Any, args: Any, kwargs: Any) -> Any:
    shape = list(deferred[0].shape)
    shape.insert(wrap_dim(args[1], len(shape) + 1), 1)
    return reshaped(deferred[0], shape)


def _permute(batch: Batch, op: Op, deferred: Any, args: Any, kwargs: Any) -> Any:
    rank = len(deferred[0].shape)
    return permuted(deferred[0], [wrap_dim(d, rank) for d in args[1]])


def _transpose(batch: Batch, op: Op, deferred: Any, args: Any, kwargs: Any) -> Any:
    rank = len(deferred[0].shape)
    dims = list(range(rank))
    if len(args) == 3:
        first, second = wrap_dim(args[1], rank), wrap_dim(args[2], rank)
    elif rank == 2:
        first, second = 0, 1
    else:
        return deferred[0]
    dims[first], dims[second] = dims[second], dims[first]
    return permuted(deferred[0], dims)


SHAPES: dict[Op, Any] = {
    aten.alias.default: _same,
    aten.detach.default: _same,
    aten.clone.default: _same,
    aten.contiguous.default: _same,
    aten._to_copy.default: _cast,
    aten.view.default: _reshape,
    aten._unsafe_view.default: _reshape,
    aten.reshape.default: _reshape,
    aten.squeeze.default: _squeeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.unsqueeze.default: _unsqueeze,
    aten.permute.default: _permute,
    aten.transpose.int: _transpose,
    aten.t.default: _transpose,
}
