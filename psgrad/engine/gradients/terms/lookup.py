"""Rows that are added to a table by an index: the gradient of an embedding."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from psgrad.engine.gradients.terms.numerics import (
    accumulating,
    blocks,
    of_one_dtype,
    square_norm,
    sum_of_products,
)
from psgrad.engine.gradients.terms.product import Product
from psgrad.engine.gradients.terms.term import Multiply, OuterProducts, Term


@dataclass(frozen=True)
class Lookup(OuterProducts):
    """Rows that are added to a table by an index: the gradient of an embedding. The one-hot factor is never
    made.
    """

    index: torch.Tensor  # [n, t]
    rows: torch.Tensor  # [n, t, b]
    count: int  # rows of the table

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return (self.count, self.rows.shape[2])

    @property
    def factors(self) -> tuple[torch.Tensor, ...]:
        return (self.rows, self.index)

    def _keys(self) -> torch.Tensor:
        """[n * t]: one number for each pair of sample and table row."""
        return (
            self.index + torch.arange(self.samples, device=self.device).unsqueeze(1) * self.count
        ).reshape(-1)

    def square_norms(self) -> torch.Tensor:
        rows = accumulating(self.rows)
        n, positions, columns = rows.shape
        if positions == 1:
            return square_norm(rows)
        if self._table_is_smaller:
            return self.materialised_square_norms()
        # rows of one sample with the same index are added first: linear in the positions, and without
        # cancellation afterwards
        index, order = self.index.sort(1)
        ranks = torch.cat(
            [torch.zeros_like(index[:, :1]), (index[:, 1:] != index[:, :-1]).cumsum(1)], 1
        )  # among the sample's indices
        places = (
            torch.empty_like(ranks).scatter_(1, order, ranks)
            + torch.arange(n, device=self.device).unsqueeze(1) * positions
        )
        merged = torch.zeros(n * positions, columns, dtype=rows.dtype, device=self.device)
        return square_norm(merged.index_add_(0, places.reshape(-1), rows.flatten(0, 1)).reshape(rows.shape))

    @property
    def summands(self) -> int:
        return self.rows.shape[1]

    @property
    def multiplications(self) -> int:
        return self.rows.shape[1] * self.rows.shape[2]

    def absolute_sums(self) -> torch.Tensor:
        return super().absolute_sums() * math.sqrt(self.rows.shape[1])

    def materialise(self) -> torch.Tensor:
        n, _, columns = self.rows.shape
        value = torch.zeros(n * self.count, columns, dtype=self.dtype, device=self.device)
        return value.index_add_(0, self._keys(), self.rows.flatten(0, 1)).reshape(n, self.count, columns)

    def weighted_sum(self, weights: torch.Tensor) -> torch.Tensor:
        rows = accumulating(self.rows)
        scaled = rows * weights.reshape(-1, 1, 1).to(rows.dtype)
        out = torch.zeros(self.count, rows.shape[2], dtype=rows.dtype, device=self.device)
        return out.index_add_(0, self.index.reshape(-1), scaled.flatten(0, 1))

    def dot(self, vector: torch.Tensor) -> torch.Tensor:
        rows = accumulating(self.rows)
        return sum_of_products(rows, vector.to(rows.dtype)[self.index])

    @property
    def _table_is_smaller(self) -> bool:
        """Whether a table in which the rows are added costs less time than sorting their indices, and no more
        memory.
        """
        return self.count <= self.index.shape[1]

    def order(self) -> str:
        return "materialise" if self._table_is_smaller else "index"

    @property
    def matrix_shape(self) -> tuple[int, int, int] | None:
        return (1, *self.shape)  # type: ignore[return-value]

    def square_sums(self) -> torch.Tensor:
        """As Term.square_sums: rows of one sample and index are added first."""
        total = torch.zeros(self.count, self.rows.shape[2], dtype=torch.float64, device=self.device)
        for block in blocks(self.samples, 24 * self.rows[:1].numel(), self.device):
            some = self.at(block, torch.float64)
            keys, places = some._keys().unique(return_inverse=True)
            merged = total.new_zeros(len(keys), total.shape[1])
            merged.index_add_(0, places, some.rows.flatten(0, 1))
            total.index_add_(0, keys % self.count, merged.square())
        return total

    def cross_products(self, other: Term) -> torch.Tensor | None:
        """With a product, as for a tied table: the sum over positions t, s of left[t, index[s]] * <right[t],
        rows[s]>. No value of the table's size is made.
        """
        if not isinstance(other, Product) or other.shape != (1, *self.shape):
            return None
        out = torch.empty(self.samples, dtype=torch.float64, device=self.device)
        left, right = (accumulating(factor).squeeze(1) for factor in other.factors)
        rows, positions = accumulating(self.rows), left.shape[1]
        for block in blocks(self.samples, 2 * positions * rows.shape[1] * left.element_size(), self.device):
            index = self.index[block].unsqueeze(1).expand(-1, positions, -1)
            picked = torch.gather(left[block], 2, index)  # [n, t, s]
            inner = torch.bmm(right[block], rows[block].transpose(1, 2))  # [n, t, s]
            out[block] = sum_of_products(picked, inner).double()
        return out

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return 1, self.rows.shape[1], 0, self.rows.shape[2]

    def at_positions(self, some: slice) -> Lookup:
        return Lookup(self.index[:, some], self.rows[:, some], self.count)

    def position_square_norms(self) -> torch.Tensor:
        return torch.linalg.vector_norm(self.rows, dim=(1, 2), dtype=torch.float64).square_()

    def tile_products(self, other: Lookup | Product) -> torch.Tensor:
        """[n, m]: the inner products of all n samples with all m of another table or product."""
        if isinstance(other, Lookup):
            factor, right = self.index.reshape(-1, 1) == other.index.reshape(1, -1), other.rows.flatten(0, 1)
        else:
            factor = other.left.flatten(0, 2).index_select(1, self.index.reshape(-1)).t()  # [n * t, m * s]
            right = other.right.flatten(0, 2)
        (n, t, _), (m, s) = self.rows.shape, (other.samples, other.sizes[1])
        pairs = self.rows.flatten(0, 1) @ right.t()
        pairs = pairs.masked_fill_(~factor, 0) if factor.dtype == torch.bool else pairs.mul_(factor)
        return pairs.reshape(n, t, m, s).sum((1, 3))

    @property
    def row_count(self) -> int | None:
        return self.count

    def some_rows(self, rows: slice, count: int) -> torch.Tensor:
        """[n, rows, b]; other positions are not read."""
        n, _, columns = self.rows.shape
        size = rows.stop - rows.start
        inside = ((self.index >= rows.start) & (self.index < rows.stop)).reshape(-1).nonzero().squeeze(1)
        samples = torch.arange(n, device=self.device).unsqueeze(1).expand_as(self.index).reshape(-1)[inside]
        places = samples * size + self.index.reshape(-1)[inside] - rows.start
        value = self.rows.new_zeros(n * size, columns)
        return value.index_add_(0, places, self.rows.flatten(0, 1)[inside]).reshape(n, size, columns)

    def listed(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The places [n, q] of looked-up numbers in row-major order, which may repeat, and their values
        [n, q].
        """
        columns = self.rows.shape[2]
        within = torch.arange(columns, device=self.device)
        places = self.index.unsqueeze(-1) * columns + within  # [n, t, columns]
        return places.flatten(1), self.rows.flatten(1)

    def times_matrices(
        self, first: Callable[[torch.Tensor], torch.Tensor], second: torch.Tensor, dtype: torch.dtype
    ) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        places, ranks = torch.unique(self.index, return_inverse=True)
        matrix = first(places)
        each = self.rows.shape[1] * (self.rows.shape[2] + matrix.shape[1] + second.shape[1]) * dtype.itemsize
        for samples in blocks(self.samples, each, self.device):
            yield samples, matrix[ranks[samples]], self.rows[samples].to(dtype) @ second

    def narrow(self, axis: int, some: slice) -> Lookup:
        if axis == 1:
            return replace(self, rows=self.rows[..., some])
        inside = (self.index >= some.start) & (self.index < some.stop)
        index = torch.where(inside, self.index - some.start, 0)
        return Lookup(index, self.rows.masked_fill(~inside.unsqueeze(2), 0), some.stop - some.start)

    def times(self, by: torch.Tensor, product: Multiply) -> Lookup:
        return replace(self, rows=product(self.rows, by.squeeze(0) if by.shape[0] == 1 else by[self.index]))

    def contract(self, axis: int, matrix: torch.Tensor) -> Term:
        """Along the table: the sum over positions of matrix[index] and rows, a product."""
        if axis == 0:
            left, right = of_one_dtype(matrix[self.index], self.rows)
            return Product(left.unsqueeze(1), right.unsqueeze(1))
        rows, matrix = of_one_dtype(self.rows, matrix)
        return replace(self, rows=rows @ matrix)
