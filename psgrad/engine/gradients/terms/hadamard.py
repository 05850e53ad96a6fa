"""Another term, element by element times a matrix that all samples share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from psgrad.engine.gradients.terms.base import Term, accumulating, joined, sum_of_products, zero_where_lost
from psgrad.engine.gradients.terms.base import blocks as blocks_of
from psgrad.engine.gradients.terms.dense import Dense
from psgrad.engine.gradients.terms.grouped import times_shared
from psgrad.engine.gradients.terms.product import Product


@dataclass(frozen=True)
class Hadamard(Term):
    """A term's value, element by element times a shared one: the gradient of a weight behind a mask or a nonlinearity.

    Sums over samples and inner products with a vector are those of the term, with the shared value applied once and not per sample.
    """

    term: Term
    shared: torch.Tensor  # [*shape]

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
            return Dense(self.materialise(), written_out=True).among(places, count)
        return Hadamard(self.term.among(places, count), self.shared)

    def square_norms(self) -> torch.Tensor:
        term = self.term
        if not isinstance(term, Product) or term.left.shape[2] != 1:
            return self.materialised_square_norms()
        # One position: the squares of a_i s_ij b_j are a product of squares, and s, squared, a matrix.
        left, right = accumulating(term.left).square(), accumulating(term.right).square()
        shared = accumulating(self.shared).square().transpose(1, 2)
        size = 2 * left.element_size() * left[:1].numel()
        parts = [sum_of_products(times_shared(right[b], shared), left[b]) for b in blocks_of(self.samples, size, self.device)]
        return zero_where_lost(joined(parts, self), left.flatten(1).amax(1), right.flatten(1).amax(1))

    @property
    def summands(self) -> int:
        return self.term.summands

    def absolute_sums(self) -> torch.Tensor:
        return self.term.absolute_sums() * self.shared.abs().amax()

    def materialise(self) -> torch.Tensor:
        return self.term.materialise() * self.shared

    def weighted_sum(self, weights: torch.Tensor) -> torch.Tensor:
        found = self.term.weighted_sum(weights)
        return found * self.shared.to(found.dtype)

    def dot(self, vector: torch.Tensor) -> torch.Tensor:
        kind = accumulating(self.shared).dtype
        return self.term.dot(vector.to(kind) * self.shared.to(kind))

    def scaled(self, factor: float) -> Hadamard:
        return Hadamard(self.term.scaled(factor), self.shared)

    def kin(self) -> tuple[Any, ...]:
        return Hadamard, id(self.shared), self.term.kin()

    def plus(self, others: Sequence[Hadamard]) -> Hadamard:
        return Hadamard(self.term.plus([other.term for other in others]), self.shared)

    def describe(self) -> str:
        closed = isinstance(self.term, Product) and self.term.left.shape[2] == 1
        return "closed form" if closed else "materialise"
