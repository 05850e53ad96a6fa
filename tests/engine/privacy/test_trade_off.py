"""The trade-off curve, mu and groups of a run, against closed forms of the Gaussian mechanism."""

from __future__ import annotations

import math

import pytest
from scipy.stats import norm

from psgrad.engine.privacy.accounting import StepEvent, epsilon_pld, tightest_epsilon
from psgrad.engine.privacy.accounting.trade_off import (
    gaussian_delta,
    gaussian_parameter,
    group_epsilon,
    profile_of,
    true_positive_rate,
)
from psgrad.engine.privacy.sampling import Sampling

FULL = Sampling("poisson", sample_rate=1.0)


def gaussian(multiplier: float, steps: int = 1) -> list[tuple[float, float]]:
    return profile_of([(StepEvent(multiplier, FULL, "add_or_remove_one"), steps)])


@pytest.fixture(scope="module", params=[(0.8, 1), (2.0, 4), (10.0, 1)])
def case(request: pytest.FixtureRequest) -> tuple[float, list[tuple[float, float]]]:
    """(mu, its profile)."""
    multiplier, steps = request.param
    return math.sqrt(steps) / multiplier, gaussian(multiplier, steps)


@pytest.mark.parametrize("rate", [0.001, 0.01, 0.1, 0.5])
def test_true_positive_rate_of_a_gaussian(case: tuple[float, list[tuple[float, float]]], rate: float) -> None:
    mu, profile = case
    exact = norm.cdf(norm.ppf(rate) + mu)
    assert exact <= true_positive_rate(profile, rate) <= exact * 1.02


def test_gaussian_parameter_of_a_gaussian(case: tuple[float, list[tuple[float, float]]]) -> None:
    mu, profile = case
    found = gaussian_parameter(profile, 1e-6)
    assert found is not None
    assert mu * (1 - 1e-6) <= found <= mu * 1.01


def test_gaussian_parameter_bounds_every_pair_of_a_sampled_run() -> None:
    profile = profile_of([(StepEvent(1.0, Sampling("poisson", sample_rate=0.02), "add_or_remove_one"), 300)])
    mu = gaussian_parameter(profile, 1e-5)
    assert mu is not None
    pairs = [(epsilon, delta) for epsilon, delta in profile if delta >= 1e-5]
    assert all(gaussian_delta(mu, epsilon) >= delta * (1 - 1e-9) for epsilon, delta in pairs)
    assert any(gaussian_delta(mu * 0.99, epsilon) < delta for epsilon, delta in pairs)


@pytest.mark.parametrize("records", [1, 2, 5])
def test_group_epsilon_bounds_that_of_a_gaussian_with_more_sensitivity(records: int) -> None:
    """Of k records together the sum of a step moves k times as far."""
    together = epsilon_pld([(StepEvent(4.0 / records, FULL, "add_or_remove_one"), 1)], 1e-5).value
    found = group_epsilon(gaussian(4.0), records, 1e-5)
    assert together is not None
    assert found is not None
    assert together * (1 - 1e-3) <= found <= together * (1.06 if records == 1 else 3)


def test_profile_has_the_epsilon_of_the_accountants() -> None:
    events = [(StepEvent(1.1, Sampling("poisson", sample_rate=0.05), "add_or_remove_one"), 40)]
    profile = profile_of(events)
    assert profile == sorted(profile)
    for epsilon, delta in (profile[100], profile[500], profile[-60]):
        assert epsilon == pytest.approx(tightest_epsilon(events, delta).value, rel=1e-3)


def test_profile_of_steps_without_noise_bounds_nothing() -> None:
    profile = gaussian(0.0)
    assert profile == []
    assert true_positive_rate(profile, 0.01) == 1.0
    assert gaussian_parameter(profile, 1e-5) is None
    assert group_epsilon(profile, 2, 1e-5) is None
