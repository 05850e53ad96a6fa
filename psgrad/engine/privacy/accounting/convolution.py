"""Composing distributions of losses by one Fourier transform each, and the epsilon of what comes out.

dp-accounting composes two distributions at a time, and goes through their points one by one. That is as good for equal steps; for hundreds
of unlike ones, for an epsilon after each of many steps, and for a search, this way is ten times as fast. The mathematics is the same:
masses beyond a window that Chernoff's bound gives are counted as infinite loss.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from psgrad.engine.privacy.accounting.losses import Losses

# Mass outside of the window, at most; as dp-accounting has it.
_OUTSIDE = 1e-15
# Chernoff's bound is tried at these multiples of the exponent that suits a normal distribution; small ones suit heavy tails.
_EXPONENTS = 2.0 ** np.arange(-9, 3)
# exp of more than this is not asked for.
_LARGEST = 600.0


def convolved(parts: Sequence[tuple[Losses, int]]) -> Losses:
    """The losses of all these steps together: (those of one, how many), on one grid."""
    from scipy import fft

    start = sum(losses.first * steps for losses, steps in parts)
    low, high = _window(parts)
    size = fft.next_fast_len(max(high - low + 1, *(len(losses.masses) for losses, _ in parts)), real=True)
    spectrum = np.ones(size // 2 + 1, dtype=np.complex128)
    finite = 0.0
    for losses, steps in parts:
        one = fft.rfft(losses.masses, size)
        spectrum *= _power(one, steps)
        finite += steps * math.log1p(-losses.infinite)
    # What lies outside of the window is folded into it; it is counted once more, as infinite.
    masses = np.roll(fft.irfft(spectrum, size), start - low)[: high - low + 1]
    return Losses(low, masses, min(1.0, _OUTSIDE - math.expm1(finite)))


def _window(parts: Sequence[tuple[Losses, int]]) -> tuple[int, int]:
    """The losses between which all but _OUTSIDE of the mass lies, in intervals."""
    low = sum(losses.first * steps for losses, steps in parts)
    high = sum((losses.first + len(losses.masses) - 1) * steps for losses, steps in parts)
    mean = variance = 0.0
    for losses, steps in parts:
        grid = np.arange(len(losses.masses)) + float(losses.first)
        average = float(np.sum(losses.masses * grid))
        mean += steps * average
        variance += steps * float(np.sum(losses.masses * (grid - average) ** 2))
    bits = math.log(2 / _OUTSIDE)
    # Beyond the last exponent that exp bears, all are that one.
    reach = max(max(abs(losses.first), abs(losses.first + len(losses.masses))) for losses, _ in parts)
    exponents = _EXPONENTS * min(math.sqrt(2 * bits / max(variance, 1e-300)), _LARGEST / max(reach, 1) / _EXPONENTS[-1])
    upper, lower = np.zeros(len(exponents)), np.zeros(len(exponents))
    for losses, steps in parts:
        powers = np.exp(exponents[0] * (np.arange(len(losses.masses)) + float(losses.first)))
        for place in range(len(exponents)):
            if place:
                powers *= powers  # each exponent is twice the one before
            upper[place] += steps * math.log(np.sum(losses.masses * powers))
            lower[place] += steps * math.log(np.sum(losses.masses / powers))
    return max(low, math.floor(np.max(-(lower + bits) / exponents))), min(high, math.ceil(np.min((upper + bits) / exponents)))


def _power(values: np.ndarray, exponent: int) -> np.ndarray:
    """[n]: complex values to a whole power, by squaring: numpy takes logarithms for it, and ten times as long."""
    power = np.ones_like(values)
    while exponent:
        if exponent & 1:
            power *= values
        exponent >>= 1
        if exponent:
            values = values * values
    return power


def epsilon_at(losses: Losses, delta: float, interval: float) -> float:
    """The smallest epsilon at which delta is enough, infinite where there is none.

    delta(epsilon) is the infinite mass plus the sum over losses above epsilon of mass * (1 - exp(epsilon - loss)).
    """
    if losses.infinite > delta:
        return math.inf
    falling = (np.arange(len(losses.masses) - 1, -1, -1) + losses.first) * interval
    falling = falling[falling > 0]
    if not len(falling):
        return 0.0
    masses = losses.masses[::-1][: len(falling)]
    above = losses.infinite + np.cumsum(masses)
    with np.errstate(over="ignore", under="ignore", divide="ignore", invalid="ignore"):
        weighted = np.cumsum(masses * np.exp(-falling))
        epsilons = np.where(above > delta, np.log((above - delta) / weighted), -math.inf)
    below = np.append(falling[1:], 0.0)
    found = np.flatnonzero(epsilons >= below)
    return 0.0 if not len(found) else float(min(epsilons[found[0]], falling[found[0]]))
