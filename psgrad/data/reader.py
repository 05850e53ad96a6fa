"""Reads rows for the engine: checks targets against the loss, and keeps what the table of samples needs."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import torch

from psgrad.data.loss import Criterion
from psgrad.data.rows import Array, Block, Samples
from psgrad.data.targets import check_targets
from psgrad.errors import UnreadableRow
from psgrad.ragged import RowNumbers, joined
from psgrad.run.input_files import require_unchanged


class CheckedReader:
    """Reads blocks of rows whose targets fit the loss.

    Args:
        samples: the dataset, n rows.
        criterion: the loss that the targets are checked against.
        classes: the number of classes; None where the loss knows none.
        with_digests: compute `contents`.
        with_lengths: compute `lengths`.
        with_unreadable: go on where a row can't be read: its fractions are NaN, so that it has no finite
            loss.
        targets_later: check targets when their rows are read, also those that are at hand.

    Attributes:
        unreadable: row -> what is wrong with it.
        targets: [n], one number per row; None where a row's target is not one number. A dataset that yields
            targets only with its rows has zeros here for rows that are not read yet.
        contents: [n], a digest of each row's values; empty text for rows that are not read yet.
        lengths: [n], how many positions of each row count; zero for rows that are not read yet.

    Targets that are at hand are checked at once, unless `targets_later`. Raises DataError and LossError for
    targets that do not fit, and DataError for rows of a file that was changed since the dataset was loaded.
    """

    def __init__(
        self,
        samples: Samples,
        criterion: Criterion,
        classes: int | None,
        *,
        with_digests: bool = False,
        with_lengths: bool = False,
        with_unreadable: bool = False,
        targets_later: bool = False,
    ) -> None:
        self.samples, self.criterion, self.classes = samples, criterion, classes
        self.targets = samples.targets
        self.contents = np.full(len(samples), "", dtype="U32") if with_digests else None
        self.lengths = np.zeros(len(samples), np.int64) if with_lengths else None
        self._goes_on = with_unreadable
        self.unreadable: dict[int, str] = {}
        self._known = samples.targets is not None and not targets_later
        self._noted = np.zeros(len(samples), bool)
        if self._known:
            check_targets(criterion, torch.as_tensor(samples.targets), classes, samples.row_name)

    def __len__(self) -> int:
        return len(self.samples)

    def take(self, rows: RowNumbers) -> Block:
        """These rows, in this order."""
        rows = np.asarray(rows)
        block = self._read(rows)
        if self.contents is not None:
            self.contents[rows] = digests(block)
        if self.lengths is not None and block.target is not None:
            self.lengths[rows] = _counted(block, self.criterion.ignore_index)
        if not self._known:
            check_targets(
                self.criterion,
                block.target,
                self.classes,
                lambda place: self.samples.row_name(int(rows[place])),
            )
            self._note(rows, block.target)
        return block

    def targets_at(self, rows: Array) -> Array | None:
        """The targets of these rows; None where there are none, or not all of the rows have been read."""
        if self.targets is None or (self.samples.targets is None and not self._noted[rows].all()):
            return None
        found: Array = self.targets[rows]
        return found

    def _read(self, rows: Array) -> Block:
        """These rows, one by one where one of them can't be read."""
        with self.samples.reading:
            try:
                block = self.samples.take(rows)
            except UnreadableRow:
                if not self._goes_on:
                    raise
                block = joined([self._one(row) for row in rows.tolist()])
        require_unchanged(self.samples.stamps)
        return block

    def _one(self, row: int) -> Block:
        """A row, or one of NaN where it can't be read: as row 0, which was read when the data were loaded."""
        try:
            return self.samples.take([row])
        except UnreadableRow as error:
            self.unreadable[row] = error.message
        like = self.samples.take([0])
        inputs = tuple(torch.full_like(x, torch.nan) if x.is_floating_point() else x for x in like.inputs)
        target = like.target if self.targets is None else torch.as_tensor(self.targets[row : row + 1])
        return replace(like, inputs=inputs, target=target)

    def _note(self, rows: Array, target: torch.Tensor | None) -> None:
        if target is None or target.dim() != 1 or self.samples.targets is not None:
            return
        if self.targets is None:
            self.targets = np.zeros(len(self.samples), target.numpy().dtype)
        self.targets[rows], self._noted[rows] = target.numpy(), True


def _counted(block: Block, ignore_index: int) -> list[int]:
    """For each row how many positions of its target count."""
    if block.target is None:
        return []
    found: list[int] = (block.target != ignore_index).reshape(len(block), -1).sum(1).tolist()
    return found


def digests(block: Block) -> list[str]:
    """For each row 32 hexadecimal digits of its inputs and its target: types, shapes and values."""
    if block.ragged is not None and len(block) > 1:  # padding is not part of a row
        return [each for row in range(len(block)) for each in digests(block.at(slice(row, row + 1)))]
    columns = []
    for x in (*block.inputs, *([] if block.target is None else [block.target])):
        values = np.ascontiguousarray((x.view(torch.int16) if x.dtype == torch.bfloat16 else x).numpy())
        kind = f"{values.dtype.str}{values.shape[1:]}".encode()
        columns.append((kind, values.data.cast("B") if values.size else b"", values[:1].nbytes))
    found = []
    for row in range(len(block)):
        digest = hashlib.blake2b(digest_size=16)
        for kind, content, size in columns:
            digest.update(kind)
            digest.update(content[row * size : (row + 1) * size])
        found.append(digest.hexdigest())
    return found


def digest_of(identifier: object) -> str:
    """32 hexadecimal digits of a sample's id."""
    return hashlib.blake2b(
        f"id {identifier!r}".encode("utf-8", "backslashreplace"), digest_size=16
    ).hexdigest()
