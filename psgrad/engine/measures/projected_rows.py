"""Projected gradients as other measures use them: the rows of finite samples and the error of their inner
products; and a random choice of samples, for measures whose cost grows faster than the number of samples.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from psgrad.engine.execution.examples import Examples
from psgrad.ragged import Block, joined

COLUMN = "projected_gradients"


@dataclass(frozen=True)
class FiniteProjections:
    """The projected gradients of the samples that are finite.

    Attributes:
        rows: [m, k].
        places: [m] int64, which samples they are.
        exact: whether nothing was projected: a row is the whole gradient.
    """

    rows: torch.Tensor
    places: torch.Tensor
    exact: bool

    @classmethod
    def of(cls, rows: Mapping[str, torch.Tensor], parameters: int) -> FiniteProjections:
        """The finite ones of `rows`, name -> [n, ...], which are those of Measure.gather. parameters: p,
        numbers in a gradient.
        """
        column = rows[COLUMN]
        places = torch.nonzero(rows["ok"] & torch.isfinite(column).all(1)).squeeze(1)
        return cls(
            column if len(places) == len(column) else column[places], places, column.shape[1] == parameters
        )

    @property
    def noise(self) -> float:
        """Of x and y that are orthogonal, the standard deviation of <Px, Py> / (|x| |y|); that of |Px|^2 /
        |x|^2 is sqrt(2) times it.
        """
        return 0.0 if self.exact else 1 / math.sqrt(self.rows.shape[1])


def spread(values: torch.Tensor, places: torch.Tensor, samples: int) -> torch.Tensor:
    """[n, ...]: values [m, ...] at these places [m] of n samples; elsewhere NaN, or -1 among whole
    numbers.
    """
    whole = values.new_full((samples, *values.shape[1:]), math.nan if values.is_floating_point() else -1)
    whole[places] = values
    return whole


def chosen_rows(
    usable: torch.Tensor, count: int, seed: int, labels: torch.Tensor | None = None
) -> torch.Tensor:
    """Rows, ascending int64: at most `count` of those that are usable [n] bool, drawn by the seed.

    With labels [n] equally many of each class; if a class has fewer, the others share its places.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = torch.nonzero(usable).squeeze(1)
    rows = rows[torch.randperm(len(rows), generator=generator)]
    if labels is not None and len(rows) > count:
        # each class's first, then each one's second, and so on: the classes have equal numbers as long as
        # they last
        of_class = torch.unique(labels[rows], return_inverse=True)[1]
        order = of_class.argsort(stable=True)
        sizes = torch.bincount(of_class)
        turn = torch.empty_like(order)
        turn[order] = torch.arange(len(rows)) - (sizes.cumsum(0) - sizes)[of_class[order]]
        rows = rows[turn.argsort(stable=True)]
    return rows[:count].sort().values


def examples_at(examples: Examples, rows: torch.Tensor) -> Examples:
    """The examples of these rows [k], counted from 0."""
    numbers = rows.tolist()

    def read(start: int, stop: int) -> Block:
        return joined([examples.read(row, row + 1) for row in numbers[start:stop]])

    return replace(examples, read=read, count=len(numbers), numbers=examples.numbers_of(rows))
