"""What the epsilons of a run at many deltas say besides: what an attacker can achieve, the Gaussian mechanism
that is as private, and groups of records. All are bounds, never on the wrong side.

An (epsilon, delta) pair bounds the true-positive rate of any test for a record at false-positive rate a, by
delta + e^epsilon a, and as its complement is a test, too, by 1 - e^-epsilon (1 - delta - a). Of all pairs the
smallest bound counts: this is the trade-off curve (Dong, Roth and Su 2019, arXiv 1905.02383, proposition 6).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from psgrad.engine.privacy.accounting.composition import delta_curve, epsilon_pld
from psgrad.engine.privacy.accounting.epsilon import epsilon_of, total_moments, why_not_rdp
from psgrad.engine.privacy.accounting.events import Events, merged

Profile = Sequence[tuple[float, float]]
"""Pairs (epsilon, delta) that a run keeps to."""

_POINTS = 2000  # of the curve by loss distributions, from epsilon 0 on
_LEAST_DELTA = 1e-11
_DELTAS = np.geomspace(1e-60, 0.99, 500)  # of the curve by moments; the smallest are for groups
_MOST_EPSILON = 700.0  # whose exponential floating point holds


def profile_of(events: Events) -> list[tuple[float, float]]:
    """Pairs (epsilon, delta) of steps, smallest epsilon first: by loss distributions, and beyond their reach
    by moments. None for steps without noise, or that no accountant covers. Takes a second.
    """
    pairs: list[tuple[float, float]] = []
    least = epsilon_pld(events, _LEAST_DELTA).value
    if least is not None and 0 < least < _MOST_EPSILON:
        epsilons = np.linspace(0, least, _POINTS)
        deltas = delta_curve(events, epsilons)
        pairs = [] if deltas is None else list(zip(epsilons.tolist(), deltas.tolist(), strict=True))
    counts = merged(events)
    if any(why_not_rdp(event) for event in counts):
        return pairs
    moments, reach = total_moments(counts.items()), pairs[-1][0] if pairs else 0.0
    for delta in reversed(_DELTAS.tolist()):
        epsilon = epsilon_of(moments, delta).value
        if epsilon is not None and reach < epsilon < _MOST_EPSILON:
            pairs.append((epsilon, delta))
    return pairs


def epsilon_at(profile: Profile, delta: float) -> float | None:
    """The smallest epsilon of the pairs with a delta of at most this; None where there is none."""
    return min((epsilon for epsilon, each in profile if each <= delta), default=None)


def true_positive_rate(profile: Profile, false_positive_rate: float) -> float:
    """The largest true-positive rate that any test for a record can have at this false-positive rate."""
    bounds = [1.0]
    for epsilon, delta in profile:
        bounds.append(delta + math.exp(epsilon) * false_positive_rate)
        bounds.append(1 - math.exp(-epsilon) * (1 - delta - false_positive_rate))
    return min(bounds)


def gaussian_parameter(profile: Profile, least_delta: float) -> float | None:
    """The smallest mu whose Gaussian mechanism (mu-GDP) has at least the delta of every pair whose delta is
    at least `least_delta`; None where no pair has. Below that delta the run may be less private.
    """
    return max((_mu(*each) for each in profile if each[1] >= least_delta), default=None)


def _mu(epsilon: float, delta: float) -> float:
    low, high = 0.0, 1.0
    while gaussian_delta(high, epsilon) < delta:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if gaussian_delta(middle, epsilon) < delta else (low, middle)
    return high


def gaussian_delta(mu: float, epsilon: float) -> float:
    """Delta at epsilon of a Gaussian mechanism whose sensitivity is mu standard deviations (Balle and Wang
    2018, arXiv 1805.06530, theorem 8).
    """
    if mu == 0:
        return 0.0
    tail = _normal(-epsilon / mu - mu / 2)
    return _normal(mu / 2 - epsilon / mu) - (math.exp(epsilon) * tail if tail else 0.0)


def _normal(x: float) -> float:
    return math.erfc(-x / math.sqrt(2)) / 2


def group_epsilon(profile: Profile, records: int, delta: float) -> float | None:
    """Epsilon at delta for this many records together, of a chain of neighbours: k epsilon at
    delta (e^(k epsilon) - 1) / (e^epsilon - 1) (Vadhan 2017, lemma 2.2). None where no pair is small enough.
    """
    possible = [
        records * epsilon
        for epsilon, each in profile
        if records * epsilon < _MOST_EPSILON
        and each * math.fsum(math.exp(place * epsilon) for place in range(records)) <= delta
    ]
    return min(possible, default=None)
