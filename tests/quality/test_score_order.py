"""The order of scores: the overlap of two orders that chance gives, and gaps in scores, which no smooth tail
has.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from scipy.stats import multivariate_normal, norm

from psgrad.quality.judging import judge
from psgrad.quality.score_order import expected_overlap, score_gap
from psgrad.run.results.manifest import ScoreGap
from tests.quality.frames import config, samples

Array = np.ndarray
Draw = Callable[[np.random.Generator, int], Array]

TAILS: dict[str, Draw] = {
    "a power, without a variance": lambda random, n: 1 / random.random(n),
    "a power, without a mean": lambda random, n: random.random(n) ** -2.0,
    "a power of ten": lambda random, n: random.random(n) ** -10.0,
    "Cauchy": lambda random, n: np.abs(random.standard_cauchy(n)),
    "Student's t of two degrees": lambda random, n: np.abs(random.standard_t(2, n)),
    "lognormal over decades": lambda random, n: random.lognormal(0, 6, n),
    "lognormal": lambda random, n: random.lognormal(0, 1, n),
    "exponential": lambda random, n: random.exponential(size=n),
    "normal": lambda random, n: np.abs(random.normal(size=n)),
    "whole numbers, with ties": lambda random, n: np.ceil(random.pareto(1, n)),
}
DRAWS = 400


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("count", [60, 160, 1000])
def test_score_gap_smooth_tail_has_none(tail: str, count: int) -> None:
    """The rule's level is 0.1 %: of 400 draws more than 4 have a probability of 6e-5 at the most."""
    random = np.random.default_rng(count)
    alarms = sum(score_gap(TAILS[tail](random, count)).rows is not None for _ in range(DRAWS))
    assert alarms <= 4


def with_gap(rows: int, factor: float, seed: int = 0, count: int = 160) -> Array:
    scores = np.sort(np.random.default_rng(seed).lognormal(0, 0.7, count))
    scores[count - rows :] = scores[count - rows - 1] * factor * np.linspace(1, 2, rows)
    return scores


@pytest.mark.parametrize(("rows", "factor"), [(6, 8.0), (3, 30.0), (12, 4.0)])
def test_score_gap_is_where_it_was_put(rows: int, factor: float) -> None:
    found = score_gap(np.random.default_rng(1).permutation(with_gap(rows, factor)))
    assert found.rows == rows
    assert found.factor == pytest.approx(factor)


def test_score_gap_above_equal_scores() -> None:
    found = score_gap(np.append(np.ones(50), [5.0, 6.0]))
    assert (found.rows, found.factor) == (2, pytest.approx(5.0))
    assert score_gap(np.append(np.ones(50), [1.5, 1.6])) == ScoreGap()


@pytest.mark.parametrize(
    "scores",
    [
        [],
        np.zeros(100),
        np.full(100, np.nan),
        -with_gap(6, 8.0),
        np.append(np.ones(30), 1e6),  # thirty-one are too few to know how the others lie
    ],
    ids=["none", "zeros", "missing", "negative", "few"],
)
def test_score_gap_of_what_has_none(scores: Array) -> None:
    assert score_gap(np.asarray(scores, float)) == ScoreGap()


@pytest.mark.parametrize("factor", [1e-12, 1e9])
def test_score_gap_does_not_depend_on_the_unit(factor: float) -> None:
    assert score_gap(with_gap(6, 8.0) * factor).rows == 6


def test_judge_finds_the_gap_that_the_review_list_cuts() -> None:
    facts = judge(samples(with_gap(6, 8.0)), config(review_fraction=0.01)).facts
    assert (facts.counts.review, facts.gap.rows) == (2, 6)


def test_judge_lower_tail_has_no_gap() -> None:
    assert judge(samples(with_gap(6, 8.0)), config(tail="lower")).facts.gap == ScoreGap()


@pytest.mark.parametrize("rho", [-1.0, -0.5, 0.0, 0.3, 0.95, 0.9999, 1.0])
@pytest.mark.parametrize(("top", "count"), [(1, 50), (18, 1797), (40, 160)])
def test_expected_overlap_is_that_of_two_normals(rho: float, top: int, count: int) -> None:
    pearson = 2 * np.sin(np.pi * rho / 6)
    edge = norm.isf(top / count)
    both = multivariate_normal.cdf(
        [-edge, -edge], [0, 0], [[1, pearson], [pearson, 1]], allow_singular=True, abseps=1e-9, releps=1e-9
    )
    assert expected_overlap(rho, top, count) == pytest.approx(count * both, abs=2e-3)
