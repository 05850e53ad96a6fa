"""Leave-one-out: does a query's measurement rise by what is predicted, where a model is trained without one example?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from psgrad.engine.influence.evaluation.resampling import Interval, drawn_counts, interval_of, pearson, pearson_of_resamples, spearman

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class LOOScore:
    """Of one method, over the removals.

    Attributes:
        pearson, spearman: means over the queries; a correlation that is not defined counts as 0. interval: of the mean of the first, by
            resampling the removals.
        slope, intercept: of actual on predicted rises, over all removals and queries: 1 and 0 for a method that keeps its unit.
        pooled: the correlation of all removals and queries at once.
        undefined: queries without a correlation. per_query: [m] Pearson, NaN where undefined.
    """

    pearson: float
    interval: Interval
    spearman: float
    slope: float
    intercept: float
    pooled: float
    undefined: int
    per_query: Array = field(repr=False)


def leave_one_out(scores: Mapping[str, Array], removed: Array, rises: Array, seed: int = 0) -> dict[str, LOOScore]:
    """The score of each method.

    Args:
        scores: name -> [n, m]. removed: [k] the rows that were left out, one at a time.
        rises: [k, m] how much larger each query's measurement is without that row.
        seed: of the resamples.
    """
    from scipy.stats import linregress

    counts = drawn_counts(len(removed), seed)
    found = {}
    for name, matrix in scores.items():
        predicted = matrix[removed]
        per_query = pearson(predicted, rises)
        flat = predicted.ravel()
        known = np.isfinite(flat)
        varies = known.sum() > 1 and np.ptp(flat[known]) > 0
        line = linregress(flat[known], rises.ravel()[known]) if varies else None
        found[name] = LOOScore(
            pearson=_mean(per_query),
            interval=interval_of(_mean(per_query), np.nan_to_num(pearson_of_resamples(predicted, rises, counts)).mean(1), limit=1),
            spearman=_mean(spearman(predicted, rises)),
            slope=float(line.slope) if line else float("nan"),
            intercept=float(line.intercept) if line else float("nan"),
            pooled=float(line.rvalue) if line else float("nan"),
            undefined=int(np.isnan(per_query).sum()),
            per_query=per_query,
        )
    return found


def choose_removals(self_influence: Array, count: int, highest: int, random: np.random.Generator) -> Array:
    """Row numbers, in order: the `highest` by self-influence [n], and others at random, `count` in all or as many as there are."""
    by_influence = np.argsort(-np.nan_to_num(self_influence, nan=-np.inf), kind="stable")
    top, rest = by_influence[:highest], by_influence[highest:]
    others = random.choice(rest, min(max(count - len(top), 0), len(rest)), replace=False)
    return np.sort(np.concatenate([top, others]))


def _mean(values: Array) -> float:
    return float(np.nan_to_num(values).mean())
