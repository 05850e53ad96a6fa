"""Regions of a parameter: sets of elements whose terms have no element elsewhere; and the cuts of both sides'
samples by which a region's intermediates fit in memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from psgrad.engine.gradients.deferral import Placed, oriented
from psgrad.engine.gradients.layout import AxisSlice
from psgrad.engine.gradients.terms import Term

# For each axis of a parameter the places of a term, and their number; None for all of them.
Window = tuple[tuple[AxisSlice, int], ...] | None


@dataclass(frozen=True)
class Region:
    """A set of elements of one parameter, and the terms of two gradients there.

    Attributes:
        left, right: the terms of the one and of the other gradient, of n and of m samples; neither is empty.
        elements: their number.
        is_aligned: whether all terms have their elements in one order, so that layouts are not needed.
    """

    left: tuple[Placed, ...]
    right: tuple[Placed, ...]
    elements: int
    is_aligned: bool

    @property
    def terms(self) -> tuple[Term, ...]:
        return tuple(placed.term for placed in (*self.left, *self.right))

    def at(self, samples: slice | torch.Tensor, others: slice | torch.Tensor) -> Region:
        """This region for some samples of either side."""
        left = tuple(placed.at(samples) for placed in self.left)
        return replace(self, left=left, right=tuple(placed.at(others) for placed in self.right))


def regions(x: Sequence[Placed], y: Sequence[Placed]) -> list[Region]:
    """The regions in which both gradients of one parameter, given by their terms, have any. Everywhere else
    their products are zero.
    """
    if not x or not x[0].layout.size:
        return []
    result = []
    every, first = (*x, *y), len(x)
    for places in apart(every):
        left, right = [every[i] for i in places if i < first], [every[i] for i in places if i >= first]
        if left and right:
            result.append(_region(left, right))
    return result


def apart(terms: Sequence[Placed]) -> list[list[int]]:
    """The terms of one parameter by their window; all together if two windows have an element in common."""
    windows: dict[Window, list[int]] = {}
    for place, placed in enumerate(terms):
        windows.setdefault(_window(placed), []).append(place)
    if any(_overlap(one, other) for one, other in itertools.combinations(windows, 2)):
        return [list(range(len(terms)))]
    return list(windows.values())


def _window(placed: Placed) -> Window:
    return None if placed.layout.window is None else placed.layout.runs


def _overlap(one: Window, other: Window) -> bool:
    """Whether two windows may have an element in common."""
    if one is None or other is None:
        return True
    return not any(a.is_apart(length, *b) for (a, length), b in zip(one, other, strict=True))


def _region(left: Sequence[Placed], right: Sequence[Placed]) -> Region:
    """The window of these terms without the rest of the parameter, if it is the same for all; else the whole
    parameter.
    """
    every = [*left, *right]
    if len(set(map(_window, every))) > 1:
        return Region(tuple(left), tuple(right), math.prod(every[0].layout.shape), is_aligned=False)
    every = [Placed(placed.term, placed.layout.bare) for placed in every]
    elements = math.prod(every[0].layout.shape)
    straight = [term for placed in every if (term := oriented(placed)) is not None]
    is_aligned = True
    if len(straight) == len(every):
        every = [Placed.plain(term) for term in straight]
    elif all(
        placed.layout == every[0].layout and placed.term.shape == every[0].term.shape for placed in every
    ):
        every = [Placed.plain(placed.term) for placed in every]
    else:
        is_aligned = False
    return Region(tuple(every[: len(left)]), tuple(every[len(left) :]), elements, is_aligned)


def rows_of(terms: Sequence[Term]) -> int:
    """The number of rows into which the value of aligned terms can be cut, the same for all of them; 1 if it
    can't.
    """
    sizes = {count for term in terms if (count := term.row_count) is not None}
    if not sizes:
        return terms[0].shape[0] if terms[0].shape else 1
    if len(sizes) > 1:
        return 1
    rows = sizes.pop()
    return rows if rows and all(math.prod(term.shape) % rows == 0 for term in terms) else 1


def value_parts(
    side: Sequence[Placed], elements: int, rows: slice | None = None, count: int = 1
) -> list[torch.Tensor]:
    """[k, elements] of each term; with `rows` those of `count` rows alone, [k, elements in them], which takes
    aligned terms.
    """
    if rows is None:
        return [placed.materialise().reshape(placed.term.samples, elements) for placed in side]
    width = elements // count * (rows.stop - rows.start)
    return [placed.term.some_rows(rows, count).reshape(placed.term.samples, width) for placed in side]


# Bytes that are kept of one side's samples while they are multiplied with the other's: factors in another
# precision, materialised gradients.
SIDE_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}

# A symmetric result is cut into this number of rows of tiles. The part of each row right of the diagonal is
# computed, 56 % of all.
_ROWS_OF_TILES = 8


def budget(bytes_by_device: Mapping[str, int], device: torch.device) -> int:
    """The bytes of intermediates on the device, by its kind."""
    return bytes_by_device.get(device.type, bytes_by_device["cuda"])


def steps(n: int, step: int, within: slice | None = None) -> Iterator[slice]:
    """0, ..., n - 1, or those within a slice of them, in slices of `step`, at least one, and a rest."""
    step = max(1, step)
    first, last = (within.start, within.stop) if within is not None else (0, n)
    for start in range(first, last, step):
        yield slice(start, min(start + step, last))


def halves(n: int, symmetric: bool, step: int) -> int:
    """A step small enough that only half of a symmetric result of n rows is computed."""
    return max(1, min(step, -(-n // _ROWS_OF_TILES))) if symmetric else step
