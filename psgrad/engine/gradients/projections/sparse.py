"""Sparse projections, which add each entry of a gradient to one column or subtract it; and the walk over a
deferred gradient in blocks: neighbouring entries of some samples' gradients at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F

from psgrad.engine.gradients.deferred import DeferredGradient, Placed, oriented
from psgrad.engine.gradients.inner.regions import rows_of, steps
from psgrad.engine.gradients.layout import AxisSlice
from psgrad.engine.gradients.projections.projection import (
    PER_WORD,
    Per,
    Projection,
    below,
    cached,
    element_limit,
    key_of,
    sign_at,
    signs,
    streams,
    words_at,
)
from psgrad.engine.gradients.terms import Lookup, Product, Term, Workspace


def value_blocks(
    placed: Placed, dtype: torch.dtype, limit: int, together: int, memory: Workspace
) -> Iterator[tuple[slice, int, torch.Tensor]]:
    """The values of a placed term in blocks: samples, the first place in the parameter, row-major, and the
    values [m, q] at it and the next ones. Places outside of a window, where they are zero, may be left out.

    limit: the largest number of values of a block, if possible. together: of samples of a block. memory: of
    the values, which are valid until the next block.
    """
    term, rows, first = _whole_rows(placed)
    size = math.prod(placed.layout.shape if term is None else term.shape)
    step = max(1, min(together, limit // max(size // rows, 1)))
    for samples in steps(placed.term.samples, step):
        count = samples.stop - samples.start
        if term is None:
            yield samples, 0, placed.at(samples, dtype).materialise().reshape(count, size)
            continue
        some = term.at(samples, dtype)
        for part in steps(rows, limit // max(size // rows * count, 1)):
            yield samples, first + part.start * (size // rows), _values_of_rows(some, part, rows, memory)


def _values_of_rows(term: Term, part: slice, rows: int, memory: Workspace) -> torch.Tensor:
    """[m, q] of these rows of so many. Of one outer product a sample the samples are neighbours in memory, as
    a sparse projection reads them.
    """
    if isinstance(term, Product) and term.is_outer_product and term.shape[0] == 1:
        left, right = (factor.flatten(1).t().contiguous() for factor in term.factors)
        out = memory.tensor("values", (part.stop - part.start, *right.shape), term.dtype)
        return torch.mul(left[part].unsqueeze(1), right, out=out).flatten(0, 1).t()
    return term.some_rows(part, rows).reshape(term.samples, -1)


def _whole_rows(placed: Placed) -> tuple[Term | None, int, int]:
    """A term whose elements are neighbours in the parameter, in its order; how many rows its value can be cut
    into; and the place of its first element. No term for another one.
    """
    (run, _), *others = placed.layout.runs or [(AxisSlice(0, 1), 1)]
    term = oriented(Placed(placed.term, placed.layout.bare))
    if term is None or any(other.size != length for other, length in others):
        return None, 1, 0
    return term, rows_of([term]), run.start * math.prod(placed.layout.shape[1:])


# Samples that are added up together: enough that they share the cost of the matrix, on a CPU few enough that
# a slice stays in the caches.
_SAMPLES = {"cpu": 64, "cuda": 1024}
# Segments a slice.
_SEGMENTS = 8
# Indices and signs of a slice are kept for the next samples if there are at most this many: hashing them
# takes twice as long as adding them up.
_CACHED = 1 << 16


@dataclass(frozen=True)
class Sparse(Projection):
    """One entry of -1 or 1 for each place in a parameter: a count sketch (Charikar, Chen and Farach-Colton,
    "Finding frequent items in data streams", 2002).

    That paper draws a column for each place independently. Here the places of a parameter are cut into
    segments of k, and each segment is added to the k columns in a random order, with independent signs:
    column j gets place a * j + b mod k, with random a and b for each segment. Two places of different
    segments are in one column with the same probability as in that paper (1 / k), two places of one segment
    never. So the estimate is unbiased, and its variance

        (|x|^2 |y|^2 + <x, y>^2 - sum over segments s of (|x_s|^2 |y_s|^2 + <x_s, y_s>^2)) / k

    is at most that of independent columns or of a matrix without zeros. Whole segments are gathered, which
    takes a few instructions for each entry.
    """

    k: int
    seed: int = 0
    per: Per = "total"
    kind: ClassVar[str] = "sparse"

    def __post_init__(self) -> None:
        self._check(k=self.k)

    @property
    def width(self) -> int:
        return self.k

    @property
    def scale(self) -> float:
        return 1.0

    def add(self, sums: torch.Tensor, name: str, gradient: DeferredGradient, dtype: torch.dtype) -> None:
        add_sparse(sums, Orders(key_of(self.seed, self.kind, name), self.k), gradient, dtype)

    def transposed(self, rows: torch.Tensor, name: str, shape: torch.Size) -> torch.Tensor:
        return Orders(key_of(self.seed, self.kind, name), self.k).read(rows, shape)


@dataclass(frozen=True)
class Orders:
    """The columns of each segment of `size` places: all of them, in a random order.

    A segment's words, in this sequence: the factor of the order, its shift, the signs of the columns, a bit
    each.
    """

    key: int
    size: int

    def gathered(self, segments: range, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """For each column and segment the place, counted from the first segment's first, and its sign:
        [size, segments] both.
        """
        stream = streams(self.key, torch.arange(segments.start, segments.stop, device=device))
        factors, shifts = self._drawn(stream)
        places = (
            (factors * torch.arange(self.size, device=device).unsqueeze(1))
            .add_(shifts)
            .remainder_(self.size)
            .add_(torch.arange(len(segments), device=device) * self.size)
        )
        words = 2 + torch.arange(-(-self.size // PER_WORD), device=device)
        return places, signs(words_at(stream.unsqueeze(1), words))[:, : self.size].t()

    def scattered(self, places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """For each place its column and its sign there."""
        stream = streams(self.key, places // self.size)
        factors, shifts = self._drawn(stream, inverse=True)
        columns = (places % self.size - shifts).mul_(factors).remainder_(self.size)
        return columns, sign_at(words_at(stream, 2 + columns // PER_WORD), columns % PER_WORD)

    def read(self, rows: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """[n, *shape] of n rows [n, size]: for each place its column's number, with its sign."""
        columns, drawn = self.scattered(torch.arange(shape.numel(), device=rows.device))
        return (rows[:, columns] * drawn).reshape(len(rows), *shape)

    def _drawn(self, stream: torch.Tensor, *, inverse: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """The factor (or its inverse) and the shift of each stream."""
        zero = torch.zeros((), dtype=torch.int64, device=stream.device)
        units = _units(self.size, inverse, stream.device)
        factors = units[below(words_at(stream, zero), len(units))]
        return factors, below(words_at(stream, zero + 1), self.size)


@cached(16)
def _units(size: int, inverse: bool, device: torch.device) -> torch.Tensor:
    """The numbers below `size` that have no divisor in common with it, in ascending order, or the inverse of
    each modulo `size`.
    """
    units = [number for number in range(size) if math.gcd(number, size) == 1]
    return torch.tensor([pow(unit, -1, size) for unit in units] if inverse else units, device=device)


def add_sparse(
    sums: torch.Tensor, orders: Orders, gradient: DeferredGradient, dtype: torch.dtype, factor: float = 1.0
) -> None:
    """Add the gradients, times a number, to the columns of sums [n, k] given by `orders`."""
    memory, together = Workspace(sums.device), _SAMPLES.get(sums.device.type, _SAMPLES["cuda"])
    for placed in gradient.terms:
        term = placed.term
        if isinstance(term, Lookup) and placed.layout.is_identity:
            for samples in steps(term.samples, together):
                _add_listed(sums[samples], orders, *term.at(samples, dtype).listed(), factor)
            continue
        limit = max(element_limit(sums.device, dtype), _SEGMENTS * orders.size * together)
        for samples, first, values in value_blocks(placed, dtype, limit, together, memory):
            if values.numel():
                _add(sums[samples], orders, first, values, factor, memory)


def _add(
    sums: torch.Tensor, orders: Orders, first: int, values: torch.Tensor, factor: float, memory: Workspace
) -> None:
    """Add values [m, q] at the place `first` and the next ones to sums [m, k]."""
    count, last = len(values), first + values.shape[1]
    segments = range(first // orders.size, -(-last // orders.size))
    length, offset = len(segments) * orders.size, first - segments.start * orders.size
    by_place = memory.tensor("places", (length, count), values.dtype)
    by_place[:offset].zero_()
    by_place[offset : offset + values.shape[1]] = values.t()
    by_place[offset + values.shape[1] :].zero_()
    gathered = _gathered_once if length <= _CACHED else _gathered
    places, drawn = gathered(orders, segments, sums.device, values.dtype)
    sums_of_places = F.embedding_bag(places, by_place, mode="sum", per_sample_weights=drawn)
    sums += sums_of_places.t() if factor == 1 else sums_of_places.t() * factor


def _gathered(
    orders: Orders, segments: range, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    places, drawn = orders.gathered(segments, device)
    return places, drawn.to(dtype)


# The next samples use the same. At most 64 of _CACHED entries of 16 bytes: 64 MiB.
_gathered_once = cached(64)(_gathered)


def _add_listed(
    sums: torch.Tensor, orders: Orders, places: torch.Tensor, values: torch.Tensor, factor: float
) -> None:
    """Few elements of each sample, as of the rows of a table: places and values [m, q], one by one."""
    columns, drawn = orders.scattered(places)
    sums.scatter_add_(1, columns, (values * drawn * factor).double())
