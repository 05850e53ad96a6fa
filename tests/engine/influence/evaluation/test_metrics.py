"""The metrics against scipy and sklearn, on data of which the answer is known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from psgrad.engine.influence.evaluation.metrics import (
    ceiling,
    choose_removals,
    lds,
    lds_mean,
    leave_one_out,
    random_subsets,
    removal,
    strongest,
)
from psgrad.engine.influence.evaluation.statistics import (
    interval_of,
    mean_interval,
    pearson,
    spearman,
    without_each,
)

N, M = 60, 12


def datamodel(
    subsets: int, noise: float, seeds: int = 1, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(true scores [n, m], subsets [S, n], outcomes [S, R, m]): losses that fall by the scores of the rows
    that are in, and noise.
    """
    random = np.random.default_rng(seed)
    scores = random.normal(size=(N, M))
    drawn = random_subsets(N, subsets, 0.5, random)
    spread = np.sqrt(N / 4)  # of a half-subset's sum of scores
    outcomes = 5.0 - (drawn @ scores)[:, None, :] + noise * spread * random.normal(size=(subsets, seeds, M))
    return scores, drawn, outcomes


# -- correlations of samples ---------------------------------------------------------------------------------


def with_ties(random: np.random.Generator, shape: tuple[int, ...], levels: int) -> np.ndarray:
    return random.integers(0, levels, shape).astype(float)


@pytest.mark.filterwarnings("ignore:An input array is constant")
@given(seed=st.integers(0, 1000), levels=st.sampled_from([2, 5, 10**9]), items=st.integers(3, 25))
def test_metrics_correlations_equal_scipy(seed: int, levels: int, items: int) -> None:
    random = np.random.default_rng(seed)
    x, y = with_ties(random, (items, 4), levels), with_ties(random, (items, 4), levels)
    ranked = [stats.spearmanr(x[:, q], y[:, q]).statistic for q in range(4)]
    plain = [stats.pearsonr(x[:, q], y[:, q]).statistic for q in range(4)]
    np.testing.assert_allclose(spearman(x, y), ranked, atol=1e-12)
    np.testing.assert_allclose(pearson(x, y), plain, atol=1e-12)


def test_metrics_correlations_without_each_item() -> None:
    x, y = np.random.default_rng(0).normal(size=(2, 9, 3))
    found = without_each(pearson, x, y)
    for item in range(9):
        rows = np.delete(np.arange(9), item)
        expected = [stats.pearsonr(x[rows, q], y[rows, q]).statistic for q in range(3)]
        np.testing.assert_allclose(found[item], expected, atol=1e-12)


def test_metrics_interval_of_mean_is_students() -> None:
    values = np.random.default_rng(0).exponential(size=40)
    expected = stats.t.interval(0.95, 39, values.mean(), stats.sem(values))
    assert mean_interval(values) == pytest.approx(expected)


@pytest.mark.sweep
@pytest.mark.parametrize("noise", [1.0, 0.4])
def test_metrics_interval_coverage(noise: float) -> None:
    """Over 200 draws of 20 subsets a 95 % interval of the score misses the mean score of such draws as seldom
    as it says, but for one chance in 10^3, and never the score itself.
    """
    expected = np.mean([lds_mean(*datamodel(20, noise, seed=seed)) for seed in range(1000, 3000)])
    missed = 0
    for seed in range(200):
        scores, subsets, outcomes = datamodel(20, noise, seed=seed)
        result = lds({"true": scores}, subsets, outcomes, "true")["true"]
        low, high = result.interval
        assert low <= result.mean <= high
        missed += not low <= expected <= high
    assert missed <= stats.binom.isf(1e-3, 200, 0.05)


# -- linear datamodeling score -------------------------------------------------------------------------------


def test_metrics_lds_equals_scipy() -> None:
    scores, subsets, outcomes = datamodel(30, 2.0, seeds=3)
    expected = [
        stats.spearmanr(subsets @ scores[:, q], -outcomes[:, :, q].mean(1)).statistic for q in range(M)
    ]
    result = lds({"a": scores}, subsets, outcomes, "a")["a"]
    np.testing.assert_allclose(result.per_query, expected, atol=1e-12)
    assert result.mean == pytest.approx(np.mean(expected))
    assert lds_mean(scores, subsets, outcomes) == pytest.approx(result.mean)


def test_metrics_lds_undefined_correlation_counts_zero() -> None:
    scores, subsets, outcomes = datamodel(30, 0.0)
    spoilt = scores.copy()
    spoilt[:, 0] = 1.0  # every subset of one size has the same sum
    spoilt[3, 1] = np.nan
    result = lds({"whole": scores, "spoilt": spoilt}, subsets, outcomes, "whole")["spoilt"]
    assert result.undefined == 2
    assert np.isnan(result.per_query[:2]).all()
    assert result.mean == pytest.approx((M - 2) / M)
    assert result.interval == pytest.approx(((M - 2) / M, (M - 2) / M))


