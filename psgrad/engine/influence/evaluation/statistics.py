"""Correlations and jackknife intervals for many queries at once, and the scores of a method as one matrix.

A sample is a vector of counts: how often each item is in it. The correlations of many samples and hundreds of
queries are then matrix products. Tied values have their mean rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from psgrad.engine.execution.examples import Examples
from psgrad.engine.influence.method import Fitted, Method
from psgrad.engine.influence.ranking import Normalize, divisor, joined_scores, joined_self

Array = np.ndarray[Any, Any]
Interval = tuple[float, float]

CONFIDENCE = 0.95
# A correlation of one has no transform.
_LARGEST = 1 - np.finfo(np.float64).eps
# Queries whose ranks in all samples are in memory at once.
_CHUNK = 8


def one_left_out(items: int) -> Array:
    """[items, items]: how often each item is in the sample without item k, for each k."""
    result: Array = 1.0 - np.eye(items)
    return result


def interval_of(estimate: float, without: Array, correlation: bool = False) -> Interval:
    """The jackknife interval of an estimate from its values without each of the items [k], at the confidence
    of this module; NaN for one item.

    Efron and Tibshirani, "An Introduction to the Bootstrap" (1993), section 11.5, with Student's t. That of a
    correlation is of Fisher's transform of it, and so within -1 and 1.

    It always holds the estimate. Over all subsets that could be drawn a rank correlation is larger by
    3 (rho - tau) / (k + 1), which is not corrected (decision 0019).
    """
    from scipy.stats import t

    count = len(without)
    if count < 2:
        return float("nan"), float("nan")
    values = np.append(without, estimate)
    if correlation:
        values = np.arctanh(values.clip(-_LARGEST, _LARGEST))
    half = t.ppf((1 + CONFIDENCE) / 2, count - 1) * np.sqrt((count - 1) * values[:-1].var())
    ends = values[-1] - half, values[-1] + half
    low, high = np.tanh(ends) if correlation else ends
    return float(low), float(high)


def mean_interval(values: Array) -> Interval:
    """The interval of the mean of [k] values, by Student's t."""
    left_out = (values.sum() - values) / max(len(values) - 1, 1)
    return interval_of(float(values.mean()), left_out)


def spearman(x: Array, y: Array) -> Array:
    """[m]: the rank correlation of the columns of x [k, m] with those of y; NaN where one is constant or not
    finite.
    """
    from scipy.stats import rankdata

    finite = np.isfinite(x).all(0) & np.isfinite(y).all(0)
    result = np.full(x.shape[1], np.nan)
    result[finite] = pearson(rankdata(x[:, finite], axis=0), rankdata(y[:, finite], axis=0))
    return result


def pearson(x: Array, y: Array) -> Array:
    """[m]: the correlation of the columns of x [k, m] with those of y; NaN where one is constant or not
    finite.
    """
    return pearson_of_samples(x, y, np.ones((1, len(x))))[0]


def pearson_of_samples(x: Array, y: Array, counts: Array) -> Array:
    """[samples, m]: the correlation of the columns in each sample; NaN where a column is constant in it."""
    with np.errstate(invalid="ignore", divide="ignore"):
        x, y = _standard(x), _standard(y)
        total = counts.sum(1, keepdims=True)
        mean_x, mean_y = counts @ x / total, counts @ y / total
        covariance = counts @ (x * y) / total - mean_x * mean_y
        variance_x, variance_y = counts @ x**2 / total - mean_x**2, counts @ y**2 / total - mean_y**2
        smallest = 64 * np.finfo(np.float64).eps  # the columns have variance one: less is rounding
        constant = (variance_x < smallest) | (variance_y < smallest)
        return np.where(constant, np.nan, covariance / np.sqrt(variance_x * variance_y))


def spearman_of_samples(columns: Mapping[str, Array], y: Array, counts: Array) -> dict[str, Array]:
    """name -> [samples]: the mean over queries of the rank correlation of each matrix [k, m] with y, in each
    sample of the k items.

    A correlation that is not defined counts as 0.
    """
    total = {name: np.zeros(len(counts)) for name in columns}
    for start in range(0, y.shape[1], _CHUNK):
        queries = slice(start, start + _CHUNK)
        ranks_y, spread_y = _ranks(y[:, queries], counts)
        for name, x in columns.items():
            ranks_x, spread_x = _ranks(x[:, queries], counts)
            covariance = np.einsum("qbk,qbk,bk->qb", ranks_x, ranks_y, counts)
            defined = (spread_x > 0) & (spread_y > 0)
            scale = np.sqrt(np.where(defined, spread_x * spread_y, 1.0))
            total[name] += np.where(defined, covariance / scale, 0.0).sum(0)
    return {name: value / y.shape[1] for name, value in total.items()}


def _ranks(values: Array, counts: Array) -> tuple[Array, Array]:
    """(centred ranks [m, samples, k], their sum of squares [m, samples]) of columns [k, m]; zero for a
    column that is not finite.
    """
    by_query = values.T
    # Of those in the sample, an item comes after all that are smaller, and in the middle of its equals.
    after = (by_query[:, :, None] < by_query[:, None, :]) + 0.5 * (
        by_query[:, :, None] == by_query[:, None, :]
    )
    ranks = counts @ after.astype(np.float64) - counts.sum(1)[None, :, None] / 2
    ranks[~np.isfinite(by_query).all(1)] = 0
    return ranks, np.einsum("qbk,qbk,bk->qb", ranks, ranks, counts)


def _standard(x: Array) -> Array:
    """Columns with mean 0 and variance 1; a constant one becomes zeros."""
    centred = x - x.mean(0)
    deviation = np.sqrt((centred**2).mean(0))
    flat = deviation <= 1e-14 * np.abs(x).max(0)
    result: Array = np.where(
        flat, np.where(np.isfinite(deviation), 0.0, np.nan), centred / np.where(flat, 1.0, deviation)
    )
    return result


def score_matrix(
    method: Method,
    fitted: Sequence[Fitted],
    queries: Sequence[Examples],
    normalize: Normalize | None = None,
) -> Array:
    """[n, m] float64, positive where an example helps a query: of the checkpoints together.

    normalize: scores are divided as `divisor` says; None leaves them as they are.
    """
    divisors = None if normalize is None else [divisor(each.self_influence(), normalize) for each in fitted]
    joined = joined_scores(method, fitted, queries, divisors=divisors)
    scores: Array = torch.cat([block.scores[""] for block in joined]).double().cpu().numpy()
    return scores


def self_influences(method: Method, fitted: Sequence[Fitted]) -> Array:
    """[n] float64: each example's influence on itself, of the checkpoints together."""
    each = [torch.cat([block.self_influence for block in one.self_influence()]) for one in fitted]
    result: Array = joined_self(method, each).double().cpu().numpy()
    return result
