"""Epsilon by loss distributions: against dp-accounting, closed forms, an integral of the densities, and the
published figures.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import pytest
from scipy import integrate

from psgrad.engine.privacy.accounting import (
    StepEvent,
    composition,
    epsilon_pld,
    epsilon_rdp,
)
from psgrad.engine.privacy.accounting.composition import interval_for
from psgrad.errors import PsgradError
from tests.engine.privacy.accountants import fixed, gaussian_epsilon, poisson


def value_of(events: Any, delta: float = 1e-5) -> float:
    value = epsilon_pld(events, delta).value
    assert value is not None
    return value


# -- published figures ---------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    ("event", "steps", "delta", "epsilon"),
    [
        (poisson(1.0, 0.01), 1_000, 1e-5, 1.8282),
        (poisson(1.1, 256 / 60_000), 14_040, 1e-5, 2.3796),
        (poisson(1.0, 0.01), 10_000, 1e-5, 6.1877),
        (poisson(1.1, 0.001), 100_000, 1e-6, 1.5851),
    ],
    ids=lambda part: part.sample_rate if isinstance(part, StepEvent) else None,
)
def test_pld_known_runs(event: StepEvent, steps: int, delta: float, epsilon: float) -> None:
    assert value_of([(event, steps)], delta) == pytest.approx(epsilon, abs=5.1e-5)


def test_pld_within_interval_of_prv_accountant() -> None:
    # prv-accountant 0.2.0: lower end, estimate, upper end. Opacus's constant, from its own copy of it, is the
    # upper end a step earlier.
    lower, upper = 6.7584, 6.7791
    assert lower < value_of([(poisson(1.5, 0.04), 2250)]) < upper
    assert value_of([(poisson(1.5, 0.04), 2249)]) < 6.777395712150674


# -- the factor 2 of replaced records ------------------------------------------------------------------------


@pytest.mark.long
def test_pld_noise_convention_of_accountants() -> None:
    """Where a record is replaced, S = 2C is in the noise already. RDP takes noise / S; PLD takes noise / C,
    and doubles C itself.

    Noise of S then is one Gaussian that moves by one standard deviation. If PLD were given noise / S, it
    would say 10.0; if RDP were given noise / C, 2.2.
    """
    exact = gaussian_epsilon(1e-5, 1.0)
    assert value_of([(fixed(1.0, "replace_one"), 1)]) == pytest.approx(exact, rel=1e-4)
    rdp = epsilon_rdp([(fixed(1.0, "replace_one"), 1)], 1e-5).value
    assert rdp == pytest.approx(4.73, abs=5e-3)
    assert rdp == epsilon_rdp([(fixed(1.0, "zero_out"), 1)], 1e-5).value
    assert value_of([(fixed(1.0, "zero_out"), 1)]) == pytest.approx(exact, rel=1e-4)


@pytest.mark.parametrize("relation", ["replace_one", "zero_out"])
@pytest.mark.parametrize(("multiplier", "steps"), [(1.5, 1), (4.0, 16), (30.0, 1000), (500.0, 3)])
def test_pld_of_gaussians_equals_closed_form(relation: Any, multiplier: float, steps: int) -> None:
    exact = gaussian_epsilon(1e-5, math.sqrt(steps) / multiplier)
    value = value_of([(fixed(multiplier, relation), steps)])
    assert exact * (1 - 1e-9) <= value <= exact * 1.002
    rdp = epsilon_rdp([(fixed(multiplier, relation), steps)], 1e-5).value
    assert value <= rdp <= 1.35 * exact  # type: ignore[operator]


def densities(event: StepEvent, side: str) -> tuple[Any, Any]:
    """The two densities of one step of Poisson sampling, in units of the sum's sensitivity S and from the
    definition: a record is drawn with probability q, and moves the sum by its bound, which is S, or S / 2 to
    either side where it is replaced.
    """
    q, z = event.sample_rate, event.noise_multiplier

    def noise(x: np.ndarray, mean: float) -> np.ndarray:
        return np.exp(-(((x - mean) / z) ** 2) / 2) / (z * math.sqrt(2 * math.pi))

    def mixed(mean: float) -> Any:
        return lambda x: (1 - q) * noise(x, 0) + q * noise(x, mean)

    if side == "replaced":
        return mixed(0.5), mixed(-0.5)
    return (mixed(1.0), mixed(0.0)) if side == "removed" else (mixed(0.0), mixed(1.0))


def integrated_delta(event: StepEvent, side: str, epsilon: float) -> float:
    """delta at epsilon: the integral of what the first density has above e^epsilon times the second."""
    first, second = densities(event, side)
    grid = np.linspace(-40 * event.noise_multiplier - 2, 40 * event.noise_multiplier + 2, 200_001)
    return float(integrate.simpson(np.maximum(first(grid) - math.exp(epsilon) * second(grid), 0.0), x=grid))


@pytest.mark.every(4)
@pytest.mark.parametrize(
    ("event", "sides"),
    [
        (poisson(1.0, 0.2, "replace_one"), ["replaced"]),
        (poisson(1.5, 0.02, "replace_one"), ["replaced"]),
        (poisson(2.0, 0.9, "replace_one"), ["replaced"]),
        (poisson(1.6, 0.2), ["removed", "added"]),
        (poisson(2.5, 0.02, "zero_out"), ["removed", "added"]),
    ],
    ids=lambda part: f"{part.relation}-{part.noise_multiplier}" if isinstance(part, StepEvent) else None,
)
@pytest.mark.parametrize("delta", [1e-3, 1e-5])
def test_pld_of_one_sampled_step_equals_integral(event: StepEvent, sides: list[str], delta: float) -> None:
    value = value_of([(event, 1)], delta)
    exact = max(integrated_delta(event, side, value) for side in sides)
    assert exact <= delta * (1 + 1e-6)
    assert exact >= delta * (1 - 1e-3)


# -- never below the truth -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("multiplier", "steps"), [(20.0, 1_000), (50.0, 10_000), (200.0, 100_000)])
@pytest.mark.parametrize("delta", [1e-3, 1e-6, 1e-9, 1e-11, 1e-13])
def test_pld_rounding_is_an_upper_bound(multiplier: float, steps: int, delta: float) -> None:
    """A record that is nearly always drawn is composed by transforms, and costs what a Gaussian does, whose
    composition is known. Where transforms are too coarse for delta there is no figure.
    """
    result = epsilon_pld([(poisson(multiplier, 1 - 1e-12), steps)], delta)
    exact = gaussian_epsilon(delta, math.sqrt(steps) / multiplier)
    if result.value is None:
        assert delta < 1e-14 * steps
        assert "are exact to" in (result.why_not or "")
    else:
        assert result.value >= exact * (1 - 1e-9)
        assert delta < 1e-8 or result.value <= exact * 1.002


def test_pld_epsilon_below_rdp() -> None:
    for event, steps in (
        (poisson(0.7, 0.03), 500),
        (poisson(3.0, 0.2), 1_000),
        (poisson(10.0, 0.001), 50_000),
        (poisson(40.0, 0.01), 100),
    ):
        rdp = epsilon_rdp([(event, steps)], 1e-6).value
        assert 0 < value_of([(event, steps)], 1e-6) < rdp  # type: ignore[operator]


@pytest.mark.sweep
def test_pld_of_unlike_steps_equals_dp_accounting() -> None:
    """More than eight unlike steps are composed on a coarser grid."""
    import dp_accounting as dpa
    from dp_accounting import pld

    counts = {poisson(2.0 + place / 10, 0.05): 3 + place for place in range(12)}
    result = epsilon_pld(list(counts.items()), 1e-5)
    assert (result.interval or 0) > composition.INTERVAL
    accountant = pld.PLDAccountant()
    for event, steps in counts.items():
        accountant.compose(
            dpa.PoissonSampledDpEvent(0.05, dpa.GaussianDpEvent(event.noise_multiplier)), steps
        )
    fine = accountant.get_epsilon(1e-5)
    assert fine <= result.value <= fine * 1.001  # type: ignore[operator]


# -- edges ---------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_pld_epsilon_is_not_negative() -> None:
    assert value_of([(poisson(50.0, 0.01), 1)], 0.5) == 0.0
    # A record that is rarely drawn: delta pays for all of it.
    assert value_of([(poisson(0.5, 1e-4), 1)], 1e-3) == 0.0


@pytest.mark.parametrize("relation", ["add_or_remove_one", "zero_out", "replace_one"])
def test_pld_sampling_rate_one(relation: Any) -> None:
    exact = gaussian_epsilon(1e-5, math.sqrt(7) / 5)
    assert value_of([(poisson(5.0, 1.0, relation), 7)]) == pytest.approx(exact, rel=1e-5)


@pytest.mark.parametrize(
    ("multiplier", "rate", "steps"),
    [(1e4, 0.01, 1000), (0.05, 0.5, 20), (0.02, 1.0, 1000), (1e-3, 0.5, 1), (1e6, 1.0, 1)],
)
def test_pld_grid_size_of_extremes(multiplier: float, rate: float, steps: int) -> None:
    counts = {poisson(multiplier, rate): steps}
    width = 2 * (10 * multiplier + 1) / multiplier**2  # of the losses at ten standard deviations
    assert width / interval_for(counts) < 5e5
    value = value_of(counts.items())
    rdp = epsilon_rdp(counts.items(), 1e-5).value
    assert 0 <= value <= rdp * 1.01  # type: ignore[operator]


def test_pld_small_delta_refused() -> None:
    result = epsilon_pld([(poisson(1.0, 0.01), 1_000_000)], 1e-10)
    assert result.value is None
    assert result.why_not == "delta is 1e-10, and loss distributions of 1000000 steps are exact to 2e-09 only"


def test_pld_too_many_steps_refused() -> None:
    result = epsilon_pld([(poisson(1000.0, 0.01), 1_000_000_000)], 1e-5)
    assert result.value is None
    assert (result.why_not or "").startswith("1,000,000,000 steps are more than")
    unlike = epsilon_pld([(poisson(1 + place / 100, 0.1), 1) for place in range(41)], 1e-5)
    assert (unlike.why_not or "").startswith("41 unlike steps are more than")


def test_pld_without_dp_accounting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(PsgradError, match=r"pip install 'psgrad\[dp\]'"):
        epsilon_pld([(poisson(1.0, 0.1), 1)], 1e-5)
