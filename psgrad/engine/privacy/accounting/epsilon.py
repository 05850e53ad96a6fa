"""Epsilon by Renyi differential privacy (RDP), and the calls to dp-accounting, which computes every epsilon.
The library is imported where it is needed: that takes a second.

RDP adds up moments of one step's privacy loss over the steps (Mironov, Talwar and Zhang, "Renyi Differential
Privacy of the Sampled Gaussian Mechanism", arXiv 1908.10530).
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from psgrad.engine.privacy.accounting.events import StepEvent, merged
from psgrad.errors import ConfigError, PsgradError


@dataclass(frozen=True)
class Epsilon:
    """The result of an accountant: always an upper bound on the true epsilon.

    Attributes:
        value: epsilon, at least 0; infinite where a step had no noise. None where this accountant does not
            cover the steps.
        why_not: the reason for None.
        order: of the moments that gave it (RDP).
        interval: between the losses that the distribution was rounded to (PLD).
        note: what makes the value larger than it need be, where something does.
        accountant: PLD or RDP, where one of both was chosen.
    """

    value: float | None
    why_not: str | None = None
    order: float | None = None
    interval: float | None = None
    note: str | None = None
    accountant: str = ""


def assert_delta(delta: float) -> None:
    """Raises ConfigError for a delta that is not between 0 and 1."""
    if isinstance(delta, bool) or not isinstance(delta, int | float) or not 0 < delta < 1:
        raise ConfigError(
            f"delta is {delta!r}; expected a number above 0 and below 1; below one over the number of"
            " records, to promise anything",
        )


def dp_accounting() -> Any:
    """The module. Raises PsgradError where it is not installed."""
    try:
        import dp_accounting
    except ImportError as error:
        raise PsgradError(
            f"epsilon needs dp-accounting, which can't be imported: {error}",
            hint="install it with psgrad: pip install 'psgrad[dp]'",
        ) from error
    return dp_accounting


def library_event(event: StepEvent, noise: float) -> Any:
    """The step as an event of dp-accounting, with the noise as the accountant needs it."""
    library = dp_accounting()
    plain = library.GaussianDpEvent(noise)
    # A fixed batch is accounted as one that has every record: no amplification.
    return plain if event.sample_rate == 1 else library.PoissonSampledDpEvent(event.sample_rate, plain)


# The orders of moments that dp-accounting takes.
ORDERS = np.array(
    [1 + tenths / 10 for tenths in range(1, 100)]
    + [float(order) for order in range(11, 64)]
    + [128.0, 256.0, 512.0, 1024.0]
)


def epsilon_rdp(events: Iterable[tuple[StepEvent, int]], delta: float) -> Epsilon:
    """Epsilon of steps by Renyi differential privacy: fast, and a little larger than necessary.

    Raises ConfigError for a delta that is not between 0 and 1, and for steps that don't compose (see
    `merged`).
    """
    assert_delta(delta)
    counts = merged(events)
    for event in counts:
        if reason := why_not_rdp(event):
            return Epsilon(None, reason)
    return epsilon_of(total_moments(counts.items()), delta)


def epsilon_curve(event: StepEvent, steps: int, delta: float) -> list[tuple[int, float]]:
    """(number of steps, epsilon after them by RDP) at some places up to so many equal steps: densest at
    first, where it is steep, as it grows like a root. None where RDP does not cover the step.
    """
    if why_not_rdp(event):
        return []
    points = 50
    places = sorted({max(1, round(steps * (place / points) ** 2)) for place in range(1, points + 1)})
    return [(place, epsilon_rdp([(event, place)], delta).value or 0.0) for place in places if steps]


def why_not_rdp(event: StepEvent) -> str | None:
    """Why RDP doesn't cover a step; None if it does."""
    if event.sampling.scheme == "poisson" and event.relation == "replace_one":
        return "the moments of poisson sampling under replace_one are not known"
    return None


def total_moments(counts: Iterable[tuple[StepEvent, int]]) -> np.ndarray:
    """[orders] float64: the rates of all these steps together."""
    total = np.zeros(len(ORDERS))
    for event, steps in counts:
        total += steps * step_moments(event)
    return total


@functools.lru_cache(maxsize=8192)
def step_moments(event: StepEvent) -> np.ndarray:
    """[orders] float64: the rate of one step at each of ORDERS by dp_accounting.rdp.RdpAccountant, infinite
    where it has none. Callers must not write into it. The step has RDP (see `why_not_rdp`).

    Takes 30 ms for a new event.
    """
    rates = np.full(len(ORDERS), math.inf)
    if event.noise_multiplier:
        accountant = dp_accounting().rdp.RdpAccountant(ORDERS)
        # No line on stderr for orders whose series does not converge: such an order is left out.
        logger = logging.getLogger("absl")
        before = logger.level
        logger.setLevel(logging.ERROR)
        try:
            # Sensitivities are part of the multiplier, so that the accountant's relation is its default.
            accountant.compose(library_event(event, event.rdp_multiplier))
        finally:
            logger.setLevel(before)
        rates = np.array(accountant._rdp, dtype=np.float64)
    rates.flags.writeable = False
    return rates


def epsilon_of(rates: np.ndarray, delta: float) -> Epsilon:
    """The epsilon that rates [orders] give at delta, the smallest over the orders, as RdpAccountant converts
    them.
    """
    finite = np.flatnonzero(np.isfinite(rates))
    if not len(finite):
        return Epsilon(math.inf)
    found, order = dp_accounting().rdp.rdp_privacy_accountant.compute_epsilon(ORDERS, rates, delta)
    value, order = max(0.0, float(found)), float(order)
    if not 0 < value < math.inf:
        return Epsilon(value)
    note = None
    if order in (ORDERS[finite[0]], ORDERS[finite[-1]]):
        note = (
            f"the best order is {order:g}, at the edge of those that are looked at; beyond it epsilon might"
            " be smaller"
        )
    return Epsilon(value, order=order, note=note)
