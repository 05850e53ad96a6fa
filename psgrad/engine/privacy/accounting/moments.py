"""Renyi differential privacy (RDP): the moments of one step's privacy loss, which add up over steps, and the epsilon that they give.

A step is RDP of order a with rate r(a) where the a-th moment of the ratio of its two output densities is at most exp((a - 1) r(a)). For the
Gaussian that sees each record with probability q, the ratio's moment is known (Mironov, Talwar and Zhang, "Renyi Differential Privacy of
the Sampled Gaussian Mechanism", arXiv 1908.10530, section 3.3); adding a record costs no more than removing one (theorem 5 there). Noise
on the integers has the same moments of integer order, as a shift by integers maps the integers to themselves, and the reflection that
theorem 5 is proved by does so too; between the integers its moments are other ones, and these orders are left out.

The numbers agree with dp_accounting.rdp.RdpAccountant, which takes 30 ms for a step where this takes two: a display that follows a run
whose noise changes from step to step, and a search over noise multipliers, need thousands.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable

import numpy as np

from psgrad.engine.privacy.accounting.epsilon import Epsilon, assert_delta
from psgrad.engine.privacy.accounting.events import RDP_RELATIONS, StepEvent, merged

# The orders that dp-accounting looks at, too.
ORDERS = np.array([1 + tenths / 10 for tenths in range(1, 100)] + [float(order) for order in range(11, 64)] + [128.0, 256.0, 512.0, 1024.0])
_WHOLE = np.floor(ORDERS) == ORDERS
# As many terms of the series for fractional orders are taken at first, then, and at most.
_TERMS = (64, 256, 1000)
# A term that is less than exp(-30) of the sum ends the series.
_NEGLIGIBLE = 30.0
# Below this, rounding is a part of a fractional moment's logarithm that matters, and the order is left out.
_TOO_SMALL = 1e-9


def epsilon_rdp(events: Iterable[tuple[StepEvent, int]], delta: float) -> Epsilon:
    """Epsilon of steps by Renyi differential privacy: fast, and a little larger than need be.

    Raises ConfigError for a delta that is not between 0 and 1, and for steps that don't compose (see `merged`).
    """
    assert_delta(delta)
    counts = merged(events)
    for event in counts:
        if reason := why_not_rdp(event):
            return Epsilon(None, reason)
    return epsilon_of(total_moments(counts.items()), delta)


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
    """[orders] float64: the rate of one step at each of ORDERS, infinite where it is not known. Not to be written into."""
    rates = sampled_gaussian_moments(event.sample_rate, event.rdp_multiplier)
    if event.mechanism == "discrete_gaussian":
        rates = np.where(_WHOLE, rates, math.inf)
    rates.flags.writeable = False
    return rates


def epsilon_of(rates: np.ndarray, delta: float) -> Epsilon:
    """The epsilon that rates [orders] give at delta: the smallest over the orders (Canonne, Kamath and Steinke, "The Discrete Gaussian for
    Differential Privacy", arXiv 2004.00010, proposition 12), or 0 where the total variation distance is below delta already.
    """
    with np.errstate(invalid="ignore"):
        epsilons = rates + np.log1p(-1 / ORDERS) - (math.log(delta) + np.log(ORDERS)) / (ORDERS - 1)
        # The Kullback-Leibler divergence is at most each rate, and total variation at most sqrt(1 - exp(-divergence)) (Bretagnolle, Huber).
        epsilons[delta**2 + np.expm1(-rates) > 0] = 0.0
    best = int(np.argmin(epsilons))
    value = max(0.0, float(epsilons[best]))
    if not 0 < value < math.inf:
        return Epsilon(value)
    known = np.flatnonzero(np.isfinite(rates))
    note = None
    if best in (known[0], known[-1]):
        note = f"the best order is {ORDERS[best]:g}, at the edge of those that are looked at; beyond it epsilon might be smaller"
    return Epsilon(value, order=float(ORDERS[best]), note=note)


def sampled_gaussian_moments(rate: float, multiplier: float) -> np.ndarray:
    """[orders] float64: the rates of a Gaussian of standard deviation `multiplier` over a sum that one record moves by 1, and enters with
    probability `rate`."""
    if multiplier == 0:
        return np.full(len(ORDERS), math.inf)
    if rate == 1:
        with np.errstate(over="ignore", divide="ignore"):
            return ORDERS / (2 * np.square(np.float64(multiplier)))
    logarithms = np.empty(len(ORDERS))
    logarithms[_WHOLE] = _whole_orders(rate, multiplier)
    logarithms[~_WHOLE] = _fractional_orders(rate, multiplier)
    return logarithms / (ORDERS - 1)


@functools.cache
def _binomials() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Every term 2 <= k <= a of every whole order a, in one row: a, k, log(a over k), and where the orders start."""
    from scipy import special

    whole = ORDERS[_WHOLE].astype(np.int64)
    order = np.repeat(whole, whole - 1)
    starts = np.concatenate([[0], np.cumsum(whole - 1)[:-1]])
    k = np.arange(len(order)) - np.repeat(starts, whole - 1) + 2
    return order, k, special.gammaln(order + 1) - special.gammaln(k + 1) - special.gammaln(order - k + 1), starts


def _whole_orders(rate: float, multiplier: float) -> np.ndarray:
    """[whole orders]: log of the sum over k of (a over k) q^k (1 - q)^(a - k) exp((k^2 - k) / 2 z^2).

    Without the exponential the sum is 1, and k = 0 and 1 have none: what is above 1 is a sum of positive terms, with expm1 for exp, in
    which nothing cancels however small it is.
    """
    order, k, binomials, starts = _binomials()
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        exponent = (k * k - k) / (2 * np.square(np.float64(multiplier)))
        terms = binomials + k * math.log(rate) + (order - k) * math.log1p(-rate) + exponent + np.log(-np.expm1(-exponent))
        return np.logaddexp(0.0, np.logaddexp.reduceat(terms, starts))


def _fractional_orders(rate: float, multiplier: float) -> np.ndarray:
    """[fractional orders]: log of the moment, by the two series of arXiv 1908.10530, infinite where they don't converge.

    Terms have the sign of a binomial coefficient, which is negative for some beyond the order; all are added, as dp-accounting does, which
    makes the moment a little larger.
    """
    orders = ORDERS[~_WHOLE]
    logarithms = np.full(len(orders), math.inf)
    for terms in _TERMS:
        left = np.flatnonzero(np.isinf(logarithms))
        if not len(left):
            break
        sums, converged = _series(orders[left], rate, multiplier, terms)
        logarithms[left[converged]] = sums[converged]
    return np.where(logarithms > _TOO_SMALL, logarithms, math.inf)


def _series(orders: np.ndarray, rate: float, multiplier: float, terms: int) -> tuple[np.ndarray, np.ndarray]:
    """[orders] the logarithms, and [orders] bool whether the terms were enough."""
    from scipy import special

    log_q, log_p = math.log(rate), math.log1p(-rate)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        square = np.square(np.float64(multiplier))
        middle = square * (log_p - log_q) + 0.5  # where the two densities meet
        i = np.arange(terms, dtype=np.float64)
        j = orders[:, None] - i
        binomials = special.gammaln(orders + 1)[:, None] - special.gammaln(i + 1) - special.gammaln(j + 1)
        below = binomials + i * log_q + j * log_p + (i * i - i) / (2 * square) + special.log_ndtr((middle - i) / multiplier)
        above = binomials + j * log_q + i * log_p + (j * j - j) / (2 * square) + special.log_ndtr((j - middle) / multiplier)
        sums = np.logaddexp.accumulate(np.logaddexp(below, above), axis=1)
        ends = np.maximum(below, above) < sums - _NEGLIGIBLE
        ends[:, 1:] &= (below[:, 1:] < below[:, :-1]) & (above[:, 1:] < above[:, :-1])
    ends[:, 0] = False
    last = np.argmax(ends, axis=1)
    rows = np.arange(len(orders))
    return sums[rows, last], ends[rows, last] & np.isfinite(sums[rows, last])
