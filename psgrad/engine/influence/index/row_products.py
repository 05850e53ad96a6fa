"""Products of training rows with queries, in the form in which the rows are kept: numbers in floating point,
whole numbers of 8 bits with scales, or factors of low rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Protocol

import torch

from psgrad.engine.gradients.projections.projector import Columns, Projector
from psgrad.engine.transforms.private_torch import int8_product
from psgrad.errors import ConfigError

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

# The largest 8-bit number of a row.
LARGEST = 127
# A query's numbers are whole numbers of three digits to the base 256, each -128 to 127: 24 bits, as float32.
_DIGITS = 3
_TOGETHER = 16
_LARGEST_OF_QUERY = LARGEST * (1 + 256 + 256**2)
# The number of products of 8-bit numbers, each up to 2^14, whose sum is less than 2^31; and at most 2^24, up
# to which float32 has all whole numbers.
_COLUMNS_OF_INT32, _COLUMNS_OF_FLOAT32 = 1 << 16, 1 << 10


class Queries:
    """Queries [m, k] float64, the other factor of rows [b, k], in some of the k columns."""

    def __init__(self, matrix: torch.Tensor, columns: Columns) -> None:
        self._matrix, self.columns = matrix, columns
        self.own = matrix[:, columns]
        self._whole: dict[int, WholeQueries] = {}
        self._taken = set(range(matrix.shape[1])[columns] if isinstance(columns, slice) else columns)

    def __len__(self) -> int:
        return len(self.own)

    def takes(self, span: slice) -> bool:
        """Whether these columns are among those of the queries: all of them, or none."""
        return span.start in self._taken

    def whole(self, span: slice) -> WholeQueries:
        """The queries in these columns, in whole numbers; computed once."""
        if span.start not in self._whole:
            self._whole[span.start] = WholeQueries.of(self._matrix[:, span])
        return self._whole[span.start]


class IndexRows(Protocol):
    """b rows of k numbers."""

    def __len__(self) -> int: ...

    def double(self) -> torch.Tensor:
        """[b, k] float64."""

    def products(self, queries: Queries) -> torch.Tensor:
        """[b, m] float64."""

    def norms(self, columns: Columns) -> torch.Tensor:
        """[b] float64, of some columns."""


@dataclass(frozen=True)
class FloatRows:
    """Rows [b, k] of floating-point numbers."""

    values: torch.Tensor

    def __len__(self) -> int:
        return len(self.values)

    def double(self) -> torch.Tensor:
        return self.values.double()

    def products(self, queries: Queries) -> torch.Tensor:
        return self.values[:, queries.columns].double() @ queries.own.t()

    def norms(self, columns: Columns) -> torch.Tensor:
        return self.values[:, columns].double().norm(dim=1)


@dataclass(frozen=True)
class Int8Rows:
    """Rows of 8-bit numbers times scales.

    values: int8 [b, k]. scales: [b, s] float64, one for each span of columns. spans: s of them, which cover
    all columns.

    Products with a query are exact but for the query's rounding to 24 bits (and that of the final float64
    operations): they are sums of whole numbers.
    """

    values: torch.Tensor
    scales: torch.Tensor
    spans: Sequence[slice]

    def __len__(self) -> int:
        return len(self.values)

    def double(self) -> torch.Tensor:
        widths = torch.tensor([span.stop - span.start for span in self.spans])
        return self.values.double() * self.scales.repeat_interleave(widths, 1)

    def products(self, queries: Queries) -> torch.Tensor:
        found = torch.zeros(len(self), len(queries), dtype=torch.float64)
        for number, span in enumerate(self.spans):
            if queries.takes(span):
                products = queries.whole(span).products(self.values[:, span])
                found.addcmul_(products, self.scales[:, number].unsqueeze(1))
        return found

    def norms(self, columns: Columns) -> torch.Tensor:
        return self.double()[:, columns].norm(dim=1)


def quantised(rows: torch.Tensor, spans: Sequence[slice]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [b, k] float64, of numbers up to 1 in size, as int8 [b, k] and scales [b, s] float32.

    The error of a number is at most half of its scale, which is 1/127 of the largest number of its row in its
    span.
    """
    values, scales = torch.empty(rows.shape, dtype=torch.int8), torch.empty(len(rows), len(spans))
    for number, span in enumerate(spans):
        part = rows[:, span]
        # For zeros, and for numbers that float32 does not have, any scale is right.
        scale = (part.abs().amax(1) / LARGEST).float().clamp(min=torch.finfo(torch.float32).tiny)
        values[:, span] = (part / scale.double().unsqueeze(1)).round().to(torch.int8)
        scales[:, number] = scale
    return values, scales


