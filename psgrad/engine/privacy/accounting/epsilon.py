"""Epsilon by Renyi differential privacy (RDP), and the calls to dp-accounting, which computes every epsilon.
The library is imported where it is needed: that takes a second.

RDP adds up moments of one step's privacy loss over the steps (Mironov, Talwar and Zhang, "Renyi Differential
Privacy of the Sampled Gaussian Mechanism", arXiv 1908.10530).
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from psgrad.engine.privacy.accounting.events import RDP_RELATIONS, StepEvent, merged, rounded_down
from psgrad.errors import ConfigError


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
    """The module. Raises ConfigError where it is not installed."""
    try:
        import dp_accounting
    except ImportError as error:
        raise ConfigError(
            f"epsilon was asked for, and dp-accounting can't be imported: {error}",
            hint="pip install 'dp-accounting>=0.6'",
        ) from error
    return dp_accounting


def rdp_rates(event: StepEvent, orders: np.ndarray) -> np.ndarray:
    """[orders] float64: the rates of one step by dp_accounting.rdp.RdpAccountant, infinite where it has none.

    The event has RDP (see `why_not_rdp`). Sensitivities are part of its multiplier, so that the accountant's
    relation is its default.
    """
    accountant = dp_accounting().rdp.RdpAccountant(orders)
    with _quiet():
        accountant.compose(_event(event, event.rdp_multiplier))
    return np.array(accountant._rdp, dtype=np.float64)  # otherwise it raises the warning only for the epsilon


def rdp_epsilon(orders: np.ndarray, rates: np.ndarray, delta: float) -> tuple[float, float]:
    """(epsilon, the order that gave it) of orders [k] and their rates [k], added up over steps, as
    RdpAccountant converts them.
    """
    epsilon, order = dp_accounting().rdp.rdp_privacy_accountant.compute_epsilon(orders, rates, delta)
    return max(0.0, float(epsilon)), float(order)


def pld_epsilon(counts: Mapping[StepEvent, int], delta: float, interval: float) -> float:
    """Epsilon of these steps by dp_accounting.pld.PLDAccountant, all under one relation.

    interval: between two losses of its grid, on which it rounds so that no epsilon comes out too small.
    """
    try:
        epsilon = float(_pld_accountant(counts, interval).get_epsilon(delta))
    except OverflowError:  # losses beyond e^700: there is no useful figure
        return math.inf
    if math.isnan(epsilon):
        raise ConfigError(
            f"dp-accounting finds no epsilon for {sum(counts.values())} steps at delta {delta:g}",
            hint="noise multipliers or sampling rates beyond what floating point can tell apart",
        )
    return max(0.0, epsilon)


def pld_deltas(counts: Mapping[StepEvent, int], epsilons: np.ndarray, interval: float) -> np.ndarray:
    """[k] float64: delta of these steps at epsilons [k], as `pld_epsilon` accounts them."""
    try:
        found = _pld_accountant(counts, interval).get_delta(epsilons)
    except OverflowError:
        return np.ones(len(epsilons))
    return np.nan_to_num(np.asarray(found, dtype=np.float64), nan=1.0)


def _pld_accountant(counts: Mapping[StepEvent, int], interval: float) -> Any:
    library = dp_accounting()
    relations = library.NeighboringRelation
    relation = {
        "add_or_remove_one": relations.ADD_OR_REMOVE_ONE,
        "replace_one": relations.REPLACE_ONE,
        "zero_out": relations.REPLACE_SPECIAL,
    }[next(iter(counts)).relation]
    accountant = library.pld.PLDAccountant(relation, value_discretization_interval=interval)
    for event, steps in counts.items():
        accountant.compose(_event(event, event.pld_multiplier), steps)
    return accountant


@contextmanager
def _quiet() -> Iterator[None]:
    """No line on stderr for orders whose series does not converge: such an order is left out, and others are
    used.
    """
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _event(event: StepEvent, noise: float) -> Any:
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
    counts, note = rounded_down(merged(events))
    for event in counts:
        if reason := why_not_rdp(event):
            return Epsilon(None, reason)
    epsilon = epsilon_of(total_moments(counts.items()), delta)
    return epsilon if note is None else replace(epsilon, note=note)


def why_not_rdp(event: StepEvent) -> str | None:
    """Why RDP doesn't cover a step; None if it does."""
    scheme, relation = event.sampling.scheme, event.relation
    if relation in RDP_RELATIONS[scheme]:
        return None
    return f"the moments of {scheme} sampling under {relation} are not known"


def total_moments(counts: Iterable[tuple[StepEvent, int]]) -> np.ndarray:
    """[orders] float64: the rates of all these steps together."""
    total = np.zeros(len(ORDERS))
    for event, steps in counts:
        total += steps * step_moments(event)
    return total


@functools.lru_cache(maxsize=8192)
def step_moments(event: StepEvent) -> np.ndarray:
    """[orders] float64: the rate of one step at each of ORDERS, infinite where it is not known. Callers must
    not write into it.

    Takes 30 ms for a new event.
    """
    rates = rdp_rates(event, ORDERS) if event.noise_multiplier else np.full(len(ORDERS), math.inf)
    rates.flags.writeable = False
    return rates


def epsilon_of(rates: np.ndarray, delta: float) -> Epsilon:
    """The epsilon that rates [orders] give at delta, the smallest over the orders."""
    finite = np.flatnonzero(np.isfinite(rates))
    if not len(finite):
        return Epsilon(math.inf)
    value, order = rdp_epsilon(ORDERS, rates, delta)
    if not 0 < value < math.inf:
        return Epsilon(value)
    note = None
    if order in (ORDERS[finite[0]], ORDERS[finite[-1]]):
        note = (
            f"the best order is {order:g}, at the edge of those that are looked at; beyond it epsilon might"
            " be smaller"
        )
    return Epsilon(value, order=order, note=note)
