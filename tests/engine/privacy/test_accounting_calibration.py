"""The noise that a target needs, and epsilon after each of many steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from psgrad.engine.privacy.accounting import (
    Events,
    StepEvent,
    epsilon_curve,
    epsilon_pld,
    epsilon_rdp,
    noise_multiplier_for,
)
from psgrad.errors import ConfigError
from tests.engine.privacy.accountants import fixed, gaussian_epsilon, poisson


def steps_of(make: Callable[[float], StepEvent], steps: int) -> Callable[[float], Events]:
    return lambda multiplier: [(make(multiplier), steps)]


# -- the noise that a target needs ---------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    ("make", "steps", "target", "accountant"),
    [
        (lambda z: poisson(z, 0.0712), 300, 3.0, epsilon_pld),
        (lambda z: poisson(z, 0.05, "replace_one"), 100, 0.5, epsilon_pld),
        (lambda z: fixed(z), 100, 2.0, epsilon_pld),
    ],
    ids=["poisson", "replaced", "fixed"],
)
def test_calibration_meets_target(make: Any, steps: int, target: float, accountant: Any) -> None:
    events_for = steps_of(make, steps)
    multiplier = noise_multiplier_for(target, 1e-5, events_for)
    value = accountant(events_for(multiplier), 1e-5).value
    assert target * (1 - 1e-3) < value <= target
    # What is printed with six digits is what was solved for.
    assert float(f"{multiplier:.6g}") == multiplier


@pytest.mark.parametrize(("target", "steps"), [(0.01, 1), (0.3, 10_000), (2.0, 1), (2.0, 10_000), (50.0, 1)])
def test_calibration_of_gaussians_equals_closed_form(target: float, steps: int) -> None:
    multiplier = noise_multiplier_for(target, 1e-6, steps_of(lambda z: fixed(z, "zero_out"), steps))
    exact = gaussian_epsilon(1e-6, math.sqrt(steps) / multiplier)
    assert target * (1 - 2.5e-3) < exact <= target


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("target", "make", "steps", "wording"),
    [
        (1e-4, lambda z: poisson(z, 1.0), 10**9, r"needs a noise multiplier above 1e\+06"),
        (1.0, lambda z: poisson(z, 1e-7), 1, "is met without noise to speak of"),
        (1e9, lambda z: fixed(z), 1, "is met without noise to speak of"),
        (3.0, lambda z: poisson(z, 0.1), 0, "for no steps at all"),
        (0.0, lambda z: poisson(z, 0.1), 1, "the target epsilon is 0.0"),
        (-1.0, lambda z: poisson(z, 0.1), 1, "the target epsilon is -1.0"),
        (math.inf, lambda z: poisson(z, 0.1), 1, "the target epsilon is inf"),
        (math.nan, lambda z: poisson(z, 0.1), 1, "the target epsilon is nan"),
    ],
)
def test_calibration_impossible_target_refused(target: float, make: Any, steps: int, wording: str) -> None:
    with pytest.raises(ConfigError, match=wording):
        noise_multiplier_for(target, 1e-5, steps_of(make, steps))


# -- epsilon after each of many steps ------------------------------------------------------------------------


def test_epsilon_curve_equals_epsilon_after_steps() -> None:
    event = poisson(2.0, 0.1)
    curve = epsilon_curve(event, 40, 1e-5)
    assert (curve[0][0], curve[-1][0]) == (1, 40)
    for steps, value in curve[::4]:
        assert value == epsilon_rdp([(event, steps)], 1e-5).value


def test_epsilon_curve_distinct_numbers_of_steps() -> None:
    assert [steps for steps, _ in epsilon_curve(poisson(1.0, 0.1), 3, 1e-5)] == [1, 2, 3]
    assert epsilon_curve(poisson(1.0, 0.1), 0, 1e-5) == []
    assert epsilon_curve(poisson(1.0, 0.1, "replace_one"), 5, 1e-5) == []  # RDP has none
    assert epsilon_curve(poisson(0.0, 0.1), 2, 1e-5) == [(1, math.inf), (2, math.inf)]
    with pytest.raises(ConfigError, match="delta is 2"):
        epsilon_curve(poisson(1.0, 0.1), 3, 2)
