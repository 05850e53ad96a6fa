"""Metrics of an evaluation: the linear datamodeling score (LDS), leave-one-out correlation, and removal
curves.

LDS: how well sums of scores rank the outcomes of models that were retrained on subsets. Park, Georgiev,
Ilyas, Leclerc and Madry, "TRAK" (2023), section 2; Ilyas et al., "Datamodels" (2022). Leave-one-out: whether
a query's measurement rises by the predicted amount if a model is trained without one example. Removal curves:
how much worse a query becomes if its strongest proponents are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np

from psgrad.engine.influence.evaluation.statistics import (
    Interval,
    interval_of,
    mean_interval,
    pearson,
    spearman,
    without_each,
)

Array = np.ndarray[Any, Any]

_MOST_SPLITS = 20


@dataclass(frozen=True)
class LDSScore:
    """The LDS of one method.

    Attributes:
        mean: over all queries, of the rank correlation over subsets; one that is not defined counts as 0.
        interval: of the mean, over draws of as many subsets, which all queries share.
        undefined: queries without a correlation: their scores are not finite, or the same for all subsets.
        per_query: [m], NaN where undefined.
        ahead, ahead_interval: how far the main method is ahead, and the interval of this paired difference;
            None for the main one.
    """

    mean: float
    interval: Interval
    undefined: int
    per_query: Array = field(repr=False)
    ahead: float | None = None
    ahead_interval: Interval | None = None


@dataclass(frozen=True)
class Ceiling:
    """How well outcomes can be predicted at most, given the noise of retraining.

    single: the rank correlation of the outcomes of one seed with another's, over the same subsets.
    reliability: that of the mean over the seeds with such a mean of other seeds (Spearman-Brown). best: its
    square root, what the true expected outcome would score.
    """

    single: float
    reliability: float
    best: float


def lds_mean(scores: Array, subsets: Array, outcomes: Array) -> float:
    """The mean score of `lds` for scores [n, m], subsets [S, n] bool and outcomes [S, R, m]."""
    return mean_correlation(subsets.astype(float) @ scores, -outcomes.mean(1))


def mean_correlation(predicted: Array, actual: Array) -> float:
    """The mean rank correlation over the columns; one that is not defined counts as 0."""
    return _mean(spearman(predicted, actual))


def lds(scores: Mapping[str, Array], subsets: Array, outcomes: Array, main: str) -> dict[str, LDSScore]:
    """The score of each method.

    Args:
        scores: name -> [n, m], positive where a row helps a query.
        subsets: [S, n] bool, the rows that models were trained on.
        outcomes: [S, R, m], the queries' measurements, larger being worse, of R seeds.
        main: the method that the others are compared with.
    """
    truth = -outcomes.mean(1)
    sums = {name: subsets.astype(float) @ matrix for name, matrix in scores.items()}
    without = {name: without_each(mean_correlation, predicted, truth) for name, predicted in sums.items()}
    per_query = {name: spearman(predicted, truth) for name, predicted in sums.items()}
    means = {name: _mean(values) for name, values in per_query.items()}
    return {
        name: LDSScore(
            means[name],
            interval_of(means[name], without[name], correlation=True),
            int(np.isnan(values).sum()),
            values,
            None if name == main else means[main] - means[name],
            (None if name == main else interval_of(means[main] - means[name], without[main] - without[name])),
        )
        for name, values in per_query.items()
    }


def ceiling(outcomes: Array) -> Ceiling | None:
    """The ceiling of outcomes [S, R, m], of R seeds; None if there is one seed only."""
    seeds = outcomes.shape[1]
    if seeds < 2:
        return None
    single = _agreement(outcomes, 1)
    size = seeds // 2
    ratio = seeds / size
    halves = _agreement(outcomes, size)
    reliability = ratio * halves / (1 + (ratio - 1) * halves)
    return Ceiling(single, reliability, float(np.sqrt(max(reliability, 0.0))))


def _agreement(outcomes: Array, size: int) -> float:
    """The mean rank correlation of disjoint groups of `size` seeds."""
    seeds = range(outcomes.shape[1])
    pairs = [
        (one, other)
        for one in combinations(seeds, size)
        for other in combinations(seeds, size)
        if one < other and not {*one} & {*other}
    ]
    # Evenly from all, so that many seeds don't take many minutes.
    pairs = pairs[:: -(-len(pairs) // _MOST_SPLITS)]
    correlations = [
        np.nan_to_num(spearman(outcomes[:, one].mean(1), outcomes[:, other].mean(1))).mean()
        for one, other in pairs
    ]
    return float(np.mean(correlations))


def random_subsets(rows: int, count: int, fraction: float, random: np.random.Generator) -> Array:
    """[count, rows] bool: subsets with a share of the rows each, all of one size."""
    size = round(fraction * rows)
    subsets = np.zeros((count, rows), dtype=bool)
    for subset in subsets:
        subset[random.choice(rows, size, replace=False)] = True
    return subsets


def rows_of(subsets: Array) -> Sequence[Array]:
    """The row numbers of each of the subsets [S, n] bool."""
    return [np.flatnonzero(subset) for subset in subsets]


@dataclass(frozen=True)
class LOOScore:
    """The leave-one-out score of one method, over the removals.

    Attributes:
        pearson, spearman: means over the queries; a correlation that is not defined counts as 0.
        interval: of the mean of the first, over draws of as many removals.
        slope, intercept: of actual on predicted rises, over all removals and queries: 1 and 0 for a method
            that keeps its unit.
        pooled: the correlation of all removals and queries at once.
        undefined: queries without a correlation.
        per_query: [m] Pearson, NaN where undefined.
    """

    pearson: float
    interval: Interval
    spearman: float
    slope: float
    intercept: float
    pooled: float
    undefined: int
    per_query: Array = field(repr=False)


def leave_one_out(scores: Mapping[str, Array], removed: Array, rises: Array) -> dict[str, LOOScore]:
    """The score of each method.

    Args:
        scores: name -> [n, m].
        removed: [k] the rows that were left out, one at a time.
        rises: [k, m] how much larger each query's measurement is without that row.
    """
    from scipy.stats import linregress

    result = {}
    for name, matrix in scores.items():
        predicted = matrix[removed]
        per_query = pearson(predicted, rises)
        flat = predicted.ravel()
        finite = np.isfinite(flat)
        varies = finite.sum() > 1 and np.ptp(flat[finite]) > 0
        line = linregress(flat[finite], rises.ravel()[finite]) if varies else None
        result[name] = LOOScore(
            pearson=_mean(per_query),
            interval=interval_of(
                _mean(per_query),
                np.nan_to_num(without_each(pearson, predicted, rises)).mean(1),
                correlation=True,
            ),
            spearman=_mean(spearman(predicted, rises)),
            slope=float(line.slope) if line else float("nan"),
            intercept=float(line.intercept) if line else float("nan"),
            pooled=float(line.rvalue) if line else float("nan"),
            undefined=int(np.isnan(per_query).sum()),
            per_query=per_query,
        )
    return result


def choose_removals(self_influence: Array, count: int, highest: int, random: np.random.Generator) -> Array:
    """Row numbers, in order: the `highest` by self-influence [n], and others at random, `count` in all or as
    many as there are.
    """
    by_influence = np.argsort(-np.nan_to_num(self_influence, nan=-np.inf), kind="stable")
    top, rest = by_influence[:highest], by_influence[highest:]
    others = random.choice(rest, min(max(count - len(top), 0), len(rest)), replace=False)
    return np.sort(np.concatenate([top, others]))


def _mean(values: Array) -> float:
    return float(np.nan_to_num(values).mean())


@dataclass(frozen=True)
class RemovalScore:
    """The mean rise over the queries of one method and one number of removed examples, with its interval over
    draws of as many queries; and how far the main method's rise is above it, paired by query (None for the
    main one).
    """

    removed: int
    rise: float
    interval: Interval
    per_query: Array = field(repr=False)
    ahead: float | None = None
    ahead_interval: Interval | None = None


def strongest(scores: Array, query: int, count: int) -> Array:
    """The rows with the largest scores [n, m] for a query, missing ones last, in the order of the dataset."""
    column = np.nan_to_num(scores[:, query], nan=-np.inf)
    return np.sort(np.argsort(-column, kind="stable")[:count])


def removal(rises: Mapping[str, Mapping[int, Array]], main: str) -> dict[str, dict[int, RemovalScore]]:
    """name -> number of removed examples -> its score, of the queries' rises [Q], each the mean over the
    seeds.
    """
    result: dict[str, dict[int, RemovalScore]] = {}
    for name, curve in rises.items():
        result[name] = {}
        for count, values in curve.items():
            paired = rises[main][count] - values
            result[name][count] = RemovalScore(
                count,
                float(values.mean()),
                mean_interval(values),
                values,
                None if name == main else float(paired.mean()),
                None if name == main else mean_interval(paired),
            )
    return result
