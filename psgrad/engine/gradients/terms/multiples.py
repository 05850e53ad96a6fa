"""A tensor that all samples share, times coefficients of each sample."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from psgrad.engine.gradients.layout import AxisLayout, Slice
from psgrad.engine.gradients.terms import placed as placed_maps
from psgrad.engine.gradients.terms.dense import Dense
from psgrad.engine.gradients.terms.numerics import (
    accumulating,
    accumulating_dtype,
    norms_at_least,
    of_one_dtype,
    rows_of,
    sum_of_products,
    zero_where_lost,
)
from psgrad.engine.gradients.terms.term import Multiply, Placed, Term

aten = torch.ops.aten


@dataclass(frozen=True)
class Multiples(Term):
    """Coefficients, one for each sample or for each row of each sample, times one shared tensor: the gradient
    of a norm of the weight, of its mean or of a penalty on it. The product is not materialised.
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
    def _own_shape(self) -> torch.Size:
        """The coefficients' shape, to which the shared tensor may be summed."""
        return self.coefficients.shape[1:]

    def at(self, samples: slice | torch.Tensor, dtype: torch.dtype | None = None) -> Multiples:
        kind = dtype or self.dtype
        return Multiples(rows_of(self.coefficients, samples).to(kind), self.shared.to(kind))

    def among(self, places: torch.Tensor, count: int) -> Term:
        if not self.shared.isfinite().all():  # the others' zeros, times infinity, would be NaN
            return Dense(self.materialise(), materialised=True).among(places, count)
        zeros = self.coefficients.new_zeros(count, *self._own_shape)
        return replace(self, coefficients=zeros.index_copy(0, places, self.coefficients))

    def square_norms(self) -> torch.Tensor:
        coefficients, shared = accumulating(self.coefficients), accumulating(self.shared)
        squares = coefficients * coefficients, (shared * shared).sum_to_size(self._own_shape).unsqueeze(0)
        largest = (s.flatten(1).amax(1) if s.dim() > 1 else s for s in squares)
        return zero_where_lost(sum_of_products(squares[0], squares[1].expand_as(squares[0])), *largest)

    @property
    def summands(self) -> int:
        return 1

    def absolute_sums(self) -> torch.Tensor:
        coefficients = accumulating(self.coefficients).reshape(self.samples, math.prod(self._own_shape))
        return norms_at_least(coefficients, 1) * norms_at_least(self.shared.reshape(-1), 0)

    def materialise(self) -> torch.Tensor:
        return self.coefficients * self.shared

    def weighted_sum(self, weights: torch.Tensor) -> torch.Tensor:
        coefficients = accumulating(self.coefficients)
        return torch.tensordot(weights.to(coefficients.dtype), coefficients, 1) * accumulating(self.shared)

    def dot(self, vector: torch.Tensor) -> torch.Tensor:
        coefficients, shared = accumulating(self.coefficients), accumulating(self.shared)
        along = (shared * vector.to(shared.dtype)).sum_to_size(self._own_shape)
        return coefficients.reshape(self.samples, math.prod(self._own_shape)) @ along.reshape(-1)

    def scaled(self, factor: float) -> Multiples:
        return Multiples(self.coefficients * factor, self.shared)

    def merge_key(self) -> tuple[Any, ...]:
        return Multiples, self.shape, id(self.shared)

    def plus(self, others: Sequence[Multiples]) -> Multiples:
        return Multiples(sum((other.coefficients for other in others), self.coefficients), self.shared)

    def describe(self) -> str:
        return "closed form"

    def placed_products(self, layout: AxisLayout, other: Placed) -> torch.Tensor | None:
        """<c * u, value> = <u, c * value>: the coefficients go into a factor of the other term."""
        own = self._placed(layout)
        if own is None or other.term.stored_value is not None:
            return None
        wide = accumulating_dtype(own.dtype)
        product = placed_maps.times(other.at(slice(None), wide), own.coefficients.to(wide), each=True)
        if product is None:
            return None
        return product[0].term.dot(product[0].layout.invert(own.shared, product[0].term.shape)).double()

    def slices(self, limit: int, width: int) -> Iterator[Slice]:
        """Some rows of the shared tensor, times all samples' coefficients."""
        coefficients, shared = self.coefficients, self.shared
        if not shared.dim():
            coefficients, shared = coefficients.unsqueeze(1), shared.unsqueeze(0)
        row = math.prod(shared.shape[1:])
        step = max(1, limit // max(self.samples * row, 1))
        for start in range(0, shared.shape[0], step):
            some = shared[start : start + step]
            own = coefficients if coefficients.shape[1] == 1 else coefficients[:, start : start + step]
            yield Slice((own * some).flatten(1), range(start * row, (start + len(some)) * row), slice(None))

    def _placed(self, layout: AxisLayout) -> Multiples | None:
        """The term with the axes of the layout; None if coefficients vary along a part of one of these axes
        only.
        """
        varying: list[int] = []  # for each atom its size where coefficients differ along it
        axis, left = -1, 1
        for size in layout.atoms:
            while left == 1 and axis + 1 < len(self.shape) and (size != 1 or self.shape[axis + 1] == 1):
                axis += 1
                left = self.shape[axis]
            left //= max(size, 1)
            varying.append(size if self.coefficients.shape[axis + 1] != 1 else 1)
        groups = layout.groups()
        if groups is None:
            return None
        shape = []
        for group, size in zip(groups, layout.inner, strict=True):
            length = math.prod(varying[atom] for atom in group)
            if length not in (1, size):
                return None
            shape.append(length)
        n = self.samples
        coefficients = (
            self.coefficients.reshape(n, *varying)
            .permute(0, *(1 + atom for atom in layout.order))
            .reshape(n, *shape)
        )
        return Multiples(coefficients, layout.apply(self.shared))

    def narrow(self, layout: AxisLayout, dim: int, start: int, step: int, length: int) -> Placed | None:
        placed = self._placed(layout)
        if placed is None:
            return None
        at = (slice(None),) * dim + (slice(start, start + (length - 1) * step + 1, step),)
        own = (
            placed.coefficients
            if placed.coefficients.shape[dim + 1] == 1
            else placed.coefficients[(slice(None), *at)]
        )
        return Placed.plain(Multiples(own, placed.shared[at]))

    def sum(self, layout: AxisLayout, dims: set[int]) -> Placed | None:
        placed = self._placed(layout)
        if placed is None:
            return None
        own = placed.coefficients
        plain = [dim for dim in dims if own.shape[dim + 1] == 1]
        shared = placed.shared.sum(plain, keepdim=True) if plain else placed.shared
        mixed = [dim for dim in dims if own.shape[dim + 1] != 1]
        if mixed:
            own, shared = own.transpose(1, mixed[0] + 1), shared.transpose(0, mixed[0])
            if len(mixed) > 1 or math.prod(own.shape[2:]) != 1:
                return None
            own, shared = of_one_dtype(own, shared)
            summed = torch.tensordot(own.flatten(1), shared, 1).unsqueeze(1)
            return Placed.plain(Dense(summed.transpose(1, mixed[0] + 1)))
        placed = Multiples(own, shared)
        if shared.numel() <= own[:1].numel():  # the value is no larger than the coefficients
            return Placed.plain(Dense(placed.materialise()))
        return Placed.plain(placed)

    def times(self, layout: AxisLayout, by: torch.Tensor, product: Multiply, *, each: bool) -> Placed | None:
        placed = self._placed(layout)
        if placed is None:
            return None
        if each:
            return Placed.plain(Multiples(product(placed.coefficients, by), placed.shared))
        return Placed.plain(Multiples(placed.coefficients, product(placed.shared, by)))

    def scatter(self, layout: AxisLayout, dim: int, index: torch.Tensor, size: int) -> Placed | None:
        placed = self._placed(layout)
        if placed is None or placed.coefficients.shape[dim + 1] != 1:
            return None
        shape = [size if d == dim else length for d, length in enumerate(placed.shape)]
        return Placed.plain(
            Multiples(
                placed.coefficients, aten.index_select_backward.default(placed.shared, shape, dim, index)
            )
        )

    def contract(self, layout: AxisLayout, dim: int, matrix: torch.Tensor) -> Placed | None:
        placed = self._placed(layout)
        if placed is None or placed.coefficients.shape[dim + 1] != 1 or matrix.dim() != 2:
            return None
        shared, matrix = of_one_dtype(placed.shared.movedim(dim, -1), matrix)
        return Placed.plain(Multiples(placed.coefficients, torch.matmul(shared, matrix).movedim(-1, dim)))

    def expand(self, layout: AxisLayout, shape: Sequence[int]) -> Placed | None:
        placed = self._placed(layout)
        if placed is None:
            return None
        lead = (1,) * (len(shape) - len(layout.inner))
        own = placed.coefficients.reshape(placed.samples, *lead, *placed.coefficients.shape[1:])
        return Placed.plain(Multiples(own, placed.shared.expand(*shape)))
