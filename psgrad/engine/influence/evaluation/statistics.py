"""Correlations and jackknife intervals for many queries at once, and the scores of a method as one matrix.

Tied values have their mean rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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


def without_each(statistic: Callable[..., Any], *columns: Array) -> Array:
    """[k, ...]: a statistic of matrices [k, m] without each of the k items."""
    return np.stack(
        [statistic(*(np.delete(each, item, 0) for each in columns)) for item in range(len(columns[0]))]
    )


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
    with np.errstate(invalid="ignore", divide="ignore"):
        x, y = _standard(x), _standard(y)
        constant = ~(x.any(0) & y.any(0))
        return np.where(constant, np.nan, (x * y).mean(0))


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
