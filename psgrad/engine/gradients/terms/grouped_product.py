"""Sums of outer products, each added to the matrix of a group: the weight gradient of a layer of experts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from psgrad.engine.gradients.costs import cheapest, norm_order_costs
from psgrad.engine.gradients.machine import machine
from psgrad.engine.gradients.terms.numerics import (
    accumulating,
    accumulating_dtype,
    block_bytes,
    blocks,
    sum_of_products,
)
from psgrad.engine.gradients.terms.product import Product
from psgrad.engine.gradients.terms.term import Term, joined
from psgrad.engine.transforms.rules.grouped_matmul import grouped_mm, grouped_outer


@dataclass(frozen=True)
class GroupedProduct(Term):
    """Outer products of positions, each added to the matrix of its group. A `Product` would repeat every
    position for each group.
    """

    index: torch.Tensor  # [n, t], the group of each position
    left: torch.Tensor  # [n, t, a]
    right: torch.Tensor  # [n, t, b]
    count: int  # groups

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return (self.count, self.left.shape[2], self.right.shape[2])

    @property
    def factors(self) -> tuple[torch.Tensor, ...]:
        return (self.left, self.right, self.index)

    def order(self) -> str:
        """As Term.order, for groups of equal size, with twice the mean size: the largest group determines the
        cost.
        """
        positions = math.ceil(2 * self.index.shape[1] / max(self.count, 1))
        sizes = self.count, positions, *self.shape[1:]
        block, kind = block_bytes(self.device), accumulating_dtype(self.dtype)
        return cheapest(norm_order_costs(machine(self.device), *sizes, kind, block), block)

    def square_norms(self) -> torch.Tensor:
        if self.order() == "materialise" or not self.index.numel():
            return self.materialised_square_norms()
        kind = accumulating_dtype(self.dtype)
        largest = int(self._slots().max()) + 1
        _, rows, columns = self.shape
        if largest * (rows + columns) > rows * columns:
            return self.materialised_square_norms()
        size = self.count * largest * (rows + columns) * kind.itemsize
        parts = [
            self.at(block, kind)._by_group().square_norms()
            for block in blocks(self.samples, size, self.device)
        ]
        return joined(parts, self)

    def _slots(self) -> torch.Tensor:
        """[n, t]: the number of earlier positions of the same sample and group."""
        ordered, order = self.index.sort(dim=1, stable=True)
        places = torch.arange(self.index.shape[1], device=self.device).expand_as(order)
        slots = places - torch.searchsorted(ordered, ordered)
        return torch.empty_like(slots).scatter_(1, order, slots)

    def _by_group(self) -> Product:
        """The term as a product, with the positions of each group together, padded with zeros."""
        slots = self._slots()
        (n, _), largest = self.index.shape, int(slots.max()) + 1
        sample = torch.arange(n, device=self.device).unsqueeze(1)
        places = ((sample * self.count + self.index) * largest + slots).flatten()

        def laid_out(factor: torch.Tensor) -> torch.Tensor:
            out = factor.new_zeros(n * self.count * largest, factor.shape[2])
            return out.index_copy_(0, places, factor.flatten(0, 1)).reshape(n, self.count, largest, -1)

        return Product(laid_out(self.left), laid_out(self.right))

    @property
    def summands(self) -> int:
        return self.left.shape[1]

    @property
    def multiplications(self) -> int:
        return math.prod(self.left.shape[1:]) * self.right.shape[2]

    def materialise(self) -> torch.Tensor:
        return self.some_rows(slice(0, self.count), self.count)

    @property
    def row_count(self) -> int | None:
        return self.count

    def some_rows(self, rows: slice, count: int) -> torch.Tensor:
        n, groups = self.samples, rows.stop - rows.start
        inside = (self.index >= rows.start) & (self.index < rows.stop)
        sample = torch.arange(n, device=self.device).unsqueeze(1)
        keys = torch.where(inside, sample * groups + self.index - rows.start, n * groups)
        order, ends = _sorted(keys, n * groups)
        found = grouped_outer(_in_order(self.left, order), _in_order(self.right, order), ends)
        return found.unflatten(0, (n, groups))  # type: ignore[no-any-return]

    def weighted_sum(self, weights: torch.Tensor) -> torch.Tensor:
        left, right = accumulating(self.left), accumulating(self.right)
        order, ends = _sorted(self.index, self.count)
        scaled = left * weights.reshape(-1, 1, 1).to(left.dtype)
        return grouped_outer(_in_order(scaled, order), _in_order(right, order), ends)  # type: ignore[no-any-return]

    def dot(self, vector: torch.Tensor) -> torch.Tensor:
        left, right = accumulating(self.left), accumulating(self.right)
        order, ends = _sorted(self.index, self.count)
        rows = grouped_mm(_in_order(left, order), vector.to(left.dtype), ends)
        return sum_of_products(rows.index_select(0, order.argsort()).reshape(right.shape), right)


def _sorted(index: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The order [n * t] in which positions of one group are neighbours, and the end of each group."""
    ordered, order = index.flatten().sort(stable=True)
    groups = torch.arange(count, device=index.device)
    return order, torch.searchsorted(ordered, groups, right=True).int()


def _in_order(factor: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    return factor.flatten(0, 1).index_select(0, order)
