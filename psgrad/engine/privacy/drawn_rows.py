"""The rows of a training loop of the user's own: each is read, drawn at random and put into a batch apart
from the others.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from psgrad import random_state
from psgrad.engine.privacy.kept_values import BitSums, has_bits
from psgrad.engine.privacy.record_draws import ROW, RecordDraws, StepDraws, labels_of
from psgrad.engine.transforms.private_torch import tree_leaves, tree_map
from psgrad.errors import DataError

_CHECKED = 4  # rows that are read twice


class DrawnRow(NamedTuple):
    """A row that was drawn for a batch."""

    batch: int
    row: int


class RowsApart(Dataset[Any]):
    """A dataset, of which what is drawn at random for a row follows from the key of `draws`, the batch and
    the row alone; in worker processes, too.

    Raises DataError for a row that is another one when it is read again.
    """

    def __init__(self, dataset: Any, draws: RecordDraws) -> None:
        self._dataset, self._draws = dataset, draws
        self._drawing = False  # whether rows were seen to be drawn as they are read
        self._require_memoryless()

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, drawn: Sequence[DrawnRow]) -> list[Any]:
        """The rows of a batch."""
        if not drawn:
            return []
        step, rows = self._draws.at(drawn[0].batch), [each.row for each in drawn]
        with step.kept():
            if not self._drawing:
                before = step.states()
                items = self._read(rows)
                self._drawing = step.states() != before
                if not self._drawing:
                    return items
            return [self._alone(step, row) for row in rows]

    def _read(self, rows: list[int]) -> list[Any]:
        together = getattr(self._dataset, "__getitems__", None)
        return list(together(rows)) if together else [self._dataset[row] for row in rows]

    def _alone(self, step: StepDraws, row: int) -> Any:
        step.seed(int(labels_of([row], 1)[0, 0]), ROW)
        return self._read([row])[0]

    def _require_memoryless(self) -> None:
        rows = np.unique(np.linspace(0, len(self) - 1, _CHECKED, dtype=np.int64)).tolist()
        step = self._draws.at(0)
        with step.kept():
            first = {row: self._alone(step, row) for row in rows}
            for row in reversed(rows):
                if not _same(first[row], self._alone(step, row)):
                    raise DataError(
                        f"row {row} of the loader's dataset is another one when it is read again, after"
                        " others",
                        expected="rows that depend on no other row, and on nothing that was read before",
                        cause="something that is kept from call to call (a counter, a running maximum)",
                        next_step="keep nothing from one call to the next; draw with torch, numpy or random",
                    )


class RecordsApart:
    """A loader's collate function, whose batches have rows that depend on no other row, as far as the first
    batch of several rows shows it; and the empty batch.

    Raises DataError for one that draws at random, or whose rows depend on others.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], one: Callable[[], Any]) -> None:
        self._collate, self._one = collate, one
        self._empty: Any = None
        self._checked = False

    def __call__(self, items: list[Any]) -> Any:
        if not items:
            if self._empty is None:
                self._empty = tree_map(_no_rows, self._collate([self._one()]))
            return self._empty
        before = random_state.cpu_states()
        batch = self._collate(items)
        if not self._checked and len(items) > 1:
            self._checked = True
            for place in (0, len(items) - 1):
                if not _is_row(batch, place, self._collate([items[place]])):
                    raise _mixing("rows depend on the other rows of their batch")
        if random_state.cpu_states() != before:
            raise _mixing("numbers are drawn at random for a batch, by the place of a row in it")
        return batch


def _mixing(how: str) -> DataError:
    return DataError(
        f"the loader's collate_fn makes batches whose {how}",
        expected="a row for each record, which is the same whatever other records are in the batch",
        cause=(
            "mixup, a normalisation by the batch, or masks that are drawn for a batch: one record more"
            " changes others' gradients, and clipping bounds nothing"
        ),
        next_step="do it in the dataset, row by row, with what is public",
    )


def _no_rows(x: Any) -> Any:
    return x[:0] if isinstance(x, Tensor) else x


def _is_row(batch: Any, place: int, alone: Any) -> bool:
    """Whether a batch has this row at this place. Parts that are filled up to other rows' length are not
    compared.
    """
    return all(
        _same(mine[place : place + 1], one)
        for mine, one in zip(tree_leaves(batch), tree_leaves(alone), strict=True)
        if isinstance(mine, Tensor) and mine.dim() and mine[place : place + 1].shape == one.shape
    )


def _same(a: Any, b: Any) -> bool:
    mine, theirs = tree_leaves(a), tree_leaves(b)
    return len(mine) == len(theirs) and all(map(_same_leaf, mine, theirs))


def _same_leaf(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor) and has_bits(a) and has_bits(b):
        return BitSums.of(a).same(BitSums.of(b))
    return pickle.dumps(a) == pickle.dumps(b)
