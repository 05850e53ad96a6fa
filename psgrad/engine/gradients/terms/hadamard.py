"""The elementwise product of another term with a tensor that all samples share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from psgrad.engine.gradients.layout import AxisLayout, Slice
from psgrad.engine.gradients.terms.dense import Dense
from psgrad.engine.gradients.terms.numerics import (
    accumulating,
    blocks,
    sum_of_products,
    times_shared,
    zero_where_lost,
)
from psgrad.engine.gradients.terms.term import Multiply, Placed, Term, joined


@dataclass(frozen=True)
class Hadamard(Term):
    """The elementwise product of a term with a shared tensor: the gradient of a weight to which a mask or a
    nonlinearity is applied.

    Sums over samples and inner products with a vector are computed from those of the term, with the shared
    tensor applied once and not for each sample.
    """

    term: Term
    shared: torch.Tensor  # [*shape]

    @classmethod
    def of(cls, term: Term, layout: AxisLayout, by: torch.Tensor, product: Multiply) -> Placed:
        """A placed term times (or over) a tensor that broadcasts to the layout's shape."""
        full = product(torch.ones((), dtype=by.dtype, device=by.device), by).expand(layout.inner)
        return Placed(cls(term, layout.invert(full, term.shape)), layout)

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(self.shared.shape)

    @property
    def factors(self) -> tuple[torch.Tensor, ...]:
        return (*self.term.factors, self.shared.unsqueeze(0).expand(self.term.samples, *self.shape))

    def at(self, samples: slice | torch.Tensor, dtype: torch.dtype | None = None) -> Hadamard:
        return Hadamard(self.term.at(samples, dtype), self.shared.to(dtype or self.dtype))

    def among(self, places: torch.Tensor, count: int) -> Term:
        if not self.shared.isfinite().all():  # the others' zeros, times infinity, would be NaN
            return Dense(self.materialise(), materialised=True).among(places, count)
        return Hadamard(self.term.among(places, count), self.shared)

    def square_norms(self) -> torch.Tensor:
        if not self.term.is_outer_product:
            return self.materialised_square_norms()
        # One position: the square of a_i s_ij b_j is a product of squares, with a matrix of s squared.
        left, right = (accumulating(factor).square() for factor in self.term.factors)
        shared = accumulating(self.shared).square().transpose(1, 2)
        size = 2 * left.element_size() * left[:1].numel()
        parts = [
            sum_of_products(times_shared(right[b], shared), left[b])
            for b in blocks(self.samples, size, self.device)
        ]
        return zero_where_lost(joined(parts, self), left.flatten(1).amax(1), right.flatten(1).amax(1))

    @property
    def summands(self) -> int:
        return self.term.summands

    def absolute_sums(self) -> torch.Tensor:
        return self.term.absolute_sums() * self.shared.abs().amax()

    def materialise(self) -> torch.Tensor:
        return self.term.materialise() * self.shared

    def weighted_sum(self, weights: torch.Tensor) -> torch.Tensor:
        total = self.term.weighted_sum(weights)
        return total * self.shared.to(total.dtype)

    def dot(self, vector: torch.Tensor) -> torch.Tensor:
        kind = accumulating(self.shared).dtype
        return self.term.dot(vector.to(kind) * self.shared.to(kind))

    def scaled(self, factor: float) -> Hadamard:
        return Hadamard(self.term.scaled(factor), self.shared)

    def merge_key(self) -> tuple[Any, ...]:
        return Hadamard, id(self.shared), self.term.merge_key()

    def plus(self, others: Sequence[Hadamard]) -> Hadamard:
        return Hadamard(self.term.plus([other.term for other in others]), self.shared)

    def describe(self) -> str:
        return "closed form" if self.term.is_outer_product else "materialise"

    def slices(self, limit: int, width: int) -> Iterator[Slice]:
        shared = self.shared.flatten()
        for part in self.term.slices(limit, width):
            places = part.places
            factor = (
                shared[places] if isinstance(places, torch.Tensor) else shared[places.start : places.stop]
            )
            yield Slice(part.values * factor, places, part.samples)

    def narrow(self, layout: AxisLayout, dim: int, start: int, step: int, length: int) -> Placed | None:
        inner = self.term.narrow(layout, dim, start, step, length)
        shared = layout.apply(self.shared)[
            (slice(None),) * dim + (slice(start, start + (length - 1) * step + 1, step),)
        ]
        return None if inner is None else inner.term.times(inner.layout, shared, torch.mul, each=False)

    def times(self, layout: AxisLayout, by: torch.Tensor, product: Multiply, *, each: bool) -> Placed | None:
        shared = layout.apply(self.shared)
        if not each:
            return Placed(Hadamard(self.term, layout.invert(product(shared, by), self.shape)), layout)
        inner = self.term.times(layout, by, product, each=True)
        return None if inner is None else inner.term.times(inner.layout, shared, torch.mul, each=False)

    def sum(self, layout: AxisLayout, dims: set[int]) -> Placed | None:
        return self.term.sum_times(layout, dims, self.shared)
