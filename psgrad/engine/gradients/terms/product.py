"""Sums over positions of outer products: the weight gradient of every matrix product."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from psgrad.engine.gradients.costs import Machine, cheapest, norm_order_costs
from psgrad.engine.gradients.machine import machine
from psgrad.engine.gradients.terms.numerics import (
    accumulating,
    accumulating_dtype,
    block_bytes,
    blocks,
    of_one_dtype,
    sum_of_products,
    times_shared,
)
from psgrad.engine.gradients.terms.term import Multiply, OuterProducts, joined, sums_of_grams


@dataclass(frozen=True)
class Product(OuterProducts):
    """Sums over positions of outer products: `ngta,ngtb->ngab`. The weight gradient of every matrix
    product.
    """

    left: torch.Tensor  # [n, g, t, a]
    right: torch.Tensor  # [n, g, t, b]
    position_axis = 2

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return (self.left.shape[1], self.left.shape[3], self.right.shape[3])

    @property
    def factors(self) -> tuple[torch.Tensor, ...]:
        return (self.left, self.right)

    def order(self) -> str:
        """As Term.order. Gram matrices cost t*t*(a+b) a group, the value t*a*b; neither is needed for one
        position.
        """
        groups, rows, columns = self.shape
        sizes = groups, self.left.shape[2], rows, columns
        block, kind = block_bytes(self.device), accumulating_dtype(self.dtype)
        return cheapest(norm_order_costs(machine(self.device), *sizes, kind, block), block)

    def square_norms(self) -> torch.Tensor:
        if self.left.shape[2] <= 1:
            size = 8 * sum(f.shape[1:].numel() for f in self.factors)
            some = [self.at(block) for block in blocks(self.samples, size, self.device)]
            return joined([part.position_square_norms() for part in some], self)
        left, right = accumulating(self.left), accumulating(self.right)
        n, groups, positions = left.shape[:3]
        if self.order() == "materialise":
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

    def materialise(self) -> torch.Tensor:
        # for one position, a matrix product takes a third longer than an elementwise product
        if self.left.shape[2] == 1:
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

    @property
    def is_outer_product(self) -> bool:
        """Whether each group of a sample's value is one outer product."""
        return self.left.shape[2] == 1

    @property
    def matrix_shape(self) -> tuple[int, int, int] | None:
        return self.shape  # type: ignore[return-value]

    def square_sums(self) -> torch.Tensor | None:
        """The sum of squares for one outer product per sample: sum_n (l_n r_n^T)^2 = (L^2)^T (R^2)."""
        if not self.is_outer_product:
            return None
        groups, rows, columns = self.shape
        total = torch.zeros(groups, rows, columns, dtype=torch.float64, device=self.device)
        for block in blocks(self.samples, 16 * groups * (rows + columns), self.device):
            left, right = (
                factor[block].double().square().squeeze(2).transpose(0, 1) for factor in self.factors
            )
            total.baddbmm_(left.transpose(1, 2), right)
        return total

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        return (*self.left.shape[1:], self.right.shape[3])

    def at_positions(self, some: slice) -> Product:
        return Product(self.left[:, :, some], self.right[:, :, some])

    def position_square_norms(self) -> torch.Tensor:
        left, right = (torch.linalg.vector_norm(f.double(), dim=3) for f in self.factors)
        return (left * right).square_().sum((1, 2))

    def tile_products(self, other: Product) -> torch.Tensor:
        """[n, m]: the inner products of all n samples with all m of another product."""
        (n, groups, t, _), (m, _, s, _) = self.left.shape, other.left.shape
        if groups == 1:
            left = self.left.flatten(0, 2) @ other.left.flatten(0, 2).t()
            pairs = left.mul_(self.right.flatten(0, 2) @ other.right.flatten(0, 2).t())
        else:
            flat = [f.transpose(0, 1).flatten(1, 2) for f in (*self.factors, *other.factors)]  # [g, n * t, a]
            pairs = torch.bmm(flat[0], flat[2].transpose(1, 2)).mul_(
                torch.bmm(flat[1], flat[3].transpose(1, 2))
            )
        if groups == t == s == 1:
            return pairs
        return pairs.reshape(groups, n, t, m, s).sum((0, 2, 4))

    @property
    def row_count(self) -> int | None:
        return self.shape[1] if self.shape[0] == 1 else self.shape[0]

    def materialise_seconds(self, dtype: torch.dtype, on: Machine) -> float:
        groups, t, a, b = self.sizes
        size = math.prod(self.shape) * self.samples * dtype.itemsize
        return on.matmul_seconds(self.samples * groups, a, b, t, dtype) + on.stream_seconds(size)

    def times_matrices(
        self, first: Callable[[torch.Tensor], torch.Tensor], second: torch.Tensor, dtype: torch.dtype
    ) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        groups, positions, rows, columns = self.sizes
        matrix = first(torch.arange(groups * rows, device=self.device))
        each = groups * positions * (rows + columns + matrix.shape[1] + second.shape[1]) * dtype.itemsize
        for samples in blocks(self.samples, each, self.device):
            some = self.at(samples, dtype)
            # one weight for all samples: a product with a matrix, where there are no groups
            left = some.left @ (matrix if groups == 1 else matrix.view(groups, rows, -1))
            yield samples, left.flatten(1, 2), (some.right @ second).flatten(1, 2)

    def narrow(self, axis: int, some: slice) -> Product:
        if axis == 0:
            return Product(self.left[:, some], self.right[:, some])
        if axis == 1:
            return Product(self.left[..., some], self.right)
        return Product(self.left, self.right[..., some])

    def times(self, by: torch.Tensor, product: Multiply) -> Product | None:
        if by.shape[2] == 1:
            return Product(*of_one_dtype(product(self.left, by.transpose(1, 2)), self.right))
        return Product(*of_one_dtype(self.left, product(self.right, by))) if by.shape[1] == 1 else None

    def contract(self, axis: int, matrix: torch.Tensor) -> Product | None:
        if axis == 0:
            return None
        factor, matrix = of_one_dtype(self.factors[axis - 1], matrix)
        left, right = (factor @ matrix, self.right) if axis == 1 else (self.left, factor @ matrix)
        return Product(*of_one_dtype(left, right))
