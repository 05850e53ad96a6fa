"""Rows whose inputs nearly equal those of another dataset, such as evaluation data in training data."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

NEAR = 0.05  # near duplicates are nearer than this part of the usual distance
MOST = 50_000  # rows whose neighbours are searched


def usual_distance(points: Array) -> float:
    """The median distance of a point [n, k] to the nearest other one; 0 for a single one."""
    if len(points) < 2:
        return 0.0
    from sklearn.neighbors import NearestNeighbors

    return float(np.median(NearestNeighbors(n_neighbors=2).fit(points).kneighbors(points)[0][:, 1]))


def nearest(points: Array, others: Array) -> tuple[Array, Array]:
    """([n] the distance of each point to the nearest of the others, [n] its place among them). Infinite, and
    0, where there are no others.
    """
    if not len(points) or not len(others):
        return np.full(len(points), np.inf), np.zeros(len(points), dtype=int)
    from sklearn.neighbors import NearestNeighbors

    distances, places = NearestNeighbors(n_neighbors=1).fit(others).kneighbors(points)
    return distances[:, 0], places[:, 0]
