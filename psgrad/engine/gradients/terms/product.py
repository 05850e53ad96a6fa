"""Sums over positions of outer products: the weight gradient of every matrix product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from psgrad.engine.gradients.costs import Cost, norm_ways
from psgrad.engine.gradients.machine import machine
from psgrad.engine.gradients.terms.base import (
    Term,
    accumulating,
    accumulating_dtype,
    block_bytes,
    blocks,
    norms_at_least,
    rows_of,
    square_norm,
    sum_of_products,
    sums_of_grams,
    times_shared,
    zero_where_lost,
)


@dataclass(frozen=True)
class Product(Term):
    """Sums over positions of outer products: `ngta,ngtb->ngab`. The weight gradient of every matrix
    product.
    """

    left: torch.Tensor  # [n, g, t, a]
    right: torch.Tensor  # [n, g, t, b]

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return (self.left.shape[1], self.left.shape[3], self.right.shape[3])

    @property
    def factors(self) -> tuple[torch.Tensor, ...]:
        return (self.left, self.right)

    def at(self, samples: slice | torch.Tensor, dtype: torch.dtype | None = None) -> Product:
        return Product(
            rows_of(self.left, samples).to(dtype or self.dtype),
            rows_of(self.right, samples).to(dtype or self.dtype),
        )

    def ways(self) -> dict[str, Cost]:
        """Gram matrices cost t*t*(a+b) a group, writing the value out t*a*b; neither is needed for one
        position.
        """
        groups, rows, columns = self.shape
        sizes = groups, self.left.shape[2], rows, columns
        return norm_ways(
            machine(self.device), *sizes, accumulating_dtype(self.dtype), block_bytes(self.device)
        )

    def square_norms(self) -> torch.Tensor:
        left, right = accumulating(self.left), accumulating(self.right)
        n, groups, positions = left.shape[:3]
        if positions <= 1:
            if groups == 1:
                squares = square_norm(left), square_norm(right)
                return zero_where_lost(squares[0] * squares[1], *squares)
            squares = (left * left).sum((2, 3)), (right * right).sum((2, 3))
            return zero_where_lost((squares[0] * squares[1]).sum(1), squares[0].amax(1), squares[1].amax(1))
        if self.way() == "materialise":
            return Product(left, right).materialised_square_norms()
        out = torch.empty(n, dtype=left.dtype, device=left.device)
        for block in blocks(n, 2 * groups * positions * positions * left.element_size(), left.device):
            x, y = left[block].flatten(0, 1), right[block].flatten(0, 1)
            gram_x, gram_y = torch.bmm(x, x.transpose(1, 2)), torch.bmm(y, y.transpose(1, 2))
            out[block] = sums_of_grams(Product(left[block], right[block]), gram_x, gram_y, groups)
        return out

    @property
    def summands(self) -> int:
        return self.left.shape[2]

    def absolute_sums(self) -> torch.Tensor:
        return (norms_at_least(self.left, 3) * norms_at_least(self.right, 3)).sum((1, 2))

    def materialise(self) -> torch.Tensor:
        if (
            self.left.shape[2] == 1
        ):  # a product of matrices with one term a sum is a third slower than what it is: one pass of writing
            return self.left.transpose(2, 3) * self.right
        return torch.matmul(self.left.transpose(2, 3), self.right)

    def weighted_sum(self, weights: torch.Tensor) -> torch.Tensor:
        left, right = accumulating(self.left), accumulating(self.right)
        scale = weights.reshape(-1, 1, 1, 1).to(left.dtype)
        if left.shape[3] <= right.shape[3]:
            left = left * scale
        else:
            right = right * scale
        if left.shape[1] == 1:
            return (left.flatten(0, 2).t() @ right.flatten(0, 2)).unsqueeze(0)
        return torch.bmm(
            left.transpose(0, 1).flatten(1, 2).transpose(1, 2), right.transpose(0, 1).flatten(1, 2)
        )

    def dot(self, vector: torch.Tensor) -> torch.Tensor:
        left, right = accumulating(self.left), accumulating(self.right)
        return sum_of_products(times_shared(left, vector.to(left.dtype)), right)

    def scaled(self, factor: float) -> Product:
        return Product(self.left * factor, self.right)

    def kin(self) -> tuple[Any, ...]:
        return Product, self.shape

    def plus(self, others: Sequence[Product]) -> Product:
        every = (self, *others)
        return Product(
            torch.cat([term.left for term in every], 2), torch.cat([term.right for term in every], 2)
        )

    def transposed(self) -> Product:
        return Product(self.right, self.left)
