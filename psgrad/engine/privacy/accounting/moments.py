"""Renyi differential privacy (RDP): moments of one step's privacy loss, which add up over steps, and the epsilon that they give.

dp-accounting computes them. Noise on the integers has the same moments of integer order as continuous noise: a shift by integers maps the
integers to themselves, and so does the reflection by which adding a record is shown to cost no more than removing one (Mironov, Talwar and
Zhang, "Renyi Differential Privacy of the Sampled Gaussian Mechanism", arXiv 1908.10530, theorem 5). Between the integers its moments are
other ones, and these orders are left out.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from psgrad.engine.privacy.accounting.epsilon import Epsilon, assert_delta
from psgrad.engine.privacy.accounting.events import RDP_RELATIONS, StepEvent, merged, rounded_down
from psgrad.engine.privacy.accounting.library import rdp_epsilon, rdp_rates

# Those that dp-accounting looks at by itself.
ORDERS = np.array([1 + tenths / 10 for tenths in range(1, 100)] + [float(order) for order in range(11, 64)] + [128.0, 256.0, 512.0, 1024.0])
_WHOLE = np.floor(ORDERS) == ORDERS


def epsilon_rdp(events: Iterable[tuple[StepEvent, int]], delta: float) -> Epsilon:
    """Epsilon of steps by Renyi differential privacy: fast, and a little larger than need be.

    Raises ConfigError for a delta that is not between 0 and 1, and for steps that don't compose (see `merged`).
    """
    assert_delta(delta)
    counts, note = rounded_down(merged(events))
    for event in counts:
        if reason := why_not_rdp(event):
            return Epsilon(None, reason)
    epsilon = epsilon_of(total_moments(counts.items()), delta)
    return epsilon if note is None else replace(epsilon, note=note)


def why_not_rdp(event: StepEvent) -> str | None:
    """Why moments don't cover a step; None where they do."""
    scheme, relation = event.sampling.scheme, event.relation
    if relation in RDP_RELATIONS[scheme]:
        return None
    if scheme == "truncated_poisson":
        return "the moments of truncated Poisson sampling are not known"
    return f"the moments of {scheme} sampling under {relation} are not known"


def total_moments(counts: Iterable[tuple[StepEvent, int]]) -> np.ndarray:
    """[orders] float64: the rates of all these steps together."""
    total = np.zeros(len(ORDERS))
    for event, steps in counts:
        total += steps * step_moments(event)
    return total


@functools.lru_cache(maxsize=8192)
def step_moments(event: StepEvent) -> np.ndarray:
    """[orders] float64: the rate of one step at each of ORDERS, infinite where it is not known. Not to be written into.

    Takes 30 ms for an event that was not asked about before.
    """
    rates = rdp_rates(event, ORDERS) if event.noise_multiplier else np.full(len(ORDERS), math.inf)
    if event.mechanism == "discrete_gaussian":
        rates = np.where(_WHOLE, rates, math.inf)
    rates.flags.writeable = False
    return rates


def epsilon_of(rates: np.ndarray, delta: float) -> Epsilon:
    """The epsilon that rates [orders] give at delta, the smallest over the orders."""
    known = np.flatnonzero(np.isfinite(rates))
    if not len(known):
        return Epsilon(math.inf)
    value, order = rdp_epsilon(ORDERS, rates, delta)
    if not 0 < value < math.inf:
        return Epsilon(value)
    note = None
    if order in (ORDERS[known[0]], ORDERS[known[-1]]):
        note = f"the best order is {order:g}, at the edge of those that are looked at; beyond it epsilon might be smaller"
    return Epsilon(value, order=order, note=note)
