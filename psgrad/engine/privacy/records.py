"""Records: rows, or all rows of a user; and the relation between neighbouring datasets. What is clipped is a
record's gradient, not a row's.

A record's loss is the weighted sum of its rows' losses, so its gradient is the average of theirs before
anything is clipped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from psgrad.engine.execution.loading import Rows
from psgrad.engine.privacy.coins import Coins
from psgrad.engine.transforms import vmap
from psgrad.errors import DataError
from psgrad.ragged import Block

RowNumbers = npt.NDArray[np.int64]

ROWS_WITHOUT_A_CAP = 1000
"""Rows of a record that are taken without asking for a cap: all rows of a record are in memory together."""


class Records:
    """Which rows of a dataset make up each of its records, the units of privacy.

    Attributes:
        sizes: [records], how many rows of each record count.
    """

    def __init__(self, order: RowNumbers, starts: RowNumbers, sizes: RowNumbers) -> None:
        self._order, self._starts, self.sizes = order, starts, sizes

    @staticmethod
    def of_rows(count: int) -> Records:
        """Each of `count` rows is a record."""
        rows = np.arange(count, dtype=np.int64)
        return Records(rows, rows, np.ones(count, dtype=np.int64))

    @staticmethod
    def of_units(units: npt.NDArray[Any], max_rows: int | None = None) -> Records:
        """All rows with one value in `units` [rows] are a record; records are numbered as they are first met
        in the dataset.

        Of a unit with more than `max_rows` rows the first ones in dataset order count, and the others never.
        The cap is a public number, and which rows remain depends on no other unit. Raises DataError where
        there is no cap and a unit has more than a thousand rows.
        """
        _, firsts, codes, sizes = np.unique(units, return_index=True, return_inverse=True, return_counts=True)
        if max_rows is None and sizes.max(initial=0) > ROWS_WITHOUT_A_CAP:
            largest = int(sizes.argmax())
            raise DataError(
                f"the unit {units[firsts[largest]]!s} has {sizes[largest]} rows, and all rows of a unit"
                " are in memory together; expected privacy.unit.max_rows where a unit has more than"
                f" {ROWS_WITHOUT_A_CAP} rows",
                hint=(
                    "set privacy.unit.max_rows: of a unit with more rows the first ones in the dataset's"
                    " order count"
                ),
            )
        rank = np.empty_like(firsts)
        rank[np.argsort(firsts)] = np.arange(len(firsts))
        order = np.argsort(rank[codes.reshape(-1)], kind="stable").astype(np.int64)
        sizes = sizes[np.argsort(firsts)].astype(np.int64)
        starts = np.cumsum(sizes) - sizes
        return Records(order, starts, sizes if max_rows is None else np.minimum(sizes, max_rows))

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def longest(self) -> int:
        """The most rows of any record."""
        return int(self.sizes.max(initial=0))

    def rows_of(self, record: int) -> RowNumbers:
        """The rows of a record, in dataset order."""
        start = self._starts[record]
        return self._order[start : start + self.sizes[record]]

    def rows_of_each(self, records: RowNumbers) -> RowNumbers:
        """The rows of several records, one record's after another's."""
        starts, sizes = self._starts[records], self.sizes[records]
        before = np.cumsum(sizes) - sizes
        return self._order[np.repeat(starts - before, sizes) + np.arange(sizes.sum())]


class RecordReader:
    """Reads drawn records for a Stream, whose rows are then numbers 0, 1, ... in what was drawn.

    Args:
        records: which rows are whose.
        rows: the dataset.
        width: rows that every record is filled up to, at least as many as one has; 1 has no axis of rows.
            None for those of the longest record.
        coins: seed the generators before rows are read, for code that draws from them; None for rows that are
            the same each time.

    Attributes:
        drawn: the records that are read.
        inputs_of_model: how many of the inputs that are read are the model's; None for all.

    The loss that goes with it is `loss_of`.
    """

    def __init__(
        self,
        records: Records,
        rows: Rows,
        *,
        width: int | None = None,
        coins: Coins | None = None,
    ) -> None:
        self.records, self._rows = records, rows
        self.draws = coins is not None
        self._coins = coins
        self.inputs_of_model: int | None = None
        self._width = records.longest if width is None else width
        self.drawn: RowNumbers = np.empty(0, dtype=np.int64)

    @property
    def several(self) -> bool:
        """Whether records have an axis of rows."""
        return self._width > 1

    def draw(self, records: npt.ArrayLike) -> None:
        """The records to read from now on. They are read longest first, as in `drawn`.

        Records of about one length come together then, which fills up least, and what fits in memory is known
        from the first chunk.
        """
        drawn = np.asarray(records, dtype=np.int64)
        self.drawn = drawn[np.argsort(-self.records.sizes[drawn], kind="stable")]

    def loss_of(self, loss: Callable[..., Any], *, randomness: str = "error") -> Callable[..., Any]:
        """The loss of a record, as a stream calls it, from that of one row: (params, inputs, target) to
        (loss, aux).
        """
        return record_loss(loss, randomness=randomness) if self.several else loss

    def __len__(self) -> int:
        return len(self.drawn)

    def take(self, places: Sequence[int] | npt.NDArray[Any], /) -> Block:
        """The n records at these places of `drawn`.

        If every record is one row: each tensor [n, ...]. Else [n, k, ...], k the reader's width, with the
        weights [n, k] of the rows as the last of the inputs: 1 / rows, and 0 for padding, which repeats the
        record's own last row.
        """
        chosen = self.drawn[np.asarray(places)]
        with nullcontext() if self._coins is None else self._coins.seeded():
            rows = self._rows.take(self.records.rows_of_each(chosen))
        self.inputs_of_model = len(rows.inputs)
        if not self.several:
            return rows
        sizes = self.records.sizes[chosen]
        of_each, weights = _padded(sizes, self._width)
        self._require_like_rows(rows, of_each, chosen)
        return rows.grouped(of_each).with_inputs(weights)

    def _require_like_rows(self, rows: Block, places: Tensor, chosen: RowNumbers) -> None:
        """Raises DataError where the rows of a record differ in length, and the model would see padding."""
        if rows.lengths is None or rows.ragged is None or rows.ragged.masked:
            return
        each = rows.lengths[places]
        odd = torch.nonzero((each != each[:, :1]).flatten(1).any(1)).flatten().tolist()
        if odd:
            record, first = int(chosen[odd[0]]), each[odd[0]][:, 0]
            raise DataError(
                f"record {record} has rows of {int(first.min())} to {int(first.max())} positions, and the"
                " model does not ignore padding; expected rows of one length in each record, or a model"
                " that takes a mask of the positions",
                hint="let each row be a record, or give the model a mask as an input",
            )


def record_loss(
    loss: Callable[..., Any], *, has_aux: bool = True, randomness: str = "error"
) -> Callable[..., Any]:
    """The loss of a record of k rows, from the loss of one row.

    Args:
        loss: (params, inputs, target) of one row to a scalar, or with `has_aux` to (scalar, aux).
        randomness: of the rows among each other, as for vmap.

    Returns (params, inputs, target) to the record's loss, or with `has_aux` to (loss, {}): inputs are [k,
    ...] each, the weights [k] of the rows last, and target is [k, ...] or None. A row of weight 0 adds
    nothing, if it is finite.

    The rows are one more axis of the same batched kernels: a weight's deferred gradient has them among its
    positions.
    """

    def of_record(params: dict[str, Tensor], inputs: tuple[Tensor, ...], target: Tensor | None) -> Any:
        *rows, weights = inputs

        def of_row(inputs: tuple[Tensor, ...], target: Tensor | None) -> Tensor:
            result: Any = loss(params, inputs, target)
            return result[0] if has_aux else result

        losses = vmap(of_row, in_dims=(0, None if target is None else 0), randomness=randomness)(
            tuple(rows), target
        )
        total = (losses * weights.to(losses.dtype)).sum()
        return (total, {}) if has_aux else total

    return of_record


def _padded(sizes: RowNumbers, width: int) -> tuple[Tensor, Tensor]:
    """(places, weights), both [n, width], for records whose rows lie one record's after another's.

    In float64: one third in float32 is not one third.
    """
    along = np.arange(width)
    firsts = np.cumsum(sizes) - sizes
    places = firsts[:, None] + np.minimum(along, sizes[:, None] - 1)
    weights = np.where(along < sizes[:, None], 1.0 / sizes[:, None], 0.0)
    return torch.from_numpy(places), torch.from_numpy(weights)


Relation = Literal["add_or_remove_one", "replace_one", "zero_out"]
"""add_or_remove_one: one record more or less. replace_one: one record is another. zero_out: one record's
gradient is zero.
"""