@dataclass(frozen=True)
class WholeQueries:
    """Queries in whole numbers.

    digits: int8 [a, k]: the last digits of all queries, then those before, then zeros up to a multiple of 16,
    for which products are fastest. scales: [m] float64; NaN for a query that has no finite numbers.
    """

    digits: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def of(cls, queries: torch.Tensor) -> WholeQueries:
        """The whole numbers of queries [m, k] float64."""
        largest = queries.abs().amax(1)
        scales = torch.where(largest == 0, 1.0, largest / _LARGEST_OF_QUERY)
        scales = scales.where(scales.isfinite(), torch.nan)
        left = (queries / scales.unsqueeze(1)).round().nan_to_num(0.0).long()
        digits = []
        for _ in range(_DIGITS):
            digit = (left + 128) % 256 - 128
            digits.append(digit.to(torch.int8))
            left = (left - digit) // 256
        digits.append(digits[0].new_zeros(-_DIGITS * len(queries) % _TOGETHER, queries.shape[1]))
        return cls(torch.cat(digits), scales)

    def products(self, values: torch.Tensor) -> torch.Tensor:
        """[b, m] float64 with int8 rows [b, k]."""
        found = whole_products(values, self.digits)[:, : _DIGITS * len(self.scales)]
        last, middle, first = found.split(len(self.scales), 1)
        return last.add_(middle, alpha=256).add_(first, alpha=256**2).mul_(self.scales)


def whole_products(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """[a, b] float64: the exact products of int8 [a, k] and int8 [b, k]."""
    # PyTorch's product of single columns is wrong: it takes the second factor's strides for another shape's.
    exact = int8_products_are_exact() and first.shape[1] > 1
    product: Product = int8_product if exact else _by_float32
    most = _COLUMNS_OF_INT32 if exact else _COLUMNS_OF_FLOAT32
    pieces = zip(first.split(most, 1), second.split(most, 1), strict=True)
    found = [product(one, other.t()).double() for one, other in pieces]
    return found[0] if len(found) == 1 else torch.stack(found).sum(0)


def _by_float32(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return first.float() @ second.float()


@lru_cache(maxsize=1)
def int8_products_are_exact() -> bool:
    """Whether PyTorch's product of 8-bit numbers is there for this processor, and keeps all digits. Without
    instructions for it (VNNI) sums of two products are cut off at 16 bits.
    """
    return _is_exact(int8_product)


def _is_exact(product: Product) -> bool:
    numbers = torch.tensor([-128, -127, 127, 1, 0], dtype=torch.int8)
    pairs = torch.cartesian_prod(numbers, numbers)
    first, second = pairs[:, :1].expand(-1, 64).contiguous(), pairs[:, 1:].expand(-1, 64).contiguous()
    try:
        found = product(first, second.t())
    except (RuntimeError, NotImplementedError):
        return False
    return found.equal((first.double() @ second.double().t()).to(found.dtype))


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
                f"an index with rank: {rank} and projection: {projector.kind}; expected projection:"
                " two-sided or none, which have a matrix for each parameter",
                hint="choose one of these, or leave rank out",
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

    def restored(self, rows: IndexRows) -> IndexRows:
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

    kept: IndexRows
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
