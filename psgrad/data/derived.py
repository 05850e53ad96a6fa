"""Some rows of a dataset, drawn at random."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from psgrad.data.rows import Array, Block, Samples
from psgrad.ragged import RowNumbers

_STREAM = 0x5A3B1E  # of the seed's numbers, so that nothing else that is drawn by the seed is drawn alike


def drawn_rows(rows: int, count: int, seed: int) -> Array:
    """[count]: different rows out of `rows`, drawn uniformly by a seed, in rising order."""
    return np.sort(np.random.default_rng([seed, _STREAM]).choice(rows, count, replace=False))


class DrawnSamples(Samples):
    """The given rows of a dataset; each keeps its id. rows: [n], rising, their numbers in the dataset."""

    def __init__(self, samples: Samples, rows: Array) -> None:
        targets, units = samples.targets, samples.units
        super().__init__(
            samples.ids[rows],
            None if targets is None else targets[rows],
            samples.fingerprint,
            None if units is None else units[rows],
        )
        for name in Samples.__annotations__:  # what is said of all rows
            setattr(self, name, getattr(samples, name))
        self._samples, self.rows, self.reading = samples, rows, samples.reading

    def take(self, rows: RowNumbers) -> Block:
        return self._samples.take(self.rows[self._existing(rows)])

    def anew(self) -> Samples:
        return DrawnSamples(self._samples.anew(), self.rows)

    def read_ahead(self, rows: Sequence[int]) -> Iterator[tuple[int, int]]:
        return self._samples.read_ahead(self._numbers(rows))

    def content(self, count: int | None = None) -> str:
        return self._samples.content_of(self.rows[:count].tolist())

    def content_of(self, rows: Sequence[int]) -> str:
        return self._samples.content_of(self._numbers(rows))

    def describe(self, row: int) -> str | None:
        return self._samples.describe(int(self.rows[row]))

    def row_name(self, row: int) -> str:
        return self._samples.row_name(int(self.rows[row]))

    def picture(self, row: int) -> Any:
        return self._samples.picture(int(self.rows[row]))

    def _numbers(self, rows: Sequence[int]) -> list[int]:
        """The numbers of rows in the whole dataset."""
        found: list[int] = self.rows[np.asarray(rows, dtype=np.int64)].tolist()
        return found
