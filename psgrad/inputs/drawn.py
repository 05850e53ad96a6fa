"""Datasets made of another one: some of its rows, drawn at random; and with columns for the loss."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from psgrad.errors import DataError
from psgrad.inputs.rows import Array, Block, Samples

_STREAM = 0x5A3B1E  # of the seed's numbers, so that nothing else that is drawn by the seed is drawn alike


def drawn_rows(rows: int, count: int, seed: int) -> Array:
    """[count]: different rows of so many, drawn uniformly by a seed, in rising order."""
    return np.sort(np.random.default_rng([seed, _STREAM]).choice(rows, count, replace=False))


class SamplesOf(Samples):
    """What another dataset says of itself, with rows of its own."""

    def __init__(self, samples: Samples) -> None:
        kept = (name for name in dir(samples) if not name.startswith("_") and not _is_method(samples, name))
        self.__dict__.update({name: getattr(samples, name) for name in kept})
        self._samples = samples

    def describe(self, row: int) -> str | None:
        return self._samples.describe(row)

    def first_row(self, sample: int) -> int:
        return self._samples.first_row(sample)

    def picture(self, row: int) -> Any:
        return self._samples.picture(row)

    def input_names(self) -> list[str]:
        return self._samples.input_names()

    def pieces(self, ids: Sequence[int]) -> list[str] | None:
        return self._samples.pieces(ids)

    def special_tokens(self) -> frozenset[int]:
        return self._samples.special_tokens()


class DrawnSamples(SamplesOf):
    """The given rows of a dataset, counted from 0; each keeps its id. rows: [n], rising, their numbers in the
    dataset.
    """

    def __init__(self, samples: Samples, rows: Array) -> None:
        super().__init__(samples)
        self.rows = rows
        self.ids = samples.ids[rows]
        self.targets = None if samples.targets is None else samples.targets[rows]
        self.units = None if samples.units is None else samples.units[rows]
        self.group_sizes = None if samples.group_sizes is None else samples.group_sizes[rows]
        self.agreed_targets = None if samples.agreed_targets is None else samples.agreed_targets[rows]

    def read(self, start: int, stop: int) -> Block:
        return self._samples.take(self.rows[start:stop])

    def take(self, rows: Array) -> Block:
        return self._samples.take(self.rows[self._existing(rows)])

    def anew(self) -> Samples:
        return DrawnSamples(self._samples.anew(), self.rows)

    def read_ahead(self, rows: Sequence[int]) -> Iterator[tuple[int, int]]:
        return self._samples.read_ahead(self.rows[np.asarray(rows, dtype=np.int64)].tolist())

    def content(self, count: int | None = None) -> str:
        return self._samples.content_of(self.rows[:count].tolist())

    def content_of(self, rows: Sequence[int]) -> str:
        return self._samples.content_of(self.rows[np.asarray(rows, dtype=np.int64)].tolist())

    def describe(self, row: int) -> str | None:
        return self._samples.describe(int(self.rows[row]))

    def first_row(self, sample: int) -> int:
        return self._samples.first_row(int(self.rows[sample]))


class SamplesWithColumns(SamplesOf):
    """A dataset with columns of numbers in front of its inputs, for a loss that takes them.

    columns: the same rows, whose inputs are these columns.
    """

    def __init__(self, samples: Samples, columns: Samples, names: Sequence[str]) -> None:
        super().__init__(samples)
        self._columns, self.loss_columns, self._names = columns, len(names), list(names)
        if columns.ragged is not None:
            raise DataError(
                f"loss.columns: {', '.join(names)} hold lists of unequal length",
                expected="columns whose rows are alike",
            )
        self.ragged = None if samples.ragged is None else samples.ragged.around(before=len(names))

    def read(self, start: int, stop: int) -> Block:
        return self._with(self._samples.read(start, stop), self._columns.read(start, stop))

    def take(self, rows: Array) -> Block:
        return self._with(self._samples.take(rows), self._columns.take(rows))

    def anew(self) -> Samples:
        return SamplesWithColumns(self._samples.anew(), self._columns.anew(), self._names)

    def read_ahead(self, rows: Sequence[int]) -> Iterator[tuple[int, int]]:
        yield from self._samples.read_ahead(rows)
        yield from self._columns.read_ahead(rows)

    def content(self, count: int | None = None) -> str:
        both = self._samples.content(count) + self._columns.content(count)
        return hashlib.sha256(both.encode()).hexdigest()

    def content_of(self, rows: Sequence[int]) -> str:
        both = self._samples.content_of(rows) + self._columns.content_of(rows)
        return hashlib.sha256(both.encode()).hexdigest()

    def input_names(self) -> list[str]:
        names = self._samples.input_names()
        return [*self._names, *names] if names else names

    def _with(self, block: Block, columns: Block) -> Block:
        return Block((*columns.inputs, *block.inputs), block.target, block.lengths, self.ragged)


def _is_method(samples: Samples, name: str) -> bool:
    return callable(getattr(type(samples), name, None))
