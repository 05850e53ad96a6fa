"""The loader of a private training loop: how its batches are drawn, and that a step is taken on each."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from psgrad.engine.privacy.drawn_rows import DrawnRow, RecordsApart, RowsWithCoins
from psgrad.engine.privacy.generators import Generator
from psgrad.engine.privacy.records import Relation
from psgrad.engine.privacy.sampling import Sampling
from psgrad.errors import ConfigError


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
    """The batch in the loop's hands. size: its records, None where the loop has none to step."""

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
        self._steps, self._count = sampling.steps, 0

        def draws() -> Iterator[list[DrawnRow]]:
            for _ in range(self._steps):
                chosen = sampling.sampling.draw(len(rows), generator).tolist()
                self._sizes.append(len(chosen))
                yield [DrawnRow(self._count, row) for row in chosen]
                self._count += 1

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
    if type(loader.batch_sampler) not in (BatchSampler, type(None)) or not _takes_each_row(loader):
        sampler = loader.batch_sampler if type(loader.batch_sampler) is not BatchSampler else loader.sampler
        raise ConfigError(
            f"the loader has a sampler of its own, a {type(sampler).__name__}, and make_private draws in"
            " its place; expected the loader's default, or shuffle=True: rows that a sampler leaves out"
            " would be drawn",
            hint="choose the rows with torch.utils.data.Subset, and leave the sampler out",
        )


def _takes_each_row(loader: DataLoader[Any]) -> bool:
    """Whether the loader's sampler has each row of its dataset once, in their order or shuffled."""
    batches: Any = loader.batch_sampler
    sampler: Any = loader.sampler if batches is None else batches.sampler
    dataset: Any = loader.dataset
    if type(sampler) not in (SequentialSampler, RandomSampler) or sampler.data_source is not dataset:
        return False
    if type(sampler) is SequentialSampler:
        return True
    return not sampler.replacement and sampler.num_samples == len(dataset)
