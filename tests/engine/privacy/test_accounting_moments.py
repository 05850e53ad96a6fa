"""Epsilon by moments: against dp-accounting and Opacus's constants."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from psgrad.engine.privacy.accounting import epsilon_rdp
from psgrad.engine.privacy.accounting.epsilon import ORDERS, step_moments
from tests.engine.privacy.accountants import fixed, gaussian_epsilon, poisson


@pytest.fixture(scope="module", autouse=True)
def quiet() -> None:
    """dp-accounting warns of orders at which a series does not end."""
    import absl.logging

    absl.logging.set_verbosity(absl.logging.ERROR)


def library_accountant(rate: float, multiplier: float, steps: int = 1) -> Any:
    import dp_accounting as dpa
    from dp_accounting import rdp

    return rdp.RdpAccountant().compose(
        dpa.PoissonSampledDpEvent(rate, dpa.GaussianDpEvent(multiplier)), steps
    )


def test_rdp_orders_equal_dp_accounting() -> None:
    from dp_accounting.rdp import RdpAccountant

    np.testing.assert_array_equal(RdpAccountant().orders, ORDERS)


@pytest.mark.sweep
@settings(max_examples=12)
@given(
    rate=st.floats(1e-4, 0.999),
    multiplier=st.floats(0.2, 20.0),
    steps=st.integers(1, 20_000),
    power=st.floats(-9, -2),
)
def test_rdp_epsilon_equals_dp_accounting(rate: float, multiplier: float, steps: int, power: float) -> None:
    expected, order = library_accountant(rate, multiplier, steps).get_epsilon_and_optimal_order(10**power)
    result = epsilon_rdp([(poisson(multiplier, rate), steps)], 10**power)
    assert result.value == pytest.approx(expected, rel=1e-9)
    assert result.order is None or result.order == order


def test_rdp_epsilon_near_opacus() -> None:
    # The constant of Opacus's tests. It lets the terms of the series for fractional orders have their signs;
    # dp-accounting and this module add them all, which is a little more.
    opacus = 7.32911117143
    value = epsilon_rdp([(poisson(1.5, 0.04), 2250)], 1e-5).value
    assert value is not None
    assert opacus <= value <= opacus + 1e-3


def test_rdp_monotone_in_order_and_noise() -> None:
    # At whole orders: in between, the series' terms are all added, and the rates are larger than the true
    # ones.
    whole = np.floor(ORDERS) == ORDERS
    before = np.full(whole.sum(), math.inf)
    for multiplier in (0.3, 0.6, 1.0, 3.0, 50.0):
        rates = step_moments(poisson(multiplier, 0.05))
        assert (rates > 0).all()
        assert (np.diff(rates[whole]) > 0).all()
        assert (rates[whole] < before).all()
        # And never below the rate of a lower order.
        lower = np.array([rates[whole][ORDERS[whole] <= order].max(initial=0.0) for order in ORDERS])
        assert (rates >= lower * (1 - 1e-9)).all()
        before = rates[whole]


# -- edges ---------------------------------------------------------------------------------------------------


def test_rdp_epsilon_is_not_negative() -> None:
    assert epsilon_rdp([(poisson(50.0, 0.01), 1)], 0.5).value == 0.0
    assert epsilon_rdp([(poisson(1e5, 1e-4), 1)], 1e-5).value >= 0.0  # type: ignore[operator]


def test_rdp_sampling_rate_one() -> None:
    assert epsilon_rdp([(poisson(5.0, 1.0), 7)], 1e-5) == epsilon_rdp([(fixed(5.0, "zero_out"), 7)], 1e-5)
    value = epsilon_rdp([(poisson(5.0, 1.0), 7)], 1e-5).value
    exact = gaussian_epsilon(1e-5, math.sqrt(7) / 5)
    assert exact < value < 1.15 * exact  # type: ignore[operator]


@pytest.mark.parametrize(("multiplier", "steps", "order"), [(1e4, 1, 1024.0), (0.01, 10, 1.1)])
def test_rdp_order_at_the_edge_warns(multiplier: float, steps: int, order: float) -> None:
    result = epsilon_rdp([(fixed(multiplier), steps)], 1e-8)
    assert result.order == order
    assert result.note is not None
    assert "edge" in result.note
    assert epsilon_rdp([(fixed(1.0), 1)], 1e-5).note is None


def test_rdp_uncovered_combination_refused() -> None:
    result = epsilon_rdp([(poisson(1.0, 0.1, "replace_one"), 3)], 1e-5)
    assert result.value is None
    assert result.why_not == "the moments of poisson sampling under replace_one are not known"


def test_rdp_orders_without_convergence_omitted(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert np.isinf(step_moments(poisson(1.0, 0.1))).any()
    assert capfd.readouterr().err == ""
    assert caplog.records == []
