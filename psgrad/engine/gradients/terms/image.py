"""The image of other terms under a linear map that all samples share."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from psgrad.engine.gradients.layout import AxisLayout
from psgrad.engine.gradients.terms.dense import Dense
from psgrad.engine.gradients.terms.numerics import (
    accumulating,
    accumulating_dtype,
    blocks,
    square_norm,
    zero_where_lost,
)
from psgrad.engine.gradients.terms.term import Placed, Term, joined
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

    def among(self, places: torch.Tensor, count: int) -> Term:
        return replace(self, terms=tuple(Placed(p.term.among(places, count), p.layout) for p in self.terms))

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
        first, *others = [placed.materialise() for placed in self.terms]
        for other in others:
            first = first + other
        return self._of(first)

    def in_blocks(self) -> torch.Tensor:
        """As `materialise`, with the values of few samples' terms at a time."""
        return joined([self.at(block).materialise() for block in self._blocks(self.dtype)], self, self.shape)

    def weighted_sum(self, weights: torch.Tensor) -> torch.Tensor:
        first, *others = [placed.layout.apply(placed.term.weighted_sum(weights)) for placed in self.terms]
        for other in others:
            first = first + other
        return self._of(first.unsqueeze(0)).squeeze(0)

    def dot(self, vector: torch.Tensor) -> torch.Tensor:
        if (single := self._coefficients) is not None:
            coefficients, image = single
            return coefficients * (image * vector.to(image.dtype)).sum()
        zeros = torch.zeros(
            self.terms[0].layout.shape, dtype=accumulating_dtype(self.dtype), device=self.device
        )
        (back,) = vjp(lambda value: self._of(value.unsqueeze(0)).squeeze(0), zeros)[1](vector.to(zeros.dtype))
        parts = [placed.term.dot(placed.layout.invert(back, placed.term.shape)) for placed in self.terms]
        return torch.stack(parts).sum(0)

    def square_norms(self) -> torch.Tensor:
        if (single := self._coefficients) is None:
            return self.materialised_square_norms()
        coefficients, image = single
        squares, length = coefficients.square(), image.square().sum()
        return zero_where_lost(squares * length, squares, length.expand_as(squares))

    def materialised_square_norms(self) -> torch.Tensor:
        kind = accumulating_dtype(self.dtype)
        parts = [square_norm(self.at(block, kind).materialise()) for block in self._blocks(kind)]
        return joined(parts, self)

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

    def describe(self) -> str:
        return "materialise" if self._coefficients is None else "closed form"

    def placed_products(self, layout: AxisLayout, other: Placed) -> torch.Tensor | None:
        """<c * u, value> = c * <u, value>, for one coefficient a sample."""
        if (single := self._coefficients) is None or other.term.stored_value is not None:
            return None
        coefficients, image = single
        kind = torch.promote_types(image.dtype, accumulating_dtype(other.term.dtype))
        vector = other.layout.invert(layout.apply(image.to(kind)), other.term.shape)
        return coefficients.double() * other.term.at(slice(None), kind).dot(vector).double()

    @property
    def _coefficients(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """([n], [*shape]) where each sample's value is one number times the image of one; else None."""
        (first, *others) = self.terms
        value = first.term.stored_value
        if others or value is None or first.layout.window is not None or math.prod(value.shape[1:]) != 1:
            return None
        value = accumulating(value)
        return value.reshape(-1), self._of(value.new_ones(1, *first.layout.shape)).squeeze(0)

    def _blocks(self, kind: torch.dtype) -> Any:
        size = max(math.prod(self.shape), math.prod(self.terms[0].layout.shape))
        return blocks(self.samples, 2 * size * kind.itemsize, self.device)
