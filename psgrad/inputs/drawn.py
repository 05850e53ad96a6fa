"""Some rows of a dataset, drawn at random, as a dataset of their own."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from psgrad.inputs.rows import Array, Block, Samples

_STREAM = 0x5A3B1E  # of the seed's numbers, so that nothing else that is drawn by the seed is drawn alike


def drawn_rows(rows: int, count: int, seed: int) -> Array:
    """[count]: different rows of so many, drawn uniformly by a seed, in rising order."""
    return np.sort(np.random.default_rng([seed, _STREAM]).choice(rows, count, replace=False))


class DrawnSamples(Samples):
    """The given rows of a dataset, counted from 0; each keeps its id. rows: [n], rising, their numbers in the
    dataset.
    """

    def __init__(self, samples: Samples, rows: Array) -> None:
        about = [name for name in dir(samples) if not name.startswith("_")]
        self.__dict__.update(
            {name: getattr(samples, name) for name in about if not _is_method(samples, name)}
        )
        self._samples, self.rows = samples, rows
        self.ids = samples.ids[rows]
        self.targets = None if samples.targets is None else samples.targets[rows]
        self.units = None if samples.units is None else samples.units[rows]

    def read(self, start: int, stop: int) -> Block:
        return self._samples.take(self.rows[start:stop])

    def take(self, rows: Array) -> Block:
        return self._samples.take(self.rows[self._existing(rows)])

    def content(self, count: int | None = None) -> str:
        rows = self.rows[:count]
        digest = hashlib.sha256(self._samples.content(int(rows[-1]) + 1).encode())
        digest.update(np.ascontiguousarray(rows).data)
        return digest.hexdigest()

    def describe(self, row: int) -> str | None:
        return self._samples.describe(int(self.rows[row]))

    def input_names(self) -> list[str]:
        return self._samples.input_names()

    def pieces(self, ids: Sequence[int]) -> list[str] | None:
        return self._samples.pieces(ids)


def _is_method(samples: Samples, name: str) -> bool:
    return callable(getattr(type(samples), name, None))
