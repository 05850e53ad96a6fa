"""Datasets made of another one: some of its rows, drawn at random; and groups of its rows as samples, such as
the rows of a document, a user or a conversation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from psgrad.data.rows import Array, Block, Samples
from psgrad.errors import DataError
from psgrad.ragged import RaggedAxes

_STREAM = 0x5A3B1E  # of the seed's numbers, so that nothing else that is drawn by the seed is drawn alike


def drawn_rows(rows: int, count: int, seed: int) -> Array:
    """[count]: different rows out of `rows`, drawn uniformly by a seed, in rising order."""
    return np.sort(np.random.default_rng([seed, _STREAM]).choice(rows, count, replace=False))


class SamplesOf(Samples):
    """The attributes of another dataset, with rows of its own."""

    def __init__(self, samples: Samples) -> None:
        said = (name for name in dir(samples) if not name.startswith("_"))
        kept = (name for name in said if not callable(getattr(type(samples), name, None)))
        self.__dict__.update({name: getattr(samples, name) for name in kept})
        self._samples = samples

    def describe(self, row: int) -> str | None:
        return self._samples.describe(row)

    def row_name(self, row: int) -> str:
        return self._samples.row_name(row)

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
    """The given rows of a dataset; each keeps its id. rows: [n], rising, their numbers in the dataset."""

    def __init__(self, samples: Samples, rows: Array) -> None:
        super().__init__(samples)
        self.rows = rows
        self.ids = samples.ids[rows]
        self.targets = None if samples.targets is None else samples.targets[rows]
        self.units = None if samples.units is None else samples.units[rows]
        self.group_sizes = None if samples.group_sizes is None else samples.group_sizes[rows]
        self.agreed_targets = None if samples.agreed_targets is None else samples.agreed_targets[rows]

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

    def row_name(self, row: int) -> str:
        return self._samples.row_name(int(self.rows[row]))

    def first_row(self, sample: int) -> int:
        return self._samples.first_row(int(self.rows[sample]))


class GroupedSamples(SamplesOf):
    """All rows of one group are one sample. Groups are in the order of their first rows.

    Args:
        samples: the rows, whose `units` [rows] are the groups that they belong to.
        column: the name of that column.
        extra: [rows], what another column says of each row, which becomes `units`; None without.

    Attributes:
        ungrouped: the dataset of rows. group_sizes: [n], the rows of each group. agreed_targets: [n] float64,
            the target of a group whose rows agree in it, NaN for others; None where rows have no single
            target. targets: the same as the rows have it, where all groups agree; else None.

    A block is [n, k, ...], where a group has k rows. Groups of fewer rows than the largest of a block repeat
    their last row; `ragged.alike` keeps these repetitions out of every computation.
    """

    def __init__(self, samples: Samples, column: str, extra: Array | None = None) -> None:
        super().__init__(samples)
        assert samples.units is not None
        self._rows = self.ungrouped = samples
        _, firsts, codes = np.unique(samples.units, return_index=True, return_inverse=True)
        rank = np.empty_like(firsts)
        rank[np.argsort(firsts)] = np.arange(len(firsts))
        places = rank[codes.reshape(-1)]
        self._firsts = np.sort(firsts)
        self._order = np.argsort(places, kind="stable")
        self.group_sizes: Array = np.bincount(places, minlength=len(firsts))
        self._starts = np.cumsum(self.group_sizes) - self.group_sizes
        self.ids = samples.units[self._firsts]
        self.units = None if extra is None else self._of_groups(extra)
        self.targets = self.agreed_targets = None
        if samples.targets is not None:
            agree = self._agree(samples.targets)
            known = samples.targets[self._firsts]
            self.agreed_targets = np.where(agree, known.astype(np.float64), np.nan)
            self.targets = known if agree.all() else None
        self.ragged = self._axes(samples.read(0, 1))
        self.notes = (
            *samples.notes,
            f"a sample is a group of rows that agree in {column}: its loss and its gradient are the sums of"
            " its rows'",
        )
        self.fingerprint = self._digest(samples.fingerprint, len(self))

    def take(self, rows: Array) -> Block:
        groups = self._existing(rows)
        sizes = self.group_sizes[groups]
        firsts = np.cumsum(sizes) - sizes
        along = np.arange(sizes.max())
        within = np.minimum(along, sizes[:, None] - 1)
        block = self._rows.take(np.concatenate([self.rows_of(group) for group in groups]))
        places = torch.from_numpy(firsts[:, None] + within)
        counted = torch.from_numpy(sizes[:, None].astype(np.int64))
        if block.lengths is None:
            return replace(block.at(places), lengths=counted, ragged=self.ragged)
        assert self.ragged is not None
        if not self.ragged.masked:
            self._require_like_rows(block.lengths[places], groups)
        found = block.grouped(places)
        assert found.lengths is not None
        return replace(found, lengths=torch.cat([found.lengths, counted], 1), ragged=self.ragged)

    def rows_of(self, group: int) -> Array:
        """The rows of a group, in the order of the dataset."""
        start = self._starts[group]
        return self._order[start : start + self.group_sizes[group]]

    def row_name(self, row: int) -> str:
        return f"the group {self.ids[row]!s}"

    def first_row(self, sample: int) -> int:
        return int(self._firsts[sample])

    def content(self, count: int | None = None) -> str:
        until = len(self) if count is None else count
        rows = self._order[: self._starts[until - 1] + self.group_sizes[until - 1]]
        return self._digest(self._rows.content(int(rows.max()) + 1), until)

    def describe(self, row: int) -> str | None:
        text = self._rows.describe(self.first_row(row))
        more = int(self.group_sizes[row]) - 1
        return text if text is None or not more else f"{text} (and {more:,} more rows)"

    def _digest(self, rows: str, count: int) -> str:
        """A SHA-256 of what rows hold, by their digest, and of which of them are the first `count` groups."""
        digest = hashlib.sha256(rows.encode())
        sizes = self.group_sizes[:count].astype(np.int64)
        digest.update(sizes.tobytes() + self._order[: sizes.sum()].astype(np.int64).tobytes())
        digest.update(repr(self.ids[:count].tolist()).encode("utf-8", "backslashreplace"))
        return digest.hexdigest()

    def _axes(self, first: Block) -> RaggedAxes:
        """The axes of groups: those of the rows, behind an axis of rows whose length is counted last."""
        base, count = self._rows.ragged, len(first.inputs) + 1
        if base is None:
            return RaggedAxes((((0, 0),),) * count, (0,) * count, masked=True, alike=(0,))
        assert first.lengths is not None
        column = first.lengths.shape[1]
        grouped = base.grouped()
        behind = tuple((*pairs, (0, column)) for pairs in grouped.axes)
        return replace(grouped, axes=behind, alike=(column,))

    def _agree(self, values: Array) -> Array:
        """[n] bool: whether all rows of each group have one value."""
        same = values[self._order] == np.repeat(values[self._firsts], self.group_sizes)
        found: Array = np.logical_and.reduceat(same, self._starts)
        return found

    def _of_groups(self, values: Array) -> Array:
        """[n]: the value of each group. Raises DataError where rows of one group have several."""
        agree = self._agree(values)
        if not agree.all():
            group = int(np.flatnonzero(~agree)[0])
            several = ", ".join(map(str, np.unique(values[self.rows_of(group)])[:3]))
            raise DataError(
                f"the rows of the group {self.ids[group]!s} have several values in the column that samples"
                f" are compared by: {several}; expected one value for all rows of a group",
                hint="name a column in which the rows of each group agree",
            )
        return values[self._firsts]

    def _require_like_rows(self, lengths: torch.Tensor, groups: Array) -> None:
        """Raises DataError where the rows of a group differ in length, and the model would see padding."""
        odd = (lengths != lengths[:, :1]).flatten(1).any(1).nonzero().flatten().tolist()
        if odd:
            own = lengths[odd[0]][:, 0]
            raise DataError(
                f"the group {self.ids[groups[odd[0]]]!s} has rows of {int(own.min())} to {int(own.max())}"
                " positions, and the model does not ignore padding; expected rows of one length in each"
                " group, or a model that takes a mask of the positions",
                hint="leave data.group out, or give the model a mask as an input",
            )
