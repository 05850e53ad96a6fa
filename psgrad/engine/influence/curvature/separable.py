"""A matrix whose entries all differ from zero as a sum of few outer products, by cross approximation: each one
is a column of what is left times a row of it, through the entry that is off by the largest share.

Bebendorf, Approximation of boundary element matrices, Numerische Mathematik 86, 2000.
"""

from __future__ import annotations

import torch

# The largest share of an entry by which the sum may be off: as an inner product of float32 numbers is rounded.
APART = 2.0**-20
# How much larger than the entry the outer products may be of which it is the sum. They are float32 numbers.
_CANCELS = 16
# Rows and columns with entries below this share of the largest one are outer products of their own, exactly.
_SMALL = 1 / 4


def separated(matrix: torch.Tensor, most: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """(u, v), [r, a] and [r, b] float64, where u^T v is a matrix of positive numbers [a, b], float64, each off
    by at most a share of APART, and no sum of float32 numbers u * v cancels; None if r would be over `most`.
    """
    left, right = [], []
    rest = matrix.clone()
    for axis, index in _exceptional(matrix, most):
        line = rest.select(axis, index)
        place = torch.zeros_like(matrix[:, 0] if axis == 0 else matrix[0])
        place[index] = 1
        left.append(place if axis == 0 else line.clone())
        right.append(line.clone() if axis == 0 else place)
        line.zero_()
    inverse, shares = 1 / matrix, torch.empty_like(matrix)
    while True:
        torch.mul(rest, inverse, out=shares)
        row, column = divmod(int(shares.abs_().argmax()), matrix.shape[1])
        if not float(shares[row, column]) > APART:
            break
        if len(left) >= most:
            return None
        left.append(rest[:, column] / rest[row, column])
        right.append(rest[row].clone())
        rest.addr_(left[-1], right[-1], alpha=-1)
    u, v = torch.stack(left), torch.stack(right)
    sizes = (u.abs().t() @ v.abs()).mul_(inverse)
    return (u, v) if float(sizes.max()) <= _CANCELS else None


def _exceptional(matrix: torch.Tensor, most: int) -> list[tuple[int, int]]:
    """(axis, index) of rows and columns that hold all small entries; none if they would be over `most`."""
    small = matrix < _SMALL * matrix.max()
    found = []
    while len(found) < most and bool(small.any()):
        counts = [small.sum(1) / small.shape[1], small.sum(0) / small.shape[0]]
        axis = int(counts[1].max() > counts[0].max())
        index = int(counts[axis].argmax())
        small.select(axis, index).zero_()
        found.append((axis, index))
    return [] if bool(small.any()) else found
