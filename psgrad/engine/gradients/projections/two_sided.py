"""Two-sided projections: a sketch of a weight's rows and a sketch of its columns, which are applied to the
factors before these are contracted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from psgrad.engine.gradients.deferred import DeferredGradient, Placed, oriented
from psgrad.engine.gradients.inner.regions import steps
from psgrad.engine.gradients.projections.projection import (
    MatrixEntries,
    Per,
    Projection,
    element_limit,
    key_of,
)
from psgrad.engine.gradients.projections.sparse import Orders, add_sparse, value_blocks
from psgrad.engine.gradients.terms import Workspace

# The most places of one product: longer float32 sums would lose digits.
_WIDEST = 16384


@dataclass(frozen=True)
class TwoSided(Projection):
    """The Kronecker product of two matrices of random signs for each weight: A [left, rows] for its first
    axis, B [right, columns] for all others.

    A weight's gradient sum_t l_t r_t^T becomes vec(sum_t (A l_t) (B r_t)^T), left * right numbers, at the
    cost of two small products. For a convolution, A is applied to the channels of the cotangents, and B is a
    convolution with random kernels. For a table that is looked up, columns of A are looked up instead. A
    parameter of fewer than two axes is projected as by `Sparse`, with one column for each entry. This is
    exact if there are as many columns as entries. A term that is not a sum of products of rows and columns of
    the weight (masked weights, matrices of a batch, materialised values) is projected from its values.

    By default each parameter has its own columns, as LogIX projects linear layers (Choe et al., "What is
    your data worth to GPT?", 2024, section 3.2). <Px, Py> is unbiased for <x, y>, with more variance than a
    dense projection of as many columns: for weight gradients of one position, x = l r^T and y = m s^T, it is
    <Al, Am> <Br, Bs>, whose relative second moments multiply.

    Args:
        left, right: the numbers of rows of A and of B.
    """

    left: int
    right: int
    seed: int = 0
    per: Per = "parameter"
    kind: ClassVar[str] = "two-sided"

    def __post_init__(self) -> None:
        self._check(left=self.left, right=self.right)

    @property
    def width(self) -> int:
        return self.left * self.right

    @property
    def scale(self) -> float:
        return self.width**-0.5

    def _orders(self, name: str) -> Orders:
        return Orders(key_of(self.seed, self.kind, name), self.width)

    def _matrices(self, name: str, device: torch.device) -> tuple[MatrixEntries, MatrixEntries]:
        """A and B."""
        keys = [key_of(self.seed, self.kind, name, side) for side in ("left", "right")]
        return MatrixEntries(keys[0], self.left, device), MatrixEntries(keys[1], self.right, device)

    def transposed(self, rows: torch.Tensor, name: str, shape: torch.Size) -> torch.Tensor:
        if len(shape) < 2:
            return self._orders(name).read(rows, shape)
        a, b = self._matrices(name, rows.device)
        left, right = torch.arange(shape[0]), torch.arange(shape[1:].numel())
        first = a.at(left.to(rows.device)).double()
        sums = rows.reshape(len(rows), self.left, self.right) @ b.at(right.to(rows.device)).double().t()
        return (first @ sums * self.scale).reshape(len(rows), *shape)

    def add(self, sums: torch.Tensor, name: str, gradient: DeferredGradient, dtype: torch.dtype) -> None:
        if len(gradient.shape) < 2:
            add_sparse(sums, self._orders(name), gradient, dtype, 1 / self.scale)
            return
        a, b = self._matrices(name, sums.device)
        for placed in gradient.terms:
            if placed.term.factors[0].numel() and not _add_by_factors(sums, placed, dtype, a, b):
                _add_values(sums, placed, dtype, a, b)


def _add_by_factors(
    sums: torch.Tensor, placed: Placed, dtype: torch.dtype, a: MatrixEntries, b: MatrixEntries
) -> bool:
    """Add a sum of products of rows and columns of the weight, by its factors. Returns whether it is one."""
    term, layout = oriented(Placed(placed.term, placed.layout.bare)), placed.layout
    matrix = None if term is None else term.matrix_shape
    if term is None or matrix is None or matrix[2] != math.prod(layout.inner[1:]):
        return False
    columns = torch.arange(math.prod(layout.shape[1:]), device=sums.device)
    columns = columns.reshape(layout.shape[1:])[layout.slices[1:]].flatten()
    second = b.at(columns).to(dtype)

    def first(rows: torch.Tensor) -> torch.Tensor:
        return a.at(rows + layout.slices[0].start).to(dtype)

    for samples, left, right in term.times_matrices(first, second, dtype):
        sums[samples] += torch.bmm(left.transpose(1, 2), right).flatten(1)
    return True


def _add_values(
    sums: torch.Tensor, placed: Placed, dtype: torch.dtype, a: MatrixEntries, b: MatrixEntries
) -> None:
    """Add a value that is not a sum over positions of rows times columns, a few rows at a time."""
    limit, device = element_limit(sums.device, dtype), sums.device
    columns = math.prod(placed.layout.shape[1:])
    for samples, first, values in value_blocks(placed, dtype, limit, limit, Workspace(device)):
        rows = values.reshape(len(values), -1, columns)
        places = torch.arange(rows.shape[1], device=device) + first // columns
        for start in range(0, columns, _WIDEST):
            some = rows[..., start : start + _WIDEST]
            second = b.at(torch.arange(start, start + some.shape[2], device=device)).to(dtype)
            products = some @ second  # [m, rows, right]
            for few in steps(len(places), _WIDEST):
                left = a.at(places[few]).to(dtype).t()
                sums[samples] += torch.matmul(left, products[:, few]).flatten(1)
