"""Rows that an index adds into a table: the gradient of an embedding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from psgrad.engine.gradients.costs import Cost
from psgrad.engine.gradients.machine import machine
from psgrad.engine.gradients.terms.base import (
    Term,
    accumulating,
    accumulating_dtype,
    norms_at_least,
    rows_of,
    square_norm,
    sum_of_products,
)


@dataclass(frozen=True)
class Rows(Term):
    """Rows added where an index says: the gradient of a table that was looked up. The one-hot factor is never
    built.
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

    def at(self, samples: slice | torch.Tensor, dtype: torch.dtype | None = None) -> Rows:
        return Rows(
            rows_of(self.index, samples), rows_of(self.rows, samples).to(dtype or self.dtype), self.count
        )

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
        # rows of one sample with the same index are added first: linear in the positions, and nothing cancels
        # afterwards
        index, order = self.index.sort(1)
        ranks = torch.cat(
            [torch.zeros_like(index[:, :1]), (index[:, 1:] != index[:, :-1]).cumsum(1)], 1
        )  # among the sample's indices
        places = (
            torch.empty_like(ranks).scatter_(1, order, ranks)
            + torch.arange(n, device=self.device).unsqueeze(1) * positions
        )
        merged = torch.zeros(n * positions, columns, dtype=rows.dtype, device=self.device)
        return square_norm(
            merged.index_add_(0, places.reshape(-1), rows.reshape(-1, columns)).reshape(rows.shape)
        )

    @property
    def summands(self) -> int:
        return self.rows.shape[1]

    @property
    def multiplications(self) -> int:
        return self.rows.shape[1] * self.rows.shape[2]

    def absolute_sums(self) -> torch.Tensor:
        return norms_at_least(self.rows, 2).sum(1)

    def materialise(self) -> torch.Tensor:
        n, _, columns = self.rows.shape
        value = torch.zeros(n * self.count, columns, dtype=self.dtype, device=self.device)
        return value.index_add_(0, self._keys(), self.rows.reshape(-1, columns)).reshape(
            n, self.count, columns
        )

    def weighted_sum(self, weights: torch.Tensor) -> torch.Tensor:
        rows = accumulating(self.rows)
        scaled = rows * weights.reshape(-1, 1, 1).to(rows.dtype)
        out = torch.zeros(self.count, rows.shape[2], dtype=rows.dtype, device=self.device)
        return out.index_add_(0, self.index.reshape(-1), scaled.reshape(-1, rows.shape[2]))

    def dot(self, vector: torch.Tensor) -> torch.Tensor:
        rows = accumulating(self.rows)
        return sum_of_products(rows, vector.to(rows.dtype)[self.index])

    def scaled(self, factor: float) -> Rows:
        return Rows(self.index, self.rows * factor, self.count)

    def kin(self) -> tuple[Any, ...]:
        return Rows, self.shape

    def plus(self, others: Sequence[Rows]) -> Rows:
        every = (self, *others)
        return Rows(
            torch.cat([term.index for term in every], 1),
            torch.cat([term.rows for term in every], 1),
            self.count,
        )

    def ways(self) -> dict[str, Cost]:
        size = self.rows.shape[1] * self.rows.shape[2] * accumulating_dtype(self.dtype).itemsize
        return {"index": Cost(machine(self.device).scattered_seconds(4 * size), size)}

    @property
    def _table_is_smaller(self) -> bool:
        """Then adding the rows up in a table costs less than sorting their indices, and takes no more room
        than they do.
        """
        return self.count <= self.index.shape[1]

    def describe(self) -> str:
        return "materialise" if self._table_is_smaller else "index"
