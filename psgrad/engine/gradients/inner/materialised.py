"""Inner products of gradients that are materialised, a bounded piece of them at a time, and multiplied as
matrices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from psgrad.engine.gradients.inner.regions import (
    SIDE_BYTES,
    Region,
    budget,
    halves,
    rows_of,
    steps,
    value_parts,
)
from psgrad.engine.gradients.terms import BLOCK_BYTES, CANCELLATION

# The largest number of elements that one product adds: the measured error in float32 is under 1e-6 of the
# gradients' lengths (for 1e6 elements: 1e-5).
LONGEST_SUM = 8192
# Samples of the left side that are multiplied with those of the right at once: products of matrices reach
# their full rate.
_LEFT_ROWS = 512
# Lengths of gradients whose products are far from float32's limits.
_SMALLEST, _LARGEST = 1e-13, 1e13


@dataclass
class Lengths:
    """Norms of one side's gradients, which are added when parts of them are materialised.

    Attributes:
        squares: [n] float64, the squared norms of the sums of terms.
        alone: [n] float64, the sums of the terms' squared norms.
    """

    squares: torch.Tensor
    alone: torch.Tensor

    @classmethod
    def zeros(cls, n: int, device: torch.device) -> Lengths:
        return cls(*torch.zeros(2, n, dtype=torch.float64, device=device))

    def add(self, samples: slice, squares: torch.Tensor, more: torch.Tensor | float) -> None:
        """Add the squared norms of a piece, and by how much those of its terms are larger together."""
        self.squares[samples] += squares
        self.alone[samples] += squares + more

    def inaccurate(self) -> torch.Tensor:
        """[n]: whether numbers came near the limits of float32, or terms cancelled."""
        comfortable = (self.squares > _SMALLEST**2) & (self.squares < _LARGEST**2)
        return ~comfortable | (self.squares < CANCELLATION * self.alone)


def bundled(regions: Sequence[Region]) -> Iterator[list[Region]]:
    """The regions in groups with at most as many elements as one product adds; a larger region is a group of
    its own.
    """
    group: list[Region] = []
    for region in sorted(regions, key=lambda region: region.elements):
        if group and sum(each.elements for each in group) + region.elements > LONGEST_SUM:
            yield group
            group = []
        group.append(region)
    if group:
        yield group


def add_by_values(
    out: torch.Tensor, bundle: Sequence[Region], dtype: torch.dtype, *, symmetric: bool
) -> tuple[Lengths, Lengths]:
    """Add the inner products over the regions to out [n, m] float64; if it is symmetric, not to its lower
    half.

    Each piece of a gradient is materialised in `dtype`: of the right side for as many samples as memory
    holds, of the left side block by block. Returns the `Lengths` of both sides; in the symmetric case of the
    right side only.
    """
    n, m = out.shape
    lengths = Lengths.zeros(n, out.device), Lengths.zeros(m, out.device)
    pieces = _pieces(bundle)
    bytes_per_row = dtype.itemsize * max(sum(width for *_, width in piece) for piece in pieces)
    limit = max(1, budget(SIDE_BYTES, out.device) // max(1, bytes_per_row))
    for columns in steps(m, limit):
        for piece in pieces:
            right = _matrix(bundle, piece, 1, columns, dtype, lengths[1])
            if symmetric:
                _add_half(out[columns, columns], right)
            for rows in steps(columns.start if symmetric else n, min(limit, _LEFT_ROWS)):
                unseen = lengths[0] if columns.start == 0 and not symmetric else None
                _add_product(out[rows, columns], _matrix(bundle, piece, 0, rows, dtype, unseen), right)
    return (lengths[1], lengths[1]) if symmetric else lengths


# A region by its place in the bundle, its rows and their number; the width of their values.
Piece = list[tuple[int, slice | None, int, int]]


def _pieces(bundle: Sequence[Region]) -> list[Piece]:
    """The pieces that are materialised at once: whole regions, or some rows of the only one."""
    region = bundle[0]
    rows = rows_of(region.terms) if region.is_aligned else 1
    if len(bundle) > 1 or rows == 1 or region.elements <= LONGEST_SUM:
        return [[(place, None, 1, each.elements) for place, each in enumerate(bundle)]]
    columns = region.elements // rows
    return [
        [(0, some, rows, columns * (some.stop - some.start))] for some in steps(rows, LONGEST_SUM // columns)
    ]


def _matrix(
    bundle: Sequence[Region],
    piece: Piece,
    side: int,
    samples: slice,
    dtype: torch.dtype,
    lengths: Lengths | None,
) -> torch.Tensor:
    """[k, width]: one side's piece of some samples' gradients, the regions side by side."""
    width = sum(width for *_, width in piece)
    region = bundle[piece[0][0]]
    if len(piece) == 1 and len((region.left, region.right)[side]) == 1:
        return _part(bundle, piece, side, samples, dtype, lengths, None)
    whole = torch.empty(samples.stop - samples.start, width, dtype=dtype, device=region.terms[0].device)
    # some samples at a time: what is copied is still in the processor's cache
    for some in steps(0, budget(BLOCK_BYTES, whole.device) // max(1, width * dtype.itemsize), samples):
        _part(
            bundle,
            piece,
            side,
            some,
            dtype,
            lengths,
            whole[some.start - samples.start : some.stop - samples.start],
        )
    return whole


def _part(
    bundle: Sequence[Region],
    piece: Piece,
    side: int,
    samples: slice,
    dtype: torch.dtype,
    lengths: Lengths | None,
    into: torch.Tensor | None,
) -> torch.Tensor:
    """As `_matrix`, in `into`, which is needed for more than one term."""
    alone: torch.Tensor | float = 0.0
    start = 0
    for place, rows, cut, width in piece:
        region = bundle[place]
        terms = [placed.at(samples, dtype) for placed in (region.left, region.right)[side]]
        parts = value_parts(terms, region.elements, rows, cut)
        if into is None:
            into = parts[0]
        else:
            column = into[:, start : start + width].copy_(parts[0])
            for part in parts[1:]:
                column += part
            if len(parts) > 1 and lengths is not None:  # the terms' squared norms minus that of their sum
                squares = [
                    torch.linalg.vector_norm(value, dim=1).double().square_() for value in (column, *parts)
                ]
                alone = alone + torch.stack(squares[1:]).sum(0) - squares[0]
        start += width
    assert into is not None
    if lengths is not None:
        lengths.add(samples, torch.linalg.vector_norm(into, dim=1).double().square_(), alone)
    return into


def _add_half(out: torch.Tensor, matrix: torch.Tensor) -> None:
    """Add the products of a matrix with its own transpose, the part right of the diagonal."""
    for rows in steps(len(matrix), halves(len(matrix), True, len(matrix))):
        _add_product(out[rows, rows.start :], matrix[rows], matrix[rows.start :])


def _add_product(out: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add the sums over columns of left right^T, at most LONGEST_SUM of them in the matrices' own
    precision.
    """
    for some in steps(left.shape[1], LONGEST_SUM):
        out += left[:, some] @ right[:, some].t()