def test_metrics_lds_paired_difference() -> None:
    """Two methods that share their noise: the interval of the difference is far narrower than each by
    itself.
    """
    scores, subsets, outcomes = datamodel(40, 2.0)
    near = scores + 0.05 * np.random.default_rng(2).normal(size=scores.shape)
    result = lds({"a": scores, "b": near}, subsets, outcomes, "a")
    assert result["b"].ahead == pytest.approx(result["a"].mean - result["b"].mean)
    assert result["b"].ahead_interval is not None
    low, high = result["b"].ahead_interval
    assert low <= result["b"].ahead <= high
    assert high - low < (result["a"].interval[1] - result["a"].interval[0]) / 4


@pytest.mark.parametrize(("seeds", "noise"), [(2, 1.0), (3, 0.7), (4, 1.5), (5, 1.0)])
def test_metrics_lds_ceiling(seeds: int, noise: float) -> None:
    """Of normal outcomes with known variances: one seed agrees with another to s / (s + e), the mean of R to
    s / (s + e / R).
    """

    def ranked(correlation: float) -> float:
        return 6 / np.pi * np.arcsin(correlation / 2)  # Pearson's of two normal variables to Spearman's

    scores, subsets, outcomes = datamodel(2500, noise, seeds=seeds)
    result = ceiling(outcomes)
    assert result is not None
    assert result.single == pytest.approx(ranked(1 / (1 + noise**2)), abs=0.02)
    assert result.best == pytest.approx(lds_mean(scores, subsets, outcomes), abs=0.02)
    assert result.best == pytest.approx(np.sqrt(result.reliability))


def test_metrics_lds_ceiling_one_seed() -> None:
    assert ceiling(datamodel(10, 1.0)[2]) is None


def test_metrics_subsets() -> None:
    drawn = random_subsets(21, 50, 0.5, np.random.default_rng(0))
    assert (drawn.sum(1) == 10).all()
    assert len(np.unique(drawn, axis=0)) == 50
    assert random_subsets(20, 3, 0.25, np.random.default_rng(0)).sum() == 15


# -- leave-one-out -------------------------------------------------------------------------------------------


def test_metrics_leave_one_out_equals_scipy() -> None:
    random = np.random.default_rng(0)
    scores, removed = random.normal(size=(N, M)), np.arange(0, N, 2)
    rises = 1.7 * scores[removed] + 0.2 + 0.3 * random.normal(size=(len(removed), M))
    result = leave_one_out({"a": scores, "half": scores / 2}, removed, rises)
    line = stats.linregress(scores[removed].ravel(), rises.ravel())
    assert result["a"].slope == pytest.approx(line.slope)
    assert result["a"].intercept == pytest.approx(line.intercept)
    assert result["a"].pooled == pytest.approx(line.rvalue)
    each = [stats.pearsonr(scores[removed, q], rises[:, q]).statistic for q in range(M)]
    np.testing.assert_allclose(result["a"].per_query, each, atol=1e-12)
    assert result["a"].pearson == pytest.approx(np.mean(each))
    assert result["a"].spearman == pytest.approx(
        np.mean([stats.spearmanr(scores[removed, q], rises[:, q]).statistic for q in range(M)])
    )
    assert result["a"].interval[0] < result["a"].pearson < result["a"].interval[1]
    # a method that is off by a factor shows in the slope alone
    assert result["half"].slope == pytest.approx(2 * line.slope)
    assert result["half"].pearson == pytest.approx(result["a"].pearson)


def test_metrics_removals() -> None:
    own = np.random.default_rng(0).permutation(100).astype(float)
    own[7] = np.nan
    result = choose_removals(own, 30, 10, np.random.default_rng(1))
    assert len(set(result)) == 30
    assert set(np.argsort(-np.nan_to_num(own, nan=-1))[:10]) <= set(result)
    assert (np.diff(result) > 0).all()
    assert not np.array_equal(result, choose_removals(own, 30, 10, np.random.default_rng(2)))
    assert choose_removals(own, 500, 10, np.random.default_rng(1)).tolist() == list(range(100))


# -- removals ------------------------------------------------------------------------------------------------


def test_metrics_strongest_rows() -> None:
    scores = np.array([[0.1, 5.0], [3.0, np.nan], [-4.0, 6.0], [2.0, 7.0]])
    assert strongest(scores, 0, 2).tolist() == [1, 3]
    assert strongest(scores, 1, 3).tolist() == [0, 2, 3]


def test_metrics_removal_mean_and_paired_differences() -> None:
    random = np.random.default_rng(0)
    shared = random.exponential(size=15)
    rises: dict[str, dict[int, Any]] = {"a": {10: shared + 1, 20: shared + 2}, "b": {10: shared, 20: shared}}
    result = removal(rises, "a")
    assert result["a"][20].rise == pytest.approx((shared + 2).mean())
    assert result["a"][20].ahead is None
    assert result["b"][10].ahead_interval == pytest.approx((1, 1))
    assert result["b"][20].ahead == pytest.approx(2)
    without = np.array([np.delete(shared, place).mean() for place in range(15)])
    assert result["b"][10].interval == pytest.approx(interval_of(shared.mean(), without))
