"""The limits that a guarantee sets to the rates of canaries, against closed forms and simulations."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, norm

from psgrad.engine.privacy.accounting.trade_off import Profile
from psgrad.engine.privacy.audit.bounds import rates, tails
from tests.engine.privacy.accountants import gaussian_delta

MU = 1.0
TRIALS = 250


def gaussian(mu: float, points: int = 60, largest: float = 8.0) -> Profile:
    """The profile of a Gaussian release."""
    return [(epsilon, gaussian_delta(epsilon, mu)) for epsilon in np.linspace(0, largest, points).tolist()]


def test_rates_of_a_threshold() -> None:
    result = rates(np.array([1.0, 2.0, 3.0, 4.0]), np.array([True, False, False, True]), 2.5)
    assert (result.hits, result.inside, result.alarms, result.outside) == (1, 2, 1, 2)


@given(st.integers(1, 5000))
def test_some_threshold_for_any_number_of_canaries(canaries: int) -> None:
    assert tails(canaries)


@pytest.mark.long
def test_rates_false_alarm_rate_and_power() -> None:
    """At a level of 20 % the rates may be wrong in a fifth of the trials; more than one in 10^4 suites would
    see is a mistake.
    """
    random = np.random.default_rng(0)
    canaries, level = 400, 0.2
    claimed = gaussian(MU)
    wrong = 0
    thresholds = [float(norm.isf(tail)) for tail in tails(canaries)]
    for _ in range(TRIALS):
        inside = random.random(canaries) < 0.5
        scores = inside * MU + random.normal(size=canaries)
        result = [rates(scores, inside, threshold) for threshold in thresholds]
        wrong += any(each.is_refuted_by(claimed, level / len(result)) for each in result)
    assert wrong <= binom.isf(1e-4, TRIALS, level)
    inside = random.random(4000) < 0.5
    leaking = inside * 2 * MU + random.normal(size=4000)
    assert any(rates(leaking, inside, threshold).is_refuted_by(claimed, 0.001) for threshold in thresholds)


def test_rates_without_hits_or_outsiders() -> None:
    claimed = gaussian(0.01)
    assert not rates(np.zeros(4), np.array([True] * 4), -1.0).is_refuted_by(claimed, 0.5)
    assert not rates(np.zeros(4), np.array([True, False] * 2), 1.0).is_refuted_by(claimed, 0.5)
