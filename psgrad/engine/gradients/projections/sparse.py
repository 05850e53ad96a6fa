"""Sparse projections, which add each entry of a gradient to one column or subtract it; and the walk over a
deferred gradient in slices: a few entries of all samples' gradients at a time, with their places in the
parameter's row-major order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
import torch.nn.functional as F

from psgrad.engine.gradients.deferred import DeferredGradient, Placed
from psgrad.engine.gradients.layout import AxisLayout
from psgrad.engine.gradients.projections.projection import (
    PER_WORD,
    Per,
    Projection,
    Sums,
    below,
    cached,
    element_limit,
    key_of,
    sign_at,
    signs,
    streams,
    words_at,
)
from psgrad.engine.gradients.terms import Slice as Slice
from psgrad.engine.gradients.terms import Workspace


class ParameterIndices:
    """Converts places in a term's row-major order to places in the parameter's, by arithmetic."""

    def __init__(self, layout: AxisLayout) -> None:
        self.layout = layout

    @cached_property
    def _steps(self) -> tuple[list[int], int]:
        """The distance of each atom's neighbours in the parameter, and the place of the first element."""
        layout = self.layout
        steps = [0] * len(layout.atoms)
        window = layout.slices
        left = list(reversed(layout.order))
        first, behind = 0, 1  # `behind`: the size of the parameter's axes so far, from the last on
        for axis in reversed(range(len(layout.shape))):
            run, count = window[axis], 1
            while left and (count < layout.inner[axis] or layout.atoms[left[0]] == 1):
                atom = left.pop(0)
                steps[atom] = behind * count
                count *= layout.atoms[atom]
            first += behind * run.start
            behind *= layout.shape[axis]
        return steps, first

    @cached_property
    def _shift(self) -> int | None:
        """The distance of each element's places, if it is the same for all; else None."""
        steps, first = self._steps
        atoms = self.layout.atoms
        own = [math.prod(atoms[place + 1 :]) for place in range(len(atoms))]
        same = all(step == wanted for step, wanted, size in zip(steps, own, atoms, strict=True) if size > 1)
        return first if same else None

    def of(self, places: range | torch.Tensor, device: torch.device) -> range | torch.Tensor:
        """The places in the parameter of places in the term; a range of them stays one if possible."""
        shift = self._shift
        if shift is not None:
            return (
                range(places.start + shift, places.stop + shift)
                if isinstance(places, range)
                else places + shift
            )
        steps, first = self._steps
        rest = torch.arange(places.start, places.stop, device=device) if isinstance(places, range) else places
        out = torch.full_like(rest, first)
        for size, step in zip(reversed(self.layout.atoms), reversed(steps), strict=True):
            out += (rest % size) * step
            rest = rest // size
        return out


def slices(
    placed: Placed, dtype: torch.dtype, limit: int, width: int, samples: slice = slice(None)
) -> Iterator[Slice]:
    """A placed term in slices, in a precision, of neighbouring samples or all. The values of a slice are
    valid until the next slice.

    Args:
        limit: the largest number of values of a slice, if possible.
        width: the largest number of places of a slice of a table's looked-up rows; such a slice leaves out
            samples that looked up none of them.
    """
    term, places = placed.term.at(samples, dtype), ParameterIndices(placed.layout)
    first = samples.start or 0
    for part in term.slices(limit, width):
        whose = (
            part.samples + first
            if isinstance(part.samples, torch.Tensor)
            else _shifted(part.samples, first, term.samples)
        )
        yield Slice(part.values, places.of(part.places, term.device), whose)


def _shifted(some: slice, by: int, count: int) -> slice:
    start, stop, _ = some.indices(count)
    return slice(start + by, stop + by)


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

    def add(self, sums: Sums, name: str, gradient: DeferredGradient) -> None:
        add_sparse(sums, Orders(key_of(self.seed, self.kind, name), self.k), gradient)


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


def add_sparse(sums: Sums, orders: Orders, gradient: DeferredGradient, factor: float = 1.0) -> None:
    """Add the gradients, times a number, to the columns given by `orders`."""
    memory, together = Workspace(sums.device), _SAMPLES.get(sums.device.type, _SAMPLES["cuda"])
    for placed in gradient.terms:
        for start in range(0, placed.term.samples, together):
            samples = slice(start, min(start + together, placed.term.samples))
            listed = placed.term.at(samples, sums.dtype).listed() if placed.layout.is_identity else None
            if listed is not None:
                _add_listed(sums, orders, *listed, samples, factor)
                continue
            limit = max(
                element_limit(sums.device, sums.dtype), _SEGMENTS * orders.size * (samples.stop - start)
            )
            for part in slices(placed, sums.dtype, limit, limit, samples):
                _add(sums, orders, part, factor, memory)


def _add(sums: Sums, orders: Orders, part: Slice, factor: float, memory: Workspace) -> None:
    if not part.values.numel():
        return
    if isinstance(part.places, torch.Tensor):
        columns, drawn = orders.scattered(part.places)
        contribution = torch.zeros(len(part.values), sums.columns, dtype=sums.dtype, device=sums.device)
        contribution.index_add_(1, columns, part.values * drawn)
        sums.add(part.samples, contribution * factor)
        return
    segments = range(part.places.start // orders.size, -(-part.places.stop // orders.size))
    values, length = part.values.t(), len(segments) * orders.size
    if length != len(values) or not values.is_contiguous():
        offset = part.places.start - segments.start * orders.size
        values = memory.tensor("values", (length, len(part.values)), sums.dtype)
        values[:offset].zero_()
        values[offset : offset + len(part.places)] = part.values.t()
        values[offset + len(part.places) :].zero_()
    gathered = _gathered_once if length <= _CACHED else _gathered
    places, drawn = gathered(orders, segments, sums.device, sums.dtype)
    sums_of_places = F.embedding_bag(places, values, mode="sum", per_sample_weights=drawn)
    sums.add(part.samples, sums_of_places.t() if factor == 1 else sums_of_places.t() * factor)


def _gathered(
    orders: Orders, segments: range, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    places, drawn = orders.gathered(segments, device)
    return places, drawn.to(dtype)


# The next samples use the same. At most 64 of _CACHED entries of 16 bytes: 64 MiB.
_gathered_once = cached(64)(_gathered)


def _add_listed(
    sums: Sums, orders: Orders, places: torch.Tensor, values: torch.Tensor, samples: slice, factor: float
) -> None:
    """Few elements of each sample, as of the rows of a table: places and values [m, q], one by one."""
    columns, drawn = orders.scattered(places)
    sums.part()[samples].scatter_add_(1, columns, values * drawn * factor)
