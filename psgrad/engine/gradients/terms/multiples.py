"""A tensor that all samples share, times a coefficient of each sample's own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from psgrad.engine.gradients.terms.base import Term, accumulating, norms_at_least, rows_of, sum_of_products, zero_where_lost
from psgrad.engine.gradients.terms.dense import Dense


@dataclass(frozen=True)
class Multiples(Term):
    """Coefficients, one a sample or one a row of each sample's, times one shared tensor: what a norm of the weight, its mean or a
    penalty on it adds to its gradient. The product is written out by nobody.
    """

    coefficients: torch.Tensor  # [n, *shape], with ones for the axes along which a sample has one coefficient
    shared: torch.Tensor  # [*shape]

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(self.shared.shape)

    @property
    def factors(self) -> tuple[torch.Tensor, ...]:
        return (self.coefficients, self.shared.unsqueeze(0).expand(self.samples, *self.shape))

    @property
    def samples(self) -> int:
        return self.coefficients.shape[0]

    @property
    def device(self) -> torch.device:
        return self.coefficients.device

    @property
    def dtype(self) -> torch.dtype:
        return self.coefficients.dtype

    @property
    def _kept(self) -> torch.Size:
        """The coefficients' shape: that to which what is shared may be summed."""
        return self.coefficients.shape[1:]

    def at(self, samples: slice | torch.Tensor, dtype: torch.dtype | None = None) -> Multiples:
        kind = dtype or self.dtype
        return Multiples(rows_of(self.coefficients, samples).to(kind), self.shared.to(kind))

    def among(self, places: torch.Tensor, count: int) -> Term:
        if not self.shared.isfinite().all():  # the others' zeros, times infinity, would be NaN
            return Dense(self.materialise(), written_out=True).among(places, count)
        zeros = self.coefficients.new_zeros(count, *self._kept)
        return replace(self, coefficients=zeros.index_copy(0, places, self.coefficients))

    def square_norms(self) -> torch.Tensor:
        coefficients, shared = accumulating(self.coefficients), accumulating(self.shared)
        squares = coefficients * coefficients, (shared * shared).sum_to_size(self._kept).unsqueeze(0)
        largest = (s.flatten(1).amax(1) if s.dim() > 1 else s for s in squares)
        return zero_where_lost(sum_of_products(squares[0], squares[1].expand_as(squares[0])), *largest)

    @property
    def summands(self) -> int:
        return 1

    def absolute_sums(self) -> torch.Tensor:
        coefficients = accumulating(self.coefficients).reshape(self.samples, math.prod(self._kept))
        return norms_at_least(coefficients, 1) * norms_at_least(self.shared.reshape(-1), 0)

    def materialise(self) -> torch.Tensor:
        return self.coefficients * self.shared

    def weighted_sum(self, weights: torch.Tensor) -> torch.Tensor:
        coefficients = accumulating(self.coefficients)
        return torch.tensordot(weights.to(coefficients.dtype), coefficients, 1) * accumulating(self.shared)

    def dot(self, vector: torch.Tensor) -> torch.Tensor:
        coefficients, shared = accumulating(self.coefficients), accumulating(self.shared)
        along = (shared * vector.to(shared.dtype)).sum_to_size(self._kept)
        return coefficients.reshape(self.samples, math.prod(self._kept)) @ along.reshape(-1)

    def scaled(self, factor: float) -> Multiples:
        return Multiples(self.coefficients * factor, self.shared)

    def kin(self) -> tuple[Any, ...]:
        return Multiples, self.shape, id(self.shared)

    def plus(self, others: Sequence[Multiples]) -> Multiples:
        return Multiples(sum((other.coefficients for other in others), self.coefficients), self.shared)

    def describe(self) -> str:
        return "closed form"
