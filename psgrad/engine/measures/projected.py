"""Projected gradients as other measures find them: the rows that count, and how far inner products of them can be trusted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

COLUMN = "projected_gradients"


@dataclass(frozen=True)
class Projected:
    """The projected gradients of the samples that are finite.

    Attributes:
        rows: [m, k]. places: [m] int64, which samples they are.
        exact: whether nothing was projected: a row is the whole gradient.
    """

    rows: torch.Tensor
    places: torch.Tensor
    exact: bool

    @classmethod
    def of(cls, rows: Mapping[str, torch.Tensor], parameters: int) -> Projected:
        """rows: as Measure.gather has them. parameters: p, numbers in a gradient."""
        found = rows[COLUMN]
        places = torch.nonzero(rows["ok"] & torch.isfinite(found).all(1)).squeeze(1)
        return cls(found if len(places) == len(found) else found[places], places, found.shape[1] == parameters)

    @property
    def noise(self) -> float:
        """Of x and y that are orthogonal, the standard deviation of <Px, Py> / (|x| |y|); that of |Px|^2 / |x|^2 is sqrt(2) times it."""
        return 0.0 if self.exact else 1 / math.sqrt(self.rows.shape[1])


def spread(values: torch.Tensor, places: torch.Tensor, samples: int) -> torch.Tensor:
    """[n, ...]: values [m, ...] at these places [m] of n samples; elsewhere NaN, or -1 among whole numbers."""
    whole = values.new_full((samples, *values.shape[1:]), math.nan if values.is_floating_point() else -1)
    whole[places] = values
    return whole
