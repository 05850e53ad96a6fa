"""The limits that a guarantee sets to right guesses, against linear programs, simulated mechanisms and exact
probabilities.
"""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog
from scipy.stats import binom, norm

from psgrad.engine.privacy.audit.one_run import (
    Guesses,
    Profile,
    epsilon_for_any_mechanism,
    guess,
    is_refuted,
    p_value,
    rates,
    strategies,
    tails,
)
from psgrad.errors import ConfigError

DELTA = 1e-5


def gaussian(mu: float, points: int = 60, largest: float = 8.0) -> Profile:
    """The profile of a Gaussian release, by its definition: integrals over where the likelihood ratio is
    above e^epsilon.
    """
    epsilons = np.linspace(0, largest, points)
    edge = epsilons / mu + mu / 2
    return Profile(epsilons, norm.sf(edge - mu) - np.exp(epsilons) * norm.sf(edge))


def epsilon_of_gaussian(mu: float) -> float:
    low, high = 0.0, 60.0
    for _ in range(60):
        middle = (low + high) / 2
        edge = middle / mu + mu / 2
        delta = norm.sf(edge - mu) - math.exp(middle) * norm.sf(edge)
        low, high = (middle, high) if delta > DELTA else (low, middle)
    return high


# -- any mechanism -------------------------------------------------------------------------------------------


@given(st.integers(1, 200), st.data(), st.floats(0, 6))
def test_one_run_limit_without_delta(guesses: int, data: st.DataObject, epsilon: float) -> None:
    right = data.draw(st.integers(0, guesses))
    chance = 1 / (1 + math.exp(-epsilon))
    tail = math.fsum(binom.pmf(range(right, guesses + 1), guesses, chance))
    assert p_value(Guesses(300, guesses, right), epsilon, 0.0) == pytest.approx(min(tail, 1.0), rel=1e-9)


def test_one_run_limit_with_delta() -> None:
    """Theorem 5.2 of arXiv 2305.08846, term by term."""
    m, r, v, epsilon, delta = 100, 40, 36, 1.2, 1e-4
    mass = binom.pmf(np.arange(r + 1), r, 1 / (1 + math.exp(-epsilon)))
    alpha = max(mass[max(v - i, 0) : v].sum() / i for i in range(1, m + 1))
    assert p_value(Guesses(m, r, v), epsilon, delta) == pytest.approx(
        mass[v:].sum() + 2 * m * delta * alpha, rel=1e-9
    )


@pytest.mark.parametrize("delta", [0.0, 1e-3])
def test_one_run_limit_attained_by_randomised_response(delta: float) -> None:
    """Each canary's coin is told truly with probability e^eps / (1 + e^eps), or with probability delta given
    away: nothing leaks more.

    The exact probability of so many right guesses is never above the limit, and at delta 0 equal to it.
    """
    m, epsilon = 30, 1.0
    truly = (1 - delta) / (1 + math.exp(-epsilon)) + delta
    for right in range(m + 1):
        exact = float(binom.sf(right - 1, m, truly))
        limit = p_value(Guesses(m, m, right), epsilon, delta)
        assert exact <= limit * (1 + 1e-9)
        if delta == 0:
            assert exact == pytest.approx(limit, rel=1e-9)


def test_one_run_epsilon_bound() -> None:
    result = [Guesses(1000, 100, 95), Guesses(1000, 400, 300)]
    bound, best = epsilon_for_any_mechanism(result, DELTA, 0.05)
    assert best is result[0]
    assert p_value(best, bound, DELTA) <= 0.025 < p_value(best, bound + 1e-6, DELTA)


def test_one_run_random_guesses() -> None:
    assert epsilon_for_any_mechanism([Guesses(1000, 500, 251), Guesses(1000, 20, 11)], DELTA, 0.05) == (
        0.0,
        None,
    )


def test_one_run_counts_refused() -> None:
    with pytest.raises(ConfigError, match="5 right guesses out of 4, about 9 canaries"):
        Guesses(9, 4, 5)


# -- a whole profile -----------------------------------------------------------------------------------------


def largest_probability(profile: Profile, m: int, r: int, v: int) -> float:
    """The largest P[right >= v] that the constraints of arXiv 2410.22235 allow, by a linear program over the
    distributions of `right`.
    """
    right = np.arange(r + 1)
    rows, limits = [], []
    for k, (epsilon, delta) in product(range(1, r + 1), zip(profile.epsilons, profile.deltas, strict=True)):
        hits = np.where(right >= k, right, 0) / m
        misses = np.where(right >= k - 1, r - right, 0) / m
        rows += [hits - math.exp(epsilon) * misses, hits - math.exp(-epsilon) * misses]
        limits += [delta, 1 - math.exp(-epsilon) * (1 - delta)]
    solved = linprog(
        -(right >= v).astype(float),
        A_ub=rows,
        b_ub=limits,
        A_eq=np.ones((1, r + 1)),
        b_eq=[1.0],
        bounds=(0, 1),
    )
    assert solved.success
    return float(-solved.fun)


