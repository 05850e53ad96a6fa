"""A value that is there.

A tensor that all samples share, times a coefficient of each sample's own.

Another term, element by element times a matrix that all samples share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from psgrad.engine.gradients.costs import Cost
from psgrad.engine.gradients.machine import machine
from psgrad.engine.gradients.terms.base import (
    Term,
    accumulating,
    joined,
    norms_at_least,
    rows_of,
    square_norm,
    sum_of_products,
    times_shared,
    zero_where_lost,
)
from psgrad.engine.gradients.terms.base import blocks as blocks_of
from psgrad.engine.gradients.terms.product import Product


@dataclass(frozen=True)
class Dense(Term):
    """A value that is there: biases, affine parameters, whatever can't be factored, and what is smaller than
    its factors.
    """

    value: torch.Tensor  # [n, *shape]
    written_out: bool = False  # whether it had factors
    lost_at: str = ""  # the operator that they did not get through, if that is why

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(self.value.shape[1:])

    @property
    def factors(self) -> tuple[torch.Tensor, ...]:
        return (self.value,)

    def at(self, samples: slice | torch.Tensor, dtype: torch.dtype | None = None) -> Dense:
        return replace(self, value=rows_of(self.value, samples).to(dtype or self.dtype))

    def square_norms(self) -> torch.Tensor:
        return square_norm(self.value)

    @property
    def summands(self) -> int:
        return 1

    def absolute_sums(self) -> torch.Tensor:
        return norms_at_least(self.value.flatten(1) if self.value.dim() > 1 else self.value.unsqueeze(1), 1)

    def materialise(self) -> torch.Tensor:
        return self.value

    def weighted_sum(self, weights: torch.Tensor) -> torch.Tensor:
        value = accumulating(self.value)
        return torch.mm(
            weights.to(value.dtype).unsqueeze(0), value.flatten(1) if value.dim() > 1 else value.unsqueeze(1)
        ).reshape(self.shape)

    def dot(self, vector: torch.Tensor) -> torch.Tensor:
        value = accumulating(self.value)
        return value.reshape(value.shape[0], vector.numel()) @ vector.reshape(-1).to(value.dtype)

    def scaled(self, factor: float) -> Dense:
        return replace(self, value=self.value * factor)

    def kin(self) -> tuple[Any, ...]:
        return Dense, self.shape

    def plus(self, others: Sequence[Dense]) -> Dense:
        lost = next((term.lost_at for term in (self, *others) if term.lost_at), "")
        return replace(self, value=sum((other.value for other in others), self.value), lost_at=lost)

    def ways(self) -> dict[str, Cost]:
        size = math.prod(self.shape) * self.dtype.itemsize
        return {self.describe(): Cost(machine(self.device).stream_seconds(size), 0)}

    def describe(self) -> str:
        if self.lost_at:
            return f"materialise after {self.lost_at}"
        return "materialise" if self.written_out else "direct"


@dataclass(frozen=True)
class Multiples(Term):
    """Coefficients, one a sample or one a row of each sample's, times one shared tensor: what a norm of the
    weight, its mean or a penalty on it adds to its gradient. The product is written out by nobody.
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


@dataclass(frozen=True)
class Hadamard(Term):
    """A term's value, element by element times a shared one: the gradient of a weight behind a mask or a
    nonlinearity.

    Sums over samples and inner products with a vector are those of the term, with the shared value applied
    once and not per sample.
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
        parts = [
            sum_of_products(times_shared(right[b], shared), left[b])
            for b in blocks_of(self.samples, size, self.device)
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
