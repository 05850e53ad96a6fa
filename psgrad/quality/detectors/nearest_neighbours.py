"""Outliers by the distance to the nearest rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from psgrad.quality.detector import Detector, FloatArray

# Rows that others are compared with at once: a distance to each is computed for every row.
LARGEST_REFERENCE = 5_000


@dataclass(frozen=True)
class NearestNeighbours(Detector):
    """The mean distance to the nearest rows.

    With more than 5,000 rows to compare with, a random 5,000 are used: distances then grow for all rows
    alike.

    Options:
        neighbours: how many; as many as there are, if there are fewer.
        metric: 'euclidean', or 'cosine', 1 less the cosine of the angle, for which the length of a row does
            not matter. A row of zeros has no angle, and gets NaN.
    """

    neighbours: int = 10
    metric: Literal["euclidean", "cosine"] = "euclidean"

    name: ClassVar[str] = "nearest_neighbours"
    title: ClassVar[str] = "Distance to the nearest neighbours"
    unit: ClassVar[str] = "loss per unit of parameter (euclidean), or 0 to 2 (cosine)"
    source: ClassVar[str] = (
        "Angiulli, Pizzuti: Fast Outlier Detection in High Dimensional Spaces (2002), definition 1, divided"
        " by k"
    )

    def __post_init__(self) -> None:
        if self.neighbours < 1:
            raise ValueError(f"got {self.neighbours} neighbours, expected at least 1")

    @property
    def by_direction(self) -> bool:
        return self.metric == "cosine"

    def scores(self, rows: FloatArray, reference: FloatArray | None, seed: int) -> FloatArray:
        from sklearn.neighbors import NearestNeighbors as Search

        usual = rows if reference is None else reference
        chosen = np.arange(len(usual))
        if len(usual) > LARGEST_REFERENCE:
            chosen = np.sort(np.random.default_rng(seed).choice(len(usual), LARGEST_REFERENCE, replace=False))
        search = Search(algorithm="brute", metric=self.metric).fit(usual[chosen])
        scores = np.full(len(rows), np.nan)
        others = np.arange(len(rows))
        if reference is None:  # no row is its own neighbour
            others = np.setdiff1d(others, chosen)
            if len(chosen) > 1:
                scores[chosen] = search.kneighbors(n_neighbors=min(self.neighbours, len(chosen) - 1))[0].mean(
                    1
                )
        if len(others):
            scores[others] = search.kneighbors(rows[others], n_neighbors=min(self.neighbours, len(chosen)))[
                0
            ].mean(1)
        return scores
