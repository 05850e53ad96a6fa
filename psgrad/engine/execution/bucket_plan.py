"""Which rows of a chunk are computed together, where rows differ in length.

Rows of like length make a bucket, so that little is computed for padding. There are few buckets, as each is a
pass of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from psgrad.ragged import RaggedAxes

Numbers = npt.NDArray[np.int64]


def positions_of(lengths: Numbers, ragged: RaggedAxes) -> Numbers:
    """[n]: the positions of rows of these lengths [n, a]: of inputs whose positions are counted in one way,
    once.
    """
    kinds = {frozenset(column for _, column in axes) for axes in ragged.axes if axes}
    found = np.zeros(len(lengths), np.int64)
    for columns in kinds:
        found += lengths[:, sorted(columns)].prod(1)
    return found


def plan_buckets(
    lengths: torch.Tensor, ragged: RaggedAxes, *, once: float, most: int | None = None
) -> list[torch.Tensor]:
    """The places of the rows of each bucket, of rows of these lengths [n, a]; a single bucket has them in
    order.

    Args:
        once: what a bucket costs beside its positions, in positions.
        most: positions of a bucket, padded ones included; a single row may have more. None for no bound.

    By dynamic programming over the rows in the order of their positions; rows of unequal length share a
    bucket only where the model ignores padding.
    """
    if ragged.alike:
        return _apart(lengths, ragged, once=once, most=most)
    rows, buckets = lengths.numpy(), list[torch.Tensor]()
    for places, longest in cuts_by_length(rows, ragged, once, most):
        size = int(positions_of(longest[None], ragged)[0])
        pieces = 1 if most is None else -(-len(places) // max(1, most // max(size, 1)))
        if pieces > 1:
            places = places[np.argsort(positions_of(rows[places], ragged), kind="stable")]
        buckets += [torch.from_numpy(np.sort(piece)) for piece in np.array_split(places, pieces)]
    return buckets


def cuts_by_length(
    rows: Numbers, ragged: RaggedAxes, once: float, most: int | None
) -> Iterator[tuple[Numbers, Numbers]]:
    """The places of rows of like length [n, a] that are computed together, and the longest in each column;
    of equal rows alone where the model does not ignore padding.
    """
    distinct, kind, counts = np.unique(rows, axis=0, return_inverse=True, return_counts=True)
    order = np.argsort(positions_of(distinct, ragged), kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    of_row, distinct, counts = rank[kind.reshape(-1)], distinct[order], counts[order]
    ends = list(range(1, len(distinct) + 1))
    if ragged.masked:
        ends = cheapest_ends(distinct, counts, ragged, once, most)
    for first, end in zip([0, *ends[:-1]], ends, strict=True):
        yield np.flatnonzero((first <= of_row) & (of_row < end)), distinct[first:end].max(0)


def _apart(lengths: torch.Tensor, ragged: RaggedAxes, *, once: float, most: int | None) -> list[torch.Tensor]:
    """The buckets of rows that are equal in the columns `ragged.alike`, for each of their lengths there."""
    _, kind = np.unique(lengths[:, list(ragged.alike)].numpy(), axis=0, return_inverse=True)
    within, buckets = replace(ragged, alike=()), []
    for each in range(int(kind.max()) + 1):
        places = torch.from_numpy(np.flatnonzero(kind.reshape(-1) == each))
        buckets += [places[own] for own in plan_buckets(lengths[places], within, once=once, most=most)]
    return buckets


def cheapest_ends(
    distinct: Numbers, counts: Numbers, ragged: RaggedAxes, once: float, most: int | None
) -> list[int]:
    """Where the buckets of sorted rows end, [counts] of each length [a], so that all together cost least."""
    before = np.concatenate([[0], np.cumsum(counts)])
    least, start_of = np.zeros(len(distinct) + 1), np.zeros(len(distinct) + 1, np.int64)
    for end in range(1, len(distinct) + 1):
        # longest[i]: of the kinds i, ..., end - 1
        longest = np.maximum.accumulate(distinct[:end][::-1], axis=0)[::-1]
        rows, size = before[end] - before[:end], positions_of(longest, ragged)
        passes = 1 if most is None else -(-rows // np.maximum(1, most // np.maximum(size, 1)))
        costs = least[:end] + rows * size + once * passes
        start_of[end] = int(costs.argmin())
        least[end] = costs[start_of[end]]
    ends, end = [], len(distinct)
    while end:
        ends.append(end)
        end = int(start_of[end])
    return ends[::-1]
