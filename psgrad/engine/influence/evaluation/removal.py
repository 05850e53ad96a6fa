"""Removal curves: how much worse a query fares when the examples that a method calls its strongest proponents are left out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from psgrad.engine.influence.evaluation.resampling import Interval, mean_interval

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class RemovalScore:
    """Of one method and one number of removed examples: the mean rise over the queries with its interval, by resampling queries; how far
    the main method's rise is above it, paired by query (None for the main one)."""

    rise: float
    interval: Interval
    ahead: float | None = None
    ahead_interval: Interval | None = None
    per_query: Array = field(repr=False, default_factory=lambda: np.empty(0))


def strongest(scores: Array, query: int, count: int) -> Array:
    """The rows with the largest scores [n, m] for a query, missing ones last, in the order of the dataset."""
    column = np.nan_to_num(scores[:, query], nan=-np.inf)
    return np.sort(np.argsort(-column, kind="stable")[:count])


def removal(rises: Mapping[str, Mapping[int, Array]], main: str, seed: int = 0) -> dict[str, dict[int, RemovalScore]]:
    """name -> number of removed examples -> its score, of the queries' rises [Q], each the mean over the seeds."""
    found: dict[str, dict[int, RemovalScore]] = {}
    for name, curve in rises.items():
        found[name] = {}
        for count, values in curve.items():
            paired = rises[main][count] - values
            found[name][count] = RemovalScore(
                float(values.mean()),
                mean_interval(values, seed),
                None if name == main else float(paired.mean()),
                None if name == main else mean_interval(paired, seed),
                values,
            )
    return found
