"""The rows of a training loop of the user's own: read with coins of the run, and put into a batch apart from
the others.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.data import Dataset

from psgrad import random_state
from psgrad.engine.privacy.coins import Coins
from psgrad.engine.privacy.unchanged import BitSums, has_bits
from psgrad.engine.transforms.private_torch import tree_leaves, tree_map
from psgrad.errors import DataError


class DrawnRow(NamedTuple):
    """A row that was drawn for a batch."""

    batch: int
    row: int


class RowsWithCoins(Dataset[Any]):
    """A dataset whose rows are read with coins of the run, by the number of the batch; in worker processes,
    too.
    """

    def __init__(self, dataset: Any, coins: Coins) -> None:
        self._dataset, self._coins = dataset, coins

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, drawn: Sequence[DrawnRow]) -> list[Any]:
        """The rows of a batch."""
        if not drawn:
            return []
        rows = [each.row for each in drawn]
        together = getattr(self._dataset, "__getitems__", None)
        self._coins.begin(drawn[0].batch)
        with self._coins.seeded():
            return list(together(rows)) if together else [self._dataset[row] for row in rows]


class RecordsApart:
    """A loader's collate function, whose batches have rows that depend on no other row, as far as the first
    batch of several rows shows it; and the empty batch. It may end a loop that has released nothing yet.

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
        f"the loader's collate_fn makes batches whose {how}; expected a row for each record, which is the"
        " same whatever other records are in the batch",
        hint=(
            "mixup, a normalisation by the batch, or masks that are drawn for a batch: one record more"
            " changes others' gradients, and clipping bounds nothing; do it in the dataset, row by row,"
            " with what is public"
        ),
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