def level_that_is_just_refuted(profile: Profile, found: Guesses) -> float:
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if is_refuted(profile, found, middle) else (middle, high)
    return high


@pytest.mark.parametrize(
    ("m", "r", "v", "mu"),
    [(8, 8, 6, 0.8), (8, 4, 4, 1.0), (20, 6, 6, 1.0), (20, 20, 15, 0.5), (30, 10, 8, 1.5), (12, 12, 12, 1.0)],
)
def test_one_run_limit_equals_linear_program(m: int, r: int, v: int, mu: float) -> None:
    profile = gaussian(mu)
    result = level_that_is_just_refuted(profile, Guesses(m, r, v))
    assert result == pytest.approx(largest_probability(profile, m, r, v), rel=1e-6)


def test_one_run_no_right_guess() -> None:
    assert not is_refuted(gaussian(0.1), Guesses(100, 20, 0), 0.5)


def test_one_run_least_error() -> None:
    """For a Gaussian release it is Phi(Phi^-1(success) - mu); a profile at finitely many epsilons stays a
    little below.
    """
    mu, profile = 1.0, gaussian(1.0, points=2000)
    for success in (1e-6, 1e-3, 0.1, 0.5, 0.9, 0.999):
        best = float(norm.cdf(norm.ppf(success) - mu))
        assert best * (1 - 2e-3) - 1e-9 <= profile.least_error(success) <= best * (1 + 1e-9)


# -- attacks -------------------------------------------------------------------------------------------------


def test_one_run_guesses_by_score() -> None:
    scores = np.array([0.3, -1.0, 2.0, 0.1, -0.2])
    inside = np.array([True, False, True, False, True])
    assert guess(scores, inside, (2, 1)) == Guesses(5, 3, 3)
    assert guess(scores, inside, (1, 3)) == Guesses(5, 4, 3)
    assert guess(-scores, inside, (2, 0)) == Guesses(5, 2, 1)


@given(st.integers(1, 5000))
def test_one_run_strategies(canaries: int) -> None:
    for ins, outs in strategies(canaries):
        assert ins >= 1
        assert ins + outs <= max(canaries, 2)
    assert tails(canaries)


def test_one_run_rates() -> None:
    result = rates(np.array([1.0, 2.0, 3.0, 4.0]), np.array([True, False, False, True]), 2.5)
    assert (result.hits, result.inside, result.alarms, result.outside) == (1, 2, 1, 2)


MU = 1.0
TRIALS = 250


@pytest.mark.long
def test_one_run_false_alarm_rate_and_power() -> None:
    """At a level of 20 % each, the methods may be wrong in a fifth of the trials; more than one in 10^4
    suites would see is a mistake.
    """
    random = np.random.default_rng(0)
    canaries, level = 400, 0.2
    claimed, epsilon = gaussian(MU), epsilon_of_gaussian(MU)
    wrong = {"guesses": 0, "profile": 0, "rates": 0}
    thresholds = [float(norm.isf(tail)) for tail in tails(canaries)]
    for _ in range(TRIALS):
        inside = random.random(canaries) < 0.5
        scores = inside * MU + random.normal(size=canaries)
        guesses = [guess(scores, inside, strategy) for strategy in strategies(canaries)]
        result = [rates(scores, inside, threshold) for threshold in thresholds]
        wrong["guesses"] += any(p_value(each, epsilon, DELTA) <= level / len(guesses) for each in guesses)
        wrong["profile"] += any(is_refuted(claimed, each, level / len(guesses)) for each in guesses)
        wrong["rates"] += any(each.is_refuted_by(claimed, level / len(result)) for each in result)
    assert max(wrong.values()) <= binom.isf(1e-4, TRIALS, level)
    inside = random.random(4000) < 0.5
    leaking = inside * 2 * MU + random.normal(size=4000)
    assert any(rates(leaking, inside, threshold).is_refuted_by(claimed, 0.001) for threshold in thresholds)
    assert not any(
        is_refuted(gaussian(2 * MU, largest=12), guess(leaking, inside, s), 0.001) for s in strategies(4000)
    )
    assert any(is_refuted(gaussian(MU / 2), guess(leaking, inside, s), 0.001) for s in strategies(4000))


def test_one_run_rates_without_hits_or_outsiders() -> None:
    claimed = gaussian(0.01)
    assert not rates(np.zeros(4), np.array([True] * 4), -1.0).is_refuted_by(claimed, 0.5)
    assert not rates(np.zeros(4), np.array([True, False] * 2), 1.0).is_refuted_by(claimed, 0.5)
