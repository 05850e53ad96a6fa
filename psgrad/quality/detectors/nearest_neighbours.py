"""Outliers by the distance to the nearest rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from psgrad.quality.detector import Detector, FloatArray

# Rows that others are compared with at once: a distance to each is computed for every row.
LARGEST_REFERENCE = 5_000


@dataclass(frozen=True)
class NearestNeighbours(Detector):
    """The mean euclidean distance to the nearest rows.

    With more than 5,000 rows to compare with, a random 5,000 are used: distances then grow for all rows
    alike.

    Options:
        neighbours: how many; as many as there are, if there are fewer.
    """

    neighbours: int = 10

    name: ClassVar[str] = "nearest_neighbours"
    title: ClassVar[str] = "Distance to the nearest neighbours"
    unit: ClassVar[str] = "loss per unit of parameter"
    source: ClassVar[str] = (
        "Angiulli, Pizzuti: Fast Outlier Detection in High Dimensional Spaces (2002), definition 1, divided"
        " by k"
    )

    def __post_init__(self) -> None:
        if self.neighbours < 1:
            raise ValueError(f"got {self.neighbours} neighbours, expected at least 1")

    def scores(self, rows: FloatArray, reference: FloatArray | None, seed: int) -> FloatArray:
        from sklearn.neighbors import NearestNeighbors as Search

        usual = rows if reference is None else reference
        chosen = np.arange(len(usual))
        if len(usual) > LARGEST_REFERENCE:
            chosen = np.sort(np.random.default_rng(seed).choice(len(usual), LARGEST_REFERENCE, replace=False))
        search = Search(algorithm="brute").fit(usual[chosen])
        scores, others = np.full(len(rows), np.nan), np.arange(len(rows))
        if reference is None:  # no row is its own neighbour
            others = np.setdiff1d(others, chosen)
            if len(chosen) > 1:
                scores[chosen] = search.kneighbors(n_neighbors=min(self.neighbours, len(chosen) - 1))[0].mean(
                    1
                )
        if len(others):
            distances, _ = search.kneighbors(rows[others], n_neighbors=min(self.neighbours, len(chosen)))
            scores[others] = distances.mean(1)
        return scores
