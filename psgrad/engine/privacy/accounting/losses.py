"""The distribution of one step's privacy loss, on a grid of losses.

The loss of an outcome is the logarithm of how much likelier it is on one dataset than on its neighbour. Its distribution says all about a
step that composition needs, and composing steps convolves their distributions. On the grid it is the tightest one that is no better than
the true one ("connect the dots": Doroshenko, Ghazi, Kamath, Kumar and Manurangsi, arXiv 2207.04380), so that what comes out of it is an
upper bound whatever the grid's interval.

The pairs of densities are those of dp-accounting (its supplement "Privacy Loss Distributions"), as are the tails and the discretisation;
the grid's points are computed all at once in place of one after the other (20 ms for 300 ms). With mu the density N(0, z^2), a record
adds 1 to the sum and is drawn with probability q:

    removed    q mu(x + 1) + (1 - q) mu(x)   against   mu(x)
    added      mu(x)                         against   q mu(x - 1) + (1 - q) mu(x)
    replaced   q mu(x + 1) + (1 - q) mu(x)   against   q mu(x - 1) + (1 - q) mu(x)
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from psgrad.engine.privacy.accounting.events import StepEvent

Change = Literal["removed", "added", "replaced"]

# exp of this is the noise's probability mass that is counted as infinite loss.
_LOG_TAIL = -50.0


@dataclass(frozen=True, eq=False)
class Losses:
    """A distribution of losses on whole multiples of an interval.

    Attributes:
        first: the lowest loss, in intervals.
        masses: [n] float64, the probability of first, first + 1, ...
        infinite: the probability of an infinite loss.
    """

    first: int
    masses: np.ndarray
    infinite: float

    def mixed(self, other: Losses, weight: float) -> Losses:
        """This one with probability `weight`, and else the other."""
        first = min(self.first, other.first)
        masses = np.zeros(max(self.first + len(self.masses), other.first + len(other.masses)) - first)
        for losses, share in ((self, weight), (other, 1 - weight)):
            masses[losses.first - first :][: len(losses.masses)] += share * losses.masses
        return Losses(first, masses, weight * self.infinite + (1 - weight) * other.infinite)


@dataclass(frozen=True)
class SampledGaussian:
    """A Gaussian of standard deviation `multiplier` over a sum that one record moves by 1, and enters with probability `rate`."""

    multiplier: float
    rate: float
    change: Change

    def loss(self, x: float) -> float:
        """The loss at x, which falls with x."""
        if self.change == "removed":
            return self._removed(x)
        if self.change == "added":
            return -self._removed(-x)
        return self._removed(x) - self._removed(-x)

    def _removed(self, x: float) -> float:
        plain = (-0.5 - x) / self.multiplier**2
        return plain if self.rate == 1 else float(np.logaddexp(math.log1p(-self.rate), math.log(self.rate) + plain))

    def range(self) -> tuple[float, float]:
        """The losses between the tails."""
        from scipy import special

        reach = -self.multiplier * float(special.ndtri(0.5 * math.exp(_LOG_TAIL)))
        return self.loss(reach + (self.change == "added")), self.loss(-reach - (self.change != "added"))

    def deltas(self, epsilons: np.ndarray) -> np.ndarray:
        """[n]: the delta of each epsilon: the first density's mass where the loss is above epsilon, less e^epsilon times the other's."""
        from scipy import special

        z, q = self.multiplier, self.rate
        deltas = np.zeros(len(epsilons))
        inside = np.ones(len(epsilons), dtype=bool)
        if q < 1 and self.change == "removed":
            inside = epsilons > math.log1p(-q)  # at it and below, all outcomes have more loss
            deltas[~inside] = -np.expm1(epsilons[~inside])
        elif q < 1 and self.change == "added":
            inside = epsilons < -math.log1p(-q)  # at it and above, none has
        epsilons = epsilons[inside]
        x = self._where(epsilons)
        if self.change == "added":
            first = special.ndtr(x / z)
        else:
            first = q * special.ndtr((x + 1) / z) + ((1 - q) * special.ndtr(x / z) if q < 1 else 0.0)
        if self.change == "removed":
            second = special.log_ndtr(x / z)
        else:
            second = special.log_ndtr((x - 1) / z)
            if q < 1:
                second = np.logaddexp(math.log1p(-q) + special.log_ndtr(x / z), math.log(q) + second)
        with np.errstate(over="ignore"):
            deltas[inside] = first - np.exp(epsilons + second)
        return np.clip(deltas, 0.0, 1.0)

    def _where(self, epsilons: np.ndarray) -> np.ndarray:
        """[n]: the x at which the loss is epsilon."""
        z2, q = self.multiplier**2, self.rate
        if self.change == "removed":
            return -0.5 - z2 * _without_sampling(epsilons, q)
        if self.change == "added":
            return 0.5 + z2 * _without_sampling(-epsilons, q)
        if q == 1:
            return -epsilons * z2 / 2
        # With y = -x / z^2: sinh(y - epsilon / 2) = exp(1 / 2 z^2) (1 - q) / q sinh(epsilon / 2).
        size = np.abs(epsilons)
        with np.errstate(divide="ignore"):
            log_sinh = size / 2 + np.log(-np.expm1(-size)) - math.log(2) + 0.5 / z2 + math.log1p(-q) - math.log(q)
        asinh = np.logaddexp(0.5 * np.logaddexp(0.0, 2 * log_sinh), log_sinh)
        return -np.sign(epsilons) * z2 * (asinh + size / 2)

    def on_grid(self, interval: float) -> Losses:
        """The distribution on whole multiples of `interval`, rounded so that no epsilon comes out too small (algorithm 1 of the paper)."""
        low, high = self.range()
        first, last = math.floor(low / interval), max(math.ceil(high / interval), math.floor(low / interval) + 1)
        deltas = np.minimum.accumulate(self.deltas(np.arange(first, last + 1) * interval))
        falls = -np.diff(deltas)
        share = math.exp(-interval) / -math.expm1(-interval)
        masses = np.empty(len(deltas))
        masses[0] = 1 - deltas[0] - falls[0] * share
        masses[1:-1] = falls[:-1] + (falls[:-1] - falls[1:]) * share
        masses[-1] = falls[-1] * (1 + share)
        return Losses(first, np.maximum(masses, 0.0), float(deltas[-1]))


def _without_sampling(epsilons: np.ndarray, q: float) -> np.ndarray:
    """log(1 + (e^epsilon - 1) / q): the loss of a record that is drawn for certain, where sampling leaves epsilon of it."""
    if q == 1:
        return epsilons
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        near = np.log1p(np.expm1(epsilons) / q)
        far = epsilons - math.log(q) + np.log1p(-(1 - q) * np.exp(-epsilons))
    return np.where(epsilons < 1, near, far)


@functools.lru_cache(maxsize=8)
def gaussian_losses(multiplier: float, rate: float, change: Change, interval: float) -> Losses:
    """The losses of a sampled Gaussian, on a grid."""
    return SampledGaussian(multiplier, rate, change).on_grid(interval)


def step_losses(event: StepEvent, interval: float) -> tuple[Losses, ...]:
    """The losses of one step with continuous noise, of a multiplier above 0: for a record that is removed, and for one that is added;
    one distribution where both are the same."""
    changes: tuple[Change, ...] = ("removed", "added")
    if event.relation == "replace_one":
        changes = ("replaced",)
    elif event.sample_rate == 1:
        changes = ("removed",)
    whole = tuple(gaussian_losses(event.pld_multiplier, event.sample_rate, change, interval) for change in changes)
    return whole if event.sampling.scheme != "truncated_poisson" else _truncated(event, whole, interval)


def _truncated(event: StepEvent, whole: tuple[Losses, ...], interval: float) -> tuple[Losses, ...]:
    """The same where batches above a size are cut down to it, as dp-accounting has it (section 4.3 of its supplement).

    Where the others alone fill the batch, a record takes another's place, so that the sum moves by twice as much; it gets in with the
    probability that the room leaves it. Which of the two cases a step is in is told, which only adds loss.
    """
    from scipy import stats

    size, limit, rate = event.sampling.dataset_size, event.sampling.max_batch_size, event.sample_rate
    assert size is not None
    assert limit is not None
    full = float(stats.binom.sf(limit - 1, size - 1, rate))
    if full == 0:
        return whole
    drawn = min(1.0, float(stats.binom.sf(limit, size, rate)) * limit / size / full)
    if drawn == 0:
        return whole
    replacing = gaussian_losses(event.pld_multiplier / 2, drawn, "replaced", interval)
    return tuple(replacing.mixed(losses, full) for losses in whole)
