"""Few shapes for rows that differ in length, so that a program of each shape is used often.

Rows are padded to one of few lengths, and a bucket is filled with its last row again to a power of two of
rows; what is found of these copies is dropped. A model that does not ignore padding has no ladder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from psgrad.engine.execution.bucket_plan import Numbers, cuts_by_length, plan_buckets, positions_of
from psgrad.ragged import RaggedAxes

# The lengths: two for each power of two, up to the model's own limit.
_LENGTHS = np.array([length for power in range(3, 31) for length in (1 << power, 3 << (power - 1))])
# What the Python of a program takes, of what it takes in the transforms. Measured on small transformers.
_OF_A_PROGRAM = 0.15


@dataclass(frozen=True)
class Bucket:
    """Rows that are computed together.

    Attributes:
        places: [k], where they are in their chunk.
        rows, lengths: how many rows the bucket is filled to, and the length that each column of lengths is
            padded to; None for as many and as long as they are.
    """

    places: torch.Tensor
    rows: int | None = None
    lengths: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return len(self.places)


def buckets_of_few_shapes(
    lengths: torch.Tensor, ragged: RaggedAxes, *, once: float, most: int | None
) -> list[Bucket]:
    """The buckets of rows of these lengths [n, a], of few shapes where that costs less; else those of
    `plan_buckets`, with the same arguments.

    A row has at least one position of padding, as some models take another way without.
    """
    if why_without_programs(ragged) is not None or ragged.limit is None:
        return [Bucket(places) for places in plan_buckets(lengths, ragged, once=once, most=most)]
    rows = lengths.numpy()
    padded = _LENGTHS[np.searchsorted(_LENGTHS, rows + 1)]
    padded = np.minimum(padded, ragged.limit)
    fits = np.all(rows < padded, axis=1, keepdims=False)
    padded[~fits] = rows[~fits]
    found = _filled(padded, fits, ragged, once * _OF_A_PROGRAM, most)
    own = positions_of(rows, ragged)
    if _cost(found, padded, ragged, once * _OF_A_PROGRAM) < own.sum() + once:  # cheaper than any other way
        return found
    plain = [Bucket(places) for places in plan_buckets(lengths, ragged, once=once, most=most)]
    cheaper = _cost(plain, rows, ragged, once) <= _cost(found, padded, ragged, once * _OF_A_PROGRAM)
    return plain if cheaper else found


def why_without_programs(ragged: RaggedAxes) -> str | None:
    """Why rows that differ in length are not padded to few lengths; None where they are."""
    if not ragged.masked:
        return "rows differ in length, and the model does not ignore padding"
    if ragged.limit is None:
        return "rows differ in length, and how long they may be at most is not known"
    return None


def _filled(
    padded: Numbers, fits: npt.NDArray[np.bool_], ragged: RaggedAxes, once: float, most: int | None
) -> list[Bucket]:
    """Buckets of rows padded to these lengths [n, a]. fits: [n], whether they may be padded further."""
    found = []
    for group in (np.flatnonzero(fits), np.flatnonzero(~fits)):
        if len(group):
            for places, longest in cuts_by_length(padded[group], ragged, once, most):
                found += _pieces(group[places], longest, ragged, most)
    return found


def _pieces(places: Numbers, longest: Numbers, ragged: RaggedAxes, most: int | None) -> list[Bucket]:
    """Buckets of a power of two of rows, of at most `most` positions."""
    size, largest = int(positions_of(longest[None], ragged)[0]), _power_of_two(len(places))
    while most is not None and largest > 1 and largest * size > most:
        largest //= 2
    lengths = tuple(longest.tolist())
    return [
        Bucket(torch.from_numpy(piece), _power_of_two(len(piece)), lengths)
        for piece in np.array_split(places, range(largest, len(places), largest))
    ]


def rung(count: int) -> int:
    """The least of two numbers for each power of two that is not less: 1, 2, 3, 4, 6, 8, 12, ..."""
    whole = _power_of_two(count)
    return 3 * whole // 4 if whole >= 4 and count <= 3 * whole // 4 else whole


def _power_of_two(count: int) -> int:
    """The least power of two that is not less."""
    return 1 << max(count - 1, 0).bit_length()


def _cost(buckets: Sequence[Bucket], rows: Numbers, ragged: RaggedAxes, once: float) -> float:
    """What the buckets of rows of these lengths [n, a] take, in positions."""
    total = 0.0
    for bucket in buckets:
        longest = rows[bucket.places.numpy()].max(0, keepdims=True)
        total += once + (bucket.rows or len(bucket.places)) * int(positions_of(longest, ragged)[0])
    return total
