"""What steps guarantee at each epsilon, against integrals of the densities on a grid."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import norm

from psgrad.engine.privacy.accounting import StepEvent, epsilon_pld
from psgrad.engine.privacy.audit.bounds import smallest_epsilon
from psgrad.engine.privacy.audit.profiles import distance, profile_of, scaled
from psgrad.engine.privacy.records import Relation
from psgrad.engine.privacy.sampling import Sampling

FIXED = Sampling("fixed", batch_size=7)


def poisson(rate: float) -> Sampling:
    return Sampling("poisson", sample_rate=rate)


def excess(first: np.ndarray, second: np.ndarray, epsilon: float, cell: float) -> float:
    """The hockey-stick divergence of two densities on a grid."""
    return float(np.maximum(first - math.exp(epsilon) * second, 0).sum() * cell)


@pytest.mark.parametrize("relation", ["add_or_remove_one", "replace_one", "zero_out"])
@pytest.mark.parametrize(("rate", "multiplier"), [(0.1, 1.0), (0.5, 0.7), (1.0, 1.3)])
def test_profile_one_poisson_step(relation: Relation, rate: float, multiplier: float) -> None:
    """The sum's unit is its sensitivity: a record adds 1 to nothing, or takes +1/2 from -1/2."""
    profile = profile_of([(StepEvent(multiplier, poisson(rate), relation), 1)])
    x, cell = np.linspace(-40 * multiplier, 40 * multiplier, 400_001, retstep=True)
    there, away = (0.5, -0.5) if relation == "replace_one" else (1.0, 0.0)
    first, second = (
        (1 - rate) * norm.pdf(x, 0, multiplier) + rate * norm.pdf(x, at, multiplier) for at in (there, away)
    )
    for place in (0, 150, 280, 330):
        epsilon, delta = profile.epsilons[place], profile.deltas[place]
        exact = max(excess(first, second, epsilon, cell), excess(second, first, epsilon, cell))
        assert exact * (1 - 1e-6) - 1e-9 <= delta <= exact * 1.01 + 1e-7


def test_profile_of_steps_without_amplification() -> None:
    events = [(StepEvent(1.0, FIXED, "replace_one"), 2), (StepEvent(2.0, FIXED, "replace_one"), 4)]
    assert distance(events) == pytest.approx(math.sqrt(3.0))
    profile = profile_of(events)
    x, cell = np.linspace(-30, 30, 400_001, retstep=True)
    first, second = norm.pdf(x, math.sqrt(3.0)), norm.pdf(x)
    for place in (0, 200, 300):
        assert profile.deltas[place] == pytest.approx(
            excess(first, second, profile.epsilons[place], cell), rel=1e-6
        )


@pytest.mark.long
@pytest.mark.parametrize(
    "events",
    [
        [(StepEvent(1.0, poisson(0.1), "add_or_remove_one"), 20)],
        [(StepEvent(1.1, poisson(0.07), "replace_one"), 28)],
        [(StepEvent(2.0, poisson(0.1), "zero_out"), 5), (StepEvent(1.6, poisson(0.1), "zero_out"), 3)],
    ],
)
def test_profile_of_composed_steps_equals_accountant(events: list[tuple[StepEvent, int]]) -> None:
    accounted = epsilon_pld(events, 1e-5).value
    assert accounted is not None
    assert accounted * (1 - 5e-3) <= smallest_epsilon(profile_of(events), 1e-5) <= accounted * 1.05


def test_profile_of_less_noise() -> None:
    events = [(StepEvent(1.0, poisson(0.1), "add_or_remove_one"), 4)]
    assert [event.noise_multiplier for event, _ in scaled(events, 0.5)] == [0.5]
    result = [smallest_epsilon(profile_of(scaled(events, share)), 1e-5) for share in (2.0, 1.0, 0.5)]
    assert result == sorted(result)
