"""Rows as factors of low rank: the matrix that a row has for each parameter, as a few vectors for its rows
and its columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from psgrad.engine.gradients.projections.projector import Columns, Projector
from psgrad.engine.influence.index.products import Queries, Rows
from psgrad.errors import ConfigError

# Beyond the rank that is kept, and how often: of the subspace iteration that finds it.
_MORE, _ROUNDS = 4, 2


@dataclass(frozen=True)
class MatrixColumns:
    """The columns of a parameter in a row: a matrix [height, width], kept by `rank` vectors of either side;
    as it is where rank is None.
    """

    columns: Columns
    height: int
    width: int
    rank: int | None

    @property
    def parts(self) -> list[int]:
        """The sizes of what is kept: the vectors for the rows, then those for the columns."""
        if self.rank is None:
            return [self.height * self.width]
        return [self.height] * self.rank + [self.width] * self.rank


class RowForm:
    """How the k numbers of a row are kept on the disk: as k' numbers.

    Args:
        projector: which makes the rows.
        rank: of the factors that are kept for each parameter, where they are fewer numbers than its matrix;
            None keeps the rows as they are.

    Attributes:
        spans: the columns, of k', that have one scale each in 8 bits.
        width: k'.

    Raises ConfigError for a rank where parameters have no columns of their own.
    """

    def __init__(self, projector: Projector, rank: int | None) -> None:
        self.rank, self._restored_width = rank, projector.width
        self.spans, self.width = projector.spans, projector.width
        if rank is None:
            return
        shapes = projector.matrices
        if shapes is None:
            raise ConfigError(
                f"an index with rank: {rank} and projection: {projector.kind}",
                expected="projection: two-sided or none, which have a matrix for each parameter",
                next_step="choose one of these, or leave rank out",
            )
        self.matrices = [
            MatrixColumns(columns, height, width, rank if rank * (height + width) < height * width else None)
            for columns, height, width in shapes
        ]
        ends = accumulate((size for each in self.matrices for size in each.parts), initial=0)
        self.spans = tuple(slice(start, stop) for start, stop in pairwise(ends))
        self.width = self.spans[-1].stop

    def shortened(self, rows: torch.Tensor) -> torch.Tensor:
        """[b, k'] of rows [b, k] float64."""
        if self.rank is None:
            return rows
        return torch.cat([part for each in self.matrices for part in _kept(rows[:, each.columns], each)], 1)

    def restored(self, rows: Rows) -> Rows:
        """Rows of k columns, from those of k' that were read."""
        return rows if self.rank is None else FactoredRows(rows, self)

    def product(self, kept: torch.Tensor) -> torch.Tensor:
        """[b, k] of kept numbers [b, k']: the factors multiplied."""
        found = kept.new_zeros(len(kept), self._restored_width)
        for each, part in zip(self.matrices, self._parts(kept), strict=True):
            if each.rank is None:
                found[:, each.columns] = part
            else:
                left, right = part.split([each.rank * each.height, each.rank * each.width], 1)
                u, v = left.unflatten(1, (each.rank, -1)), right.unflatten(1, (each.rank, -1))
                found[:, each.columns] = torch.bmm(u.transpose(1, 2), v).flatten(1)
        return found

    def _parts(self, kept: torch.Tensor) -> Iterator[torch.Tensor]:
        return iter(kept.split([sum(each.parts) for each in self.matrices], 1))


@dataclass(frozen=True)
class FactoredRows:
    """Rows [b, k] whose factors [b, k'] are kept; multiplied whenever they are used."""

    kept: Rows
    form: RowForm

    def __len__(self) -> int:
        return len(self.kept)

    def double(self) -> torch.Tensor:
        return self.form.product(self.kept.double())

    def products(self, queries: Queries) -> torch.Tensor:
        return self.double()[:, queries.columns] @ queries.own.t()

    def norms(self, columns: Columns) -> torch.Tensor:
        return self.double()[:, columns].norm(dim=1)


def _kept(values: torch.Tensor, matrix: MatrixColumns) -> list[torch.Tensor]:
    if matrix.rank is None:
        return [values]
    u, v = low_rank(values.view(-1, matrix.height, matrix.width), matrix.rank)
    return [u.flatten(1), v.flatten(1)]


def low_rank(matrices: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """U [b, r, o] and V [b, r, i] of matrices [b, o, i] float64, whose product U'V is nearest to them but for
    what two rounds of subspace iteration leave; exact for matrices of rank r + 4 or less, cut to r.

    Both have the square root of the singular values, so that neither is much larger than the other.
    """
    size = min(rank + _MORE, *matrices.shape[1:])
    random = torch.Generator().manual_seed(0)
    start = torch.randn(matrices.shape[2], size, generator=random, dtype=matrices.dtype)
    basis = torch.linalg.qr(matrices @ start)[0]
    for _ in range(_ROUNDS):
        basis = torch.linalg.qr(matrices @ torch.linalg.qr(matrices.mT @ basis)[0])[0]
    left, sizes, right = torch.linalg.svd(basis.mT @ matrices, full_matrices=False)
    roots = sizes[:, :rank].sqrt().unsqueeze(2)
    return (basis @ left).mT[:, :rank] * roots, right[:, :rank] * roots
