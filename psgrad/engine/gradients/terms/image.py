"""The image of other terms under a linear map that all samples share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from psgrad.engine.gradients.terms.dense import Dense
from psgrad.engine.gradients.terms.numerics import (
    accumulating,
    accumulating_dtype,
    blocks,
)
from psgrad.engine.gradients.terms.product import Product
from psgrad.engine.gradients.terms.term import Placed, Term, added, joined
from psgrad.engine.transforms.grad import vjp

LinearMap = Callable[..., torch.Tensor]
"""(values [m, *shape], *tensors of all samples) to [m, *shape of the result], a linear map of each."""


@dataclass(frozen=True, eq=False)
class Image(Term):
    """A linear map of a sum of terms: the gradient of a weight to which a mask, a nonlinearity or a norm is
    applied before it is used, or on which there is a penalty.

    The map runs on the values of a few samples at a time. For a sum over samples it runs once.
    """

    terms: tuple[Placed, ...]
    shared: tuple[torch.Tensor, ...]  # what the map depends on
    linear: LinearMap
    shape: tuple[int, ...]
    is_elementwise: bool = False  # whether the map multiplies each element, repeated or not, with a number

    @property
    def factors(self) -> tuple[torch.Tensor, ...]:
        return tuple(factor for placed in self.terms for factor in placed.term.factors)

    @property
    def samples(self) -> int:
        return self.terms[0].term.samples

    @property
    def device(self) -> torch.device:
        return self.terms[0].term.device

    @property
    def dtype(self) -> torch.dtype:
        return self.terms[0].term.dtype

    def at(self, samples: slice | torch.Tensor, dtype: torch.dtype | None = None) -> Image:
        kind = dtype or self.dtype
        return replace(self, terms=tuple(placed.at(samples, kind) for placed in self.terms))

    def scaled(self, factor: float) -> Image:
        return replace(self, terms=tuple(placed.scaled(factor) for placed in self.terms))

    def plus(self, others: Sequence[Image]) -> Image:
        return replace(self, terms=(*self.terms, *(placed for other in others for placed in other.terms)))

    def merge_key(self) -> tuple[Any, ...]:
        return Image, id(self)

    def _of(self, values: torch.Tensor) -> torch.Tensor:
        """The images of values [m, *], in their precision."""
        return self.linear(values, *(x.to(values.dtype) if x.is_floating_point() else x for x in self.shared))

    def materialise(self) -> torch.Tensor:
        return self._of(added([placed.materialise() for placed in self.terms]))

    def in_blocks(self) -> torch.Tensor:
        """As `materialise`, with the values of few samples' terms at a time."""
        return joined([self.at(block).materialise() for block in self._blocks(self.dtype)], self, self.shape)

    def weighted_sum(self, weights: torch.Tensor) -> torch.Tensor:
        total = added([placed.weighted_sum(weights) for placed in self.terms])
        return self._of(total.unsqueeze(0)).squeeze(0)

    def dot(self, vector: torch.Tensor) -> torch.Tensor:
        zeros = torch.zeros(
            self.terms[0].layout.shape, dtype=accumulating_dtype(self.dtype), device=self.device
        )
        (back,) = vjp(lambda value: self._of(value.unsqueeze(0)).squeeze(0), zeros)[1](vector.to(zeros.dtype))
        return torch.stack([placed.dot(back) for placed in self.terms]).sum(0)

    def square_norms(self) -> torch.Tensor:
        """By the squares of the factors, where the map multiplies each element: of coefficients that are
        constant along some axes, or of one outer product a sample. They are all positive, so nothing cancels.
        """
        if (found := self._coefficients) is not None:
            coefficients, shared = found
            squares = shared.double().square().sum_to_size(coefficients.shape[1:])
            return (coefficients.double().square() * squares).flatten(1).sum(1)
        if (masked := self._masked_product) is not None:
            product, shared = masked
            left, right = (factor.double().square().flatten(1) for factor in product.factors)
            return (left @ shared.double().square() * right).sum(1)
        return self.materialised_square_norms()

    @property
    def summands(self) -> int:
        return max(2, *(placed.term.summands for placed in self.terms))  # never a single product

    def absolute_sums(self) -> torch.Tensor:
        kind = accumulating_dtype(self.dtype)
        parts = [Dense(self.at(block, kind).materialise()).absolute_sums() for block in self._blocks(kind)]
        return joined(parts, self)

    @property
    def multiplications(self) -> float:
        """Sums whose norms are bounded are of materialised values."""
        return math.inf

    def order(self) -> str:
        closed = self._coefficients is not None or self._masked_product is not None
        return "closed form" if closed else "materialise"

    def cross_products(self, other: Term) -> torch.Tensor | None:
        """<c * u, value> = <u, c * value>, for coefficients c, where they scale a factor of the value."""
        found = self._coefficients
        if found is None or not isinstance(other, Product) or other.shape != (1, *self.shape):
            return None
        coefficients, shared = found
        kind = torch.promote_types(accumulating_dtype(self.dtype), accumulating_dtype(other.dtype))
        left, right = other.at(slice(None), kind).factors
        coefficients = coefficients.to(kind).unsqueeze(1)  # [n, 1, rows or 1, columns or 1]
        if coefficients.shape[3] == 1:
            left = left * coefficients.transpose(2, 3)
        else:
            right = right * coefficients
        return Product(left, right).dot(shared.unsqueeze(0)).double()

    @cached_property
    def _multiple(self) -> tuple[Placed, torch.Tensor] | None:
        """The term, and the tensor [*shape] that each sample's value is multiplied with, element by element;
        None for another map.
        """
        if not self.is_elementwise or len(self.terms) != 1 or self.terms[0].layout.window is not None:
            return None
        (placed,) = self.terms
        shared = torch.ones(placed.layout.shape, dtype=accumulating_dtype(self.dtype), device=self.device)
        if isinstance(placed.term, Image) and placed.layout.is_identity:
            if (inner := placed.term._multiple) is None:
                return None
            placed, shared = inner
        return placed, self._of(shared.unsqueeze(0)).squeeze(0)

    @cached_property
    def _coefficients(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """([n, *], [*shape]) where each sample's value is the product of coefficients, fewer than its
        elements, with one tensor.
        """
        if (found := self._multiple) is None or not isinstance(found[0].term, Dense):
            return None
        value = accumulating(found[0].materialise())
        if value.dim() != len(self.shape) + 1 or value[:1].numel() >= math.prod(self.shape):
            return None
        return value, found[1]

    @property
    def _masked_product(self) -> tuple[Product, torch.Tensor] | None:
        """(term, [a, b]) where each sample's value is one outer product [a, b] times one tensor."""
        if (found := self._multiple) is None:
            return None
        placed, shared = found
        term = placed.term
        if not isinstance(term, Product) or not placed.layout.is_identity_but_for_ones:
            return None
        if not term.is_outer_product or term.shape[0] != 1:
            return None
        return (term, shared.reshape(term.shape[1:])) if shared.numel() == math.prod(term.shape) else None

    def _blocks(self, kind: torch.dtype) -> Any:
        size = max(math.prod(self.shape), math.prod(self.terms[0].layout.shape))
        return blocks(self.samples, 2 * size * kind.itemsize, self.device)
