"""Inner products of outer products through a matrix of weights that is nearly one of few outer products.

sum_ij w_ij (x_i y_j) (x'_i y'_j) takes a * b multiplications for each pair of samples, and a + b for each
outer product of which w is the sum. The inverse eigenvalues of a block, 1 / (values + damping), are such a
sum but for the directions with large values, which are the corner.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# The largest share of an entry by which a sum may be off: as a sum of many float32 numbers is rounded.
APART = 2.0**-18
# How many times as large as an entry the numbers may be of which it is the sum, as these are float32 numbers.
_CANCELS = 16
# The share of rows, and of columns, in the corner.
_CORNER = 1 / 5
# Multiplications that take as long as one entry of an outer product: to subtract it, and to find the largest.
_SUBTRACTION = 20
# Numbers of an intermediate.
_NUMBERS = 1 << 22


@dataclass(frozen=True)
class Separable:
    """A matrix [a, b] whose rows and columns are in another order: `corner` holds the first of both, and the
    rest is left' right.

    left: [r, a], right: [r, b], corner: [p, q], float64. rows: [a], columns: [b], int64, the order.
    """

    left: torch.Tensor
    right: torch.Tensor
    corner: torch.Tensor
    rows: torch.Tensor
    columns: torch.Tensor

    @classmethod
    def of(cls, matrix: torch.Tensor, pairs: int) -> Separable | None:
        """A matrix of positive numbers [a, b] float64, each off by at most a share of APART; None where that
        would not halve the work of inner products of `pairs` pairs of samples, or would cancel in float32.

        By cross approximation: each outer product is a column of the remainder times a row of it, through
        the entry that is off by the largest share. Bebendorf, "Approximation of boundary element matrices",
        Numerische Mathematik 86 (2000).
        """
        rows, columns = matrix.sum(1).argsort(), matrix.sum(0).argsort()
        rest = matrix[rows][:, columns]
        (a, b), (p, q) = rest.shape, (int(_CORNER * size) for size in rest.shape)
        most = int(pairs * (a * b / 2 - p * q) / (pairs * (a + b) + _SUBTRACTION * a * b))
        corner, inverse, shares = rest[:p, :q].clone(), 1 / rest, torch.empty_like(rest)
        inverse[:p, :q] = 0
        left: list[torch.Tensor] = []
        right: list[torch.Tensor] = []
        while True:
            torch.mul(rest, inverse, out=shares)
            row, column = divmod(int(shares.abs_().argmax()), b)
            if float(shares[row, column]) <= APART:
                break
            if len(left) >= most:
                return None
            left.append(rest[:, column] / rest[row, column])
            right.append(rest[row].clone())
            rest.addr_(left[-1], right[-1], alpha=-1)
        found = cls(torch.stack(left), torch.stack(right), corner, rows, columns)
        sizes = (found.left.abs().t() @ found.right.abs()) * inverse
        return found if float(sizes.max()) <= _CANCELS else None

    def inner(
        self, one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]
    ) -> torch.Tensor:
        """[n, m] float64: the inner products of outer products of [n, a] and [n, b] with those of [m, a] and
        [m, b].
        """
        (x, y), (x_other, y_other) = ((x[:, self.rows], y[:, self.columns]) for x, y in (one, other))
        left, right, corner = (part.to(x) for part in (self.left, self.right, self.corner))
        p, q = corner.shape
        total = x.new_zeros(len(x), len(x_other), dtype=torch.float64)
        sides = (slice(p), slice(p, None)), (slice(q), slice(q, None))
        for u, v in zip(left, right, strict=True):
            (corner_rows, other_rows), (corner_columns, other_columns) = (
                [weighted[:, some] @ other[:, some].t() for some in parts]
                for weighted, other, parts in zip((x * u, y * v), (x_other, y_other), sides, strict=True)
            )
            total += other_rows * (corner_columns + other_columns) + corner_rows * other_columns
        x, x_other, y, y_other = x[:, :p], x_other[:, :p], y[:, :q], y_other[:, :q]
        step = max(1, _NUMBERS // max(1, y.numel(), corner.numel()))
        for start in range(0, len(x_other), step):
            some = slice(start, start + step)
            values = x_other[some].unsqueeze(2) * corner * y_other[some].unsqueeze(1)
            total[:, some] += (torch.matmul(x, values) * y).sum(2, dtype=torch.float64).t()
        return total
