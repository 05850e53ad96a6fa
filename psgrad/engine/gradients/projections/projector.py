"""The map from a gradient to its row of k numbers: a random projection, or all entries of the gradient."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Literal

import torch

from psgrad.engine.gradients import PerSampleGradients, Projection, Sparse, TwoSided
from psgrad.engine.gradients.flat import Flat
from psgrad.errors import ConfigError

Kind = Literal["none", "sparse", "two-sided"]
KINDS = ("none", "sparse", "two-sided")


class Projector:
    """P of [k, p], with E[<Px, Py>] = <x, y>: the same for training examples and queries of one checkpoint,
    another for each checkpoint.

    Args:
        kind: as in `psgrad.engine.gradients`; 'none' returns all entries. 'two-sided' has other columns for
            each parameter.
        dimension: the number of columns; for 'two-sided' for each parameter, rounded down to a square. A
            gradient with at most as many entries is not projected, because a projection would add noise and
            save no memory.
        seed, number: of the run, and of the checkpoint.
        params: name -> tensor of the parameter's shape.

    Attributes:
        width: k, columns of a row.
        side: of the square that 'two-sided' has for each parameter.
        noise: an upper bound, for orthogonal gradients x and y, of the standard deviation of
            <Px, Py> / (|x| |y|); 0 without a projection.

    Raises ConfigError for a kind that is not known or a dimension below 1.
    """

    def __init__(
        self, kind: str, dimension: int, seed: int, number: int, params: Mapping[str, torch.Tensor]
    ) -> None:
        if kind not in KINDS:
            raise ConfigError(f"a projection of kind {kind!r}; expected one of {', '.join(KINDS)}")
        if isinstance(dimension, bool) or not isinstance(dimension, int) or dimension < 1:
            raise ConfigError(f"a projection to {dimension!r} columns; expected a whole number, at least 1")
        self.flat = Flat(params)
        self.kind = kind
        side = self.side = math.isqrt(dimension)
        width = side * side * len(self.flat.shapes) if kind == "two-sided" else dimension
        self.projection: Projection | None = None
        if kind != "none" and width < self.flat.size:
            own = seed_of(seed, number)
            is_sparse = kind == "sparse"
            self.projection = Sparse(dimension, own) if is_sparse else TwoSided(side, side, own)
        self.width = self.flat.size if self.projection is None else width
        self.noise = 0.0 if self.projection is None else dimension**-0.5
        if isinstance(self.projection, TwoSided):
            # of l r' and m s' with l = m: <Al, Al> has a second moment of at most 1 + 2 / left, <Br, Bs> one
            # of 1 / right
            self.noise = math.sqrt((1 + 2 / side) / side)

    def __call__(self, gradients: PerSampleGradients) -> torch.Tensor:
        """[n, k] of n gradients, float32 or, where they are, float64."""
        return (
            self.flat.join(gradients.materialise())
            if self.projection is None
            else gradients.project(self.projection)
        )

    def transposed(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, p] float64: P' times n rows [n, k]."""
        if self.projection is None:
            return rows.double()
        columns = self.projection.columns(self.flat.shapes)
        parts = {
            name: self.projection.transposed(rows[:, columns[name]].double(), name, shape)
            for name, shape in self.flat.shapes.items()
        }
        return self.flat.join(parts)

    @property
    def spans(self) -> tuple[slice, ...]:
        """The columns of each parameter, where parameters have their own; else all of them, as one."""
        own = self._own_columns()
        found = [slice(0, self.width)] if own is None else own.values()
        return tuple(columns for columns in found if columns.start < columns.stop)

    def _own_columns(self) -> Mapping[str, slice] | None:
        """Parameter -> its columns; None if all parameters share the columns."""
        if self.projection is None:
            return self.flat.columns
        return self.projection.columns(self.flat.shapes) if self.projection.per == "parameter" else None


def seed_of(seed: int, number: int) -> int:
    """The seed of checkpoint `number`'s projection: projections of different checkpoints, and of different
    seeds, are independent.
    """
    return int.from_bytes(
        hashlib.sha256(f"psgrad checkpoint {number} of seed {seed}".encode()).digest()[:7], "little"
    )
