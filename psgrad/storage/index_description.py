"""The description of an index: which rows of its files are its rows, after updates not all of them, nor in
the order in which they were written; and in what two descriptions differ.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Self

import numpy as np

from psgrad.wording import shorten_middle

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class IndexLayout:
    """Stored rows are counted in the order in which they were written, deleted ones included.

    Attributes:
        segments: how many rows were written at first, and by each update.
        seals: what the files of each segment but the last carry: the hash of what the index was then.
        runs: the stored rows that are the index's rows, in order: (first, behind the last).
    """

    segments: Sequence[int]
    seals: Sequence[str]
    runs: Sequence[Sequence[int]]

    @classmethod
    def of_new(cls, rows: int) -> Self:
        return cls([rows], [], [[0, rows]])

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> Self:
        return cls(content["segments"], content["seals"], content["runs"])

    def content(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def updates(self) -> int:
        return len(self.seals)

    @property
    def new_rows(self) -> range:
        """The stored rows of the last segment."""
        return range(sum(self.segments[:-1]), sum(self.segments))

    def updated(self, places: Array, seal: str) -> IndexLayout:
        """After an update of an index of this seal.

        places: [n], for each row of the index its stored row, or -1 for a row that is to be written.
        """
        stored = places.astype(np.int64)
        new = np.flatnonzero(stored < 0)
        stored[new] = np.arange(len(new)) + sum(self.segments)
        ends = [0, *(np.flatnonzero(np.diff(stored) != 1) + 1).tolist(), len(stored)]
        runs = [[int(stored[start]), int(stored[stop - 1]) + 1] for start, stop in pairwise(ends)]
        return IndexLayout([*self.segments, len(new)], [*self.seals, seal], runs)

    def places(self) -> Array:
        """[n]: the stored row of each row of the index."""
        return np.concatenate([np.arange(start, stop) for start, stop in self.runs])

    def shards(self, most: int) -> list[range]:
        """The stored rows of each shard; a segment begins a new one."""
        found, first = [], 0
        for rows in self.segments:
            found += [range(first + start, first + min(start + most, rows)) for start in range(0, rows, most)]
            first += rows
        return found

    def segment_of(self, row: int) -> int:
        """The segment of a stored row."""
        return int(np.searchsorted(np.cumsum(self.segments), row, side="right"))

    def pieces(self, shards: Sequence[range]) -> Iterator[tuple[int, int, Array]]:
        """(first row of the index, shard, rows of that shard, rising) in the order of the index."""
        places = self.places()
        numbers = np.searchsorted([shard.start for shard in shards], places, side="right") - 1
        cuts = np.flatnonzero((np.diff(numbers) != 0) | (np.diff(places) < 1)) + 1
        for start, stop in pairwise([0, *cuts.tolist(), len(places)]):
            number = int(numbers[start])
            yield start, number, places[start:stop] - shards[number].start


def as_stored(description: Mapping[str, Any]) -> dict[str, Any]:
    """The description as JSON gives it back."""
    content: dict[str, Any] = json.loads(json.dumps(description, default=str))
    return content


def differences_of(expected: Any, actual: Any, name: str) -> Iterator[tuple[str, Any, Any]]:
    """(name, expected, found) of each value that differs, mappings followed by their keys."""
    if isinstance(expected, Mapping) and isinstance(actual, Mapping):
        for key, value in expected.items():
            yield from differences_of(value, actual.get(key), f"{name}.{key}" if name else str(key))
    elif expected != actual:
        yield name, expected, actual


def differs_in_data_alone(different: Sequence[tuple[str, Any, Any]]) -> bool:
    """Whether only the rows are others."""
    return {name for name, _, _ in different} <= {"rows", "fingerprint.data"}


def shortened(value: Any) -> str:
    return shorten_middle(value, 32) if isinstance(value, str) else shorten_middle(str(value), 80)
