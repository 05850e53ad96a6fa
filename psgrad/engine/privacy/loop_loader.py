"""The loader of a private training loop: how its batches are drawn, that rows are read with coins of the run
and put into a batch apart from the others, and that a step is taken on each batch.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from psgrad import random_state
from psgrad.engine.privacy.coins import Coins
from psgrad.engine.privacy.generators import Generator
from psgrad.engine.privacy.records import Relation
from psgrad.engine.privacy.sampling import Sampling
from psgrad.engine.privacy.unchanged import BitSums
from psgrad.engine.transforms.private_torch import tree_leaves, tree_map
from psgrad.errors import ConfigError, DataError


class LoopSampling(NamedTuple):
    """How batches are drawn. steps: of an epoch. told_by: the numbers from which that of the records follows,
    where it is public.
    """

    sampling: Sampling
    relation: Relation
    expected: float
    steps: int
    told_by: str

    @classmethod
    def of(
        cls, loader: DataLoader[Any], poisson: bool, rate: float | None, expected: float | None
    ) -> LoopSampling:
        """As make_private has them. Raises ConfigError for a loader or numbers that no batch is drawn by."""
        _require_drawable(loader, poisson)
        if expected is not None and not 0 < expected < math.inf:
            raise ConfigError(f"expected_batch_size is {expected!r}; expected a positive number of records")
        if not poisson:
            if rate is not None:
                raise ConfigError(
                    "sample_rate was given with poisson_sampling=False; expected one of them: batches of"
                    " one size have no rate",
                )
            size = loader.batch_size or 1
            sampling = Sampling("fixed", batch_size=size)
            return cls(sampling, "replace_one", float(expected or size), len(loader), "")
        missing = {"sample rate": rate is None, "divisor": expected is None}
        told_by = " and the ".join(name for name, missed in missing.items() if missed)
        rate = 1 / len(loader) if rate is None else rate
        sampling = Sampling("poisson", sample_rate=rate)
        size = rate * len(loader.dataset)  # type: ignore[arg-type]
        relation: Relation = "zero_out" if told_by else "add_or_remove_one"
        return cls(sampling, relation, float(expected or size), max(1, round(1 / rate)), told_by)


class DrawnBatch:
    """The batch in the loop's hands. size: its records, None where the loop has none to step: until a step on
    it is paid for.
    """

    size: int | None = None

    def require_stepped(self) -> None:
        """Raises ConfigError after a batch on which no step was taken."""
        if self.size is not None:
            raise ConfigError(
                "the loader was asked for a batch, and no step was taken on the one before; expected a"
                " drawn batch is stepped: loss.backward() and optimizer.step() for each, an empty one and"
                " one of an infinite loss, too (records without a finite gradient add zero)",
                hint=(
                    "`continue`, `break`, or batches that the loop puts together by itself: whether a"
                    " batch is left out depends on the data, and nothing hides it; take the step; after"
                    " an interrupt, make_private goes on with the original parts"
                ),
            )


class PrivateLoader:
    """Batches of records that are drawn for each step, on each of which a step is to be taken. An empty batch
    is a batch.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        rows: RowsWithCoins,
        sampling: LoopSampling,
        generator: Generator,
        drawn: DrawnBatch,
    ) -> None:
        self._drawn, self._sizes, self.dataset = drawn, deque[int](), loader.dataset
        self._steps, numbers = sampling.steps, count()

        def draws() -> Iterator[list[DrawnRow]]:
            for _ in range(self._steps):
                chosen = sampling.sampling.draw(len(rows), generator).tolist()
                self._sizes.append(len(chosen))
                number = next(numbers)  # also where an epoch ends early no two batches have one number
                yield [DrawnRow(number, row) for row in chosen]

        self._inner: DataLoader[Any] = DataLoader(
            rows,
            batch_sampler=_Batches(draws),
            collate_fn=RecordsApart(loader.collate_fn, partial(loader.dataset.__getitem__, 0)),
            num_workers=loader.num_workers,
            pin_memory=loader.pin_memory,
            worker_init_fn=loader.worker_init_fn,
        )

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[Any]:
        self._drawn.require_stepped()
        self._sizes.clear()
        for batch in self._inner:
            self._drawn.require_stepped()
            self._drawn.size = self._sizes.popleft()
            yield batch
        self._drawn.require_stepped()


class _Batches:
    """The rows of each batch, drawn anew in each epoch."""

    def __init__(self, draws: Callable[[], Iterator[list[DrawnRow]]]) -> None:
        self._draws = draws

    def __iter__(self) -> Iterator[list[DrawnRow]]:
        return self._draws()


def _require_drawable(loader: DataLoader[Any], poisson: bool) -> None:
    """Raises ConfigError for a loader whose dataset can't be drawn from, or that chooses among its rows."""
    dataset: Any = loader.dataset
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__") or not len(dataset):
        raise ConfigError(
            f"the loader's dataset is of type {type(dataset).__name__}; expected a dataset with a length"
            " and rows by number, of which each step draws some",
        )
    if not len(loader):
        raise ConfigError(
            "the loader has no batches; expected one or more",
            hint="drop_last=True and fewer rows than a batch has",
        )
    if not poisson and loader.batch_size is None:
        raise ConfigError("the loader has no batch_size; expected one, for batches of a fixed size")
    if not _takes_each_row(loader):
        own = loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler
        sampler = loader.batch_sampler if own else loader.sampler
        raise ConfigError(
            f"the loader has a sampler of its own, a {type(sampler).__name__}, and make_private draws in"
            " its place; expected the loader's default, or shuffle=True: rows that a sampler leaves out"
            " would be drawn",
            hint="choose the rows with torch.utils.data.Subset, and leave the sampler out",
        )


def _takes_each_row(loader: DataLoader[Any]) -> bool:
    """Whether the loader's sampler has each row of its dataset once, in their order or shuffled."""
    batches: Any = loader.batch_sampler
    if type(batches) not in (BatchSampler, type(None)):
        return False
    sampler: Any = loader.sampler if batches is None else batches.sampler
    dataset: Any = loader.dataset
    if type(sampler) not in (SequentialSampler, RandomSampler) or sampler.data_source is not dataset:
        return False
    whole = type(sampler) is SequentialSampler or not sampler.replacement
    return whole and len(sampler) == len(dataset)


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
        BitSums.of(mine[place : place + 1].to_dense()).same(BitSums.of(one.to_dense()))
        for mine, one in zip(tree_leaves(batch), tree_leaves(alone), strict=True)
        if isinstance(mine, Tensor) and mine.dim() and mine[place : place + 1].shape == one.shape
    )
