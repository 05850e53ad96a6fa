"""Linear maps of deferred gradients: of each term by itself. NotImplemented where a term would have to be written out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from psgrad.engine.gradients.deferral import linear
from psgrad.engine.gradients.layout import Layout
from psgrad.engine.gradients.placed import DeferredGradient, Placed
from psgrad.engine.gradients.terms import Dense
from psgrad.engine.transforms.batching import Batch

Waiting = list[DeferredGradient | None]  # for each argument of an operator its deferred value, if it is one


def of_each(batch: Batch, value: DeferredGradient, shape: Sequence[int], change: Callable[[Placed], list[Placed] | None]) -> Any:
    """The terms changed one by one, NotImplemented where one can't be."""
    terms: list[Placed] = []
    for placed in value.terms:
        changed = change(placed)
        if changed is None:
            return NotImplemented
        terms += changed
    if not terms:  # zero
        zero = torch.zeros((), dtype=value.dtype, device=value.device).expand(batch.size, *shape)
        terms = [Placed.plain(Dense(zero))]
    return value.with_terms(terms, torch.Size(shape))


def relabelled(value: DeferredGradient, layouts: list[Layout | None]) -> Any:
    if any(layout is None for layout in layouts):
        return NotImplemented
    terms = [Placed(placed.term, layout) for placed, layout in zip(value.terms, layouts, strict=True) if layout is not None]
    return value.with_terms(terms, terms[0].layout.shape)


def reshaped(value: DeferredGradient, shape: Sequence[int]) -> Any:
    if -1 in shape:
        known = -1
        for size in shape:
            known *= size
        shape = [value.shape.numel() // known if size == -1 and known else size for size in shape]
    terms = [found for placed in value.terms if (found := linear.reshaped(placed, shape)) is not None]
    return value.with_terms(terms, torch.Size(shape)) if len(terms) == len(value.terms) else NotImplemented


def permuted(value: DeferredGradient, dims: list[int]) -> Any:
    return relabelled(value, [placed.layout.permute(dims) for placed in value.terms])


def expanded(batch: Batch, value: DeferredGradient, shape: Sequence[int]) -> Any:
    return value if tuple(shape) == tuple(value.shape) else of_each(batch, value, shape, lambda placed: linear.expanded(placed, shape))


def narrowed(batch: Batch, value: DeferredGradient, dim: int, start: int, step: int, length: int) -> Any:
    if length == value.shape[dim]:
        return value
    shape = [length if d == dim else size for d, size in enumerate(value.shape)]
    return of_each(batch, value, shape, lambda placed: linear.narrowed(placed, dim, start, step, length))


def embedded(value: DeferredGradient, dim: int, start: int, step: int, size: int) -> Any:
    return relabelled(value, [placed.layout.embed(dim, start, step, size) for placed in value.terms])


def scaled(value: DeferredGradient, factor: float) -> DeferredGradient:
    return value.with_terms([Placed(p.term.scaled(factor), p.layout) for p in value.terms])


def times(batch: Batch, value: DeferredGradient, by: torch.Tensor, product: Any = torch.mul) -> Any:
    return of_each(batch, value, value.shape, lambda placed: linear.times(placed, by, product))


def masked(batch: Batch, value: DeferredGradient, by: torch.Tensor) -> Any:
    return of_each(batch, value, value.shape, lambda placed: linear.masked(placed, by))


def contracted(batch: Batch, value: DeferredGradient, dim: int, matrix: torch.Tensor) -> Any:
    shape = [matrix.shape[-1] if d == dim else size for d, size in enumerate(value.shape)]
    return of_each(batch, value, shape, lambda placed: linear.contracted(placed, dim, matrix))
