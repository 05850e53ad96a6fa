"""Two-sided projections: a sketch of a weight's rows and a sketch of its columns, which are applied to the
factors before these are contracted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from psgrad.engine.gradients.deferred import DeferredGradient, Placed
from psgrad.engine.gradients.projections.projection import (
    MatrixEntries,
    Per,
    Projection,
    Sums,
    element_limit,
    key_of,
)
from psgrad.engine.gradients.projections.sparse import (
    Orders,
    ParameterIndices,
    Slice,
    add_sparse,
    slices,
)

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
    the weight (masked weights, matrices of a batch, materialised values) is projected slice by slice.

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

    def add(self, sums: Sums, name: str, gradient: DeferredGradient) -> None:
        if len(gradient.shape) < 2:
            add_sparse(sums, self._orders(name), gradient, 1 / self.scale)
            return
        sides = _SideMatrices(self, name, math.prod(gradient.shape[1:]), sums.device)
        for placed in gradient.terms:
            if not placed.term.factors[0].numel():
                continue
            places = placed.term.matrix_places()
            matrices = (
                sides.apart(ParameterIndices(placed.layout), *places, sums.dtype)
                if places is not None
                else None
            )
            if matrices is None:
                _add_slices(sums, sides, placed)
                continue
            first, second, is_swapped = matrices
            for samples, left, right in placed.term.times_matrices(first, second, sums.dtype):
                a, b = (right, left) if is_swapped else (left, right)
                sums.add(samples, torch.bmm(a.transpose(1, 2), b).flatten(1))


class _SideMatrices:
    """The two matrices of one parameter, computed by rows and columns of the parameter when they are
    needed.
    """

    def __init__(self, projection: TwoSided, name: str, columns: int, device: torch.device) -> None:
        self.sizes, self.columns = (projection.left, projection.right), columns
        keys = (key_of(projection.seed, projection.kind, name, side) for side in ("left", "right"))
        self._entries = [MatrixEntries(key, size, device) for key, size in zip(keys, self.sizes, strict=True)]

    def of(self, side: int, places: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """[m, left] of A for these rows of the parameter (side 0), or [m, right] of B for these columns (side
        1).
        """
        return self._entries[side].at(places).to(dtype)

    def apart(
        self, places: ParameterIndices, first: torch.Tensor, count: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, bool] | None:
        """The matrices for a term whose places are pairs (i, j), i * count + j in its own order.

        Args:
            first: int64 [m], the values of i that are asked for.
            count: the j's.

        Returns:
            The matrix for i [m, k], that for j [count, k'], and whether i goes along the parameter's columns
            and j along its rows; None where the pairs aren't rows and columns of the parameter.
        """
        device = first.device
        one = _tensor(places.of(first * count, device), device)
        other = _tensor(places.of(torch.arange(count, device=device), device), device)
        origin = _tensor(places.of(torch.zeros(1, dtype=torch.int64, device=device), device), device)
        for rows, columns, swapped in ((one, other, False), (other, one, True)):
            # place(i, j) = place(i, 0) + place(0, j) - place(0, 0): rows differ by whole rows, columns stay
            # within the first one's
            if not bool(
                ((rows - origin) % self.columns == 0).all()
                & (columns // self.columns == origin // self.columns).all()
            ):
                continue
            a, b = self.of(0, rows // self.columns, dtype), self.of(1, columns % self.columns, dtype)
            return (b, a, True) if swapped else (a, b, False)
        return None


def _tensor(places: range | torch.Tensor, device: torch.device) -> torch.Tensor:
    return (
        places if isinstance(places, torch.Tensor) else torch.arange(places.start, places.stop, device=device)
    )


def _add_slices(sums: Sums, sides: _SideMatrices, placed: Placed) -> None:
    """Add a value that is not a sum over positions of rows times columns, in slices: whole rows, parts of a
    row, or single places.
    """
    limit = element_limit(sums.device, sums.dtype)
    width = max(1, min(_WIDEST, limit // sums.columns))
    for part in slices(placed, sums.dtype, limit, width):
        if isinstance(part.places, range):
            for piece in _by_rows(part, sides.columns, max(1, limit // sides.sizes[1])):
                sums.add(piece.samples, _of_rows(piece, sides, sums.dtype))
            continue
        for cut in part.cut(width):
            places = cut.place_tensor()
            a, b = (
                sides.of(0, places // sides.columns, sums.dtype),
                sides.of(1, places % sides.columns, sums.dtype),
            )
            sums.add_product(cut.samples, cut.values, (a.unsqueeze(2) * b.unsqueeze(1)).flatten(1))


def _by_rows(part: Slice, columns: int, width: int) -> Iterator[Slice]:
    """A slice of neighbouring places in slices of whole rows of the parameter, or within one row if it begins
    or ends in one or a row is wider than `width`.
    """
    assert isinstance(part.places, range)
    start, stop = part.places.start, part.places.stop
    at = start
    while at < stop:
        if at % columns == 0 and columns <= min(width, stop - at):
            size = (stop - at) // columns * columns
        else:
            size = min(width, stop - at, columns - at % columns)
        yield Slice(part.values[:, at - start : at - start + size], range(at, at + size), part.samples)
        at += size


def _of_rows(piece: Slice, sides: _SideMatrices, dtype: torch.dtype) -> torch.Tensor:
    """[m, left * right] of whole rows, or of neighbours in one row."""
    places, device = piece.places, piece.values.device
    rows = -(-len(places) // sides.columns)
    size = len(places) // rows
    a = sides.of(0, torch.arange(rows, device=device) + places[0] // sides.columns, dtype)
    b = sides.of(1, torch.arange(size, device=device) + places[0] % sides.columns, dtype)
    values = piece.values.reshape(-1, size) @ b
    return torch.matmul(a.t(), values.view(-1, rows, b.shape[1])).flatten(1)
