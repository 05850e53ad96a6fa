"""What declared steps guarantee at each epsilon: their privacy profile.

It comes from dp-accounting and from closed forms, and not from `privacy.accounting`: an audit does not rely
on the accountant that it audits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np

from psgrad.engine.privacy.accounting import Events, StepEvent, merged

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Profile:
    """A guarantee: (epsilons[i], deltas[i])-private for each i, epsilons >= 0, whichever of two neighbours
    comes first.
    """

    epsilons: Array
    deltas: Array

    def least_error(self, success: float) -> float:
        """The least probability, under the neighbour, of an event that has the probability `success` under a
        dataset.

        The inverse of 1 - f for the trade-off function f that the pairs (epsilon, delta) leave room for
        (Dong, Roth and Su, "Gaussian Differential Privacy", 2022, proposition 2.5).
        """
        shrunk = np.exp(-self.epsilons) * (success - self.deltas)
        # Where almost all guesses are right, the complement's limit is tighter. Large epsilons overflow
        # towards -inf, which is right.
        with np.errstate(over="ignore"):
            complement = 1 - self.deltas - np.exp(self.epsilons) * (1 - success)
        return max(0.0, float(shrunk.max()), float(complement.max()))


# The epsilons at which a guarantee is evaluated. Each of them is a valid claim, so a coarser choice only
# weakens the result.
_POINTS, _SMALLEST, _LARGEST = 400, 1e-3, 600.0
# The number of privacy losses that a distribution is kept with, about, and the finest step between them.
_LOSSES, _FINEST = 4_000, 1e-4


def scaled(events: Events, share: float) -> Events:
    """The steps with `share` times their noise."""
    return [
        (replace(event, noise_multiplier=event.noise_multiplier * share), steps) for event, steps in events
    ]


def profile_of(events: Events) -> Profile:
    """The guarantee of the steps, all together; some noise in each of them.

    Exact for steps without amplification, which are one Gaussian release; else by privacy loss distributions,
    which err on the safe side. Noise that is rounded to its grid counts as continuous.
    """
    counts = merged(events)
    mu = distance(events)
    # Amplification only lowers losses: those of the plain Gaussian release span the range.
    largest = min(mu * mu / 2 + 8 * mu, _LARGEST)
    epsilons = np.concatenate([[0.0], np.geomspace(min(_SMALLEST, largest / 2), largest, _POINTS)])
    if all(event.sample_rate == 1 for event in counts):
        return Profile(epsilons, gaussian_deltas(mu, epsilons))
    interval = max(_FINEST, (mu * mu + 16 * mu) / _LOSSES)
    parts = [_losses(event, interval).self_compose(steps) for event, steps in counts.items()]
    whole = reduce(lambda one, other: one.compose(other), parts)
    return Profile(epsilons, np.asarray(whole.get_delta_for_epsilon(list(epsilons))))


def _losses(event: StepEvent, interval: float) -> Any:
    """The loss distribution of one step by dp-accounting. Under REPLACE_ONE it moves the sum by twice the
    bound itself, and takes the noise in bounds.
    """
    from dp_accounting import NeighboringRelation
    from dp_accounting.pld import privacy_loss_distribution as distributions

    neighbours = {
        "add_or_remove_one": NeighboringRelation.ADD_OR_REMOVE_ONE,
        "replace_one": NeighboringRelation.REPLACE_ONE,
        "zero_out": NeighboringRelation.REPLACE_SPECIAL,
    }[event.relation]
    return distributions.from_gaussian_mechanism(
        event.noise_multiplier * (2 if event.relation == "replace_one" else 1),
        value_discretization_interval=interval,
        sampling_prob=event.sample_rate,
        neighboring_relation=neighbours,
    )


def distance(events: Events) -> float:
    """How many standard deviations of the noise a record makes, over all steps, if it is drawn in each of
    them.
    """
    return math.sqrt(math.fsum(steps / event.noise_multiplier**2 for event, steps in merged(events).items()))


def gaussian_deltas(mu: float, epsilons: Array) -> Array:
    """[k]: delta at epsilons [k] of a Gaussian release at a distance of mu standard deviations (Balle and
    Wang, 2018, theorem 8).
    """
    from scipy.stats import norm

    deltas: Array = norm.cdf(mu / 2 - epsilons / mu) - np.exp(epsilons + norm.logcdf(-mu / 2 - epsilons / mu))
    return np.maximum(deltas, 0.0)
