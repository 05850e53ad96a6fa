"""Lower bounds on the privacy loss of one run with many canaries, each in or out at random.

After the run an attacker guesses for some canaries and abstains for the others. The guarantee limits how many
guesses can be right: a larger number refutes it. Two such limits are here; both hold however the canaries
depend on each other:

- for any mechanism that is (epsilon, delta)-private: Steinke, Nasr and Jagielski, "Privacy Auditing with One
  (1) Training Run", 2023, arXiv 2305.08846, theorem 5.2. Far from tight for Gaussian noise;
- for any mechanism with a whole privacy profile, delta as a function of epsilon: Mahloujifar, Melis and
  Chaudhuri, "Auditing f-Differential Privacy in One Run", 2024, arXiv 2410.22235, theorem 3.2 and its
  algorithm. Close to tight for many canaries.

The profile of the declared steps comes from dp-accounting and from closed forms, and not from
`privacy.accounting`: an audit does not rely on the accountant that it audits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np

from psgrad.engine.privacy.accounting import Events, StepEvent, merged
from psgrad.errors import ConfigError

Array = np.ndarray[Any, Any]

# Epsilons above it count as infinite: a coin would practically never be guessed wrong.
_INFINITE = 500.0


@dataclass(frozen=True)
class Guesses:
    """So many guesses about the coins of `canaries` canaries, and how many of them were right."""

    canaries: int
    guesses: int
    right: int

    def __post_init__(self) -> None:
        if not 0 <= self.right <= self.guesses <= self.canaries or self.canaries < 1:
            raise ConfigError(
                f"an audit counts {self.right} right guesses out of {self.guesses}, about {self.canaries}"
                " canaries",
                expected="0 <= right <= guesses <= canaries, and one canary or more",
            )


# The shares of all canaries that are guessed about: fixed before any score is seen, each one paid for by the
# union bound.
_SHARES = (1 / 2, 1 / 8, 1 / 32, 1 / 128)
# A handful of guesses refutes nothing at 95 %.
_FEWEST = 6


def strategies(canaries: int) -> list[tuple[int, int]]:
    """[(how many "in", how many "out")]: the numbers of guesses that an attack tries, given the number of
    canaries alone.

    "In" is guessed of the highest scores, "out" of the lowest. Where records are drawn at random, a low score
    says little: half of the strategies guess "in" only.
    """
    sizes = dict.fromkeys(max(math.floor(canaries * share), 1) for share in _SHARES)
    chosen = [size for size in sizes if size >= _FEWEST] or [next(iter(sizes))]
    return [(size, size) for size in chosen] + [(size, 0) for size in chosen]


def guess(scores: Array, inside: Array, strategy: tuple[int, int]) -> Guesses:
    """The result of a strategy. scores [m]: higher where the canary seems to be in; inside [m]: the coins.
    Equal scores are ordered by place, without the coins.
    """
    ins, outs = strategy
    order = np.argsort(scores, kind="stable")
    right = int(np.count_nonzero(inside[order[len(order) - ins :]])) + int(
        np.count_nonzero(~inside[order[:outs]])
    )
    return Guesses(len(order), ins + outs, right)


# -- any mechanism -------------------------------------------------------------------------------------------


def p_value(guesses: Guesses, epsilon: float, delta: float) -> float:
    """An upper bound on the probability of at least this number of right guesses about an (epsilon,
    delta)-private run.

    That is P[B >= v] + 2 m delta max_i P[v > B >= v - i] / i, with B binomial: r guesses, each right with
    e^eps / (1 + e^eps) (theorem 5.2 of Steinke et al.).
    """
    from scipy.special import expit
    from scipy.stats import binom

    if guesses.right == 0:
        return 1.0
    chance = expit(epsilon)
    at_least = float(binom.sf(guesses.right - 1, guesses.guesses, chance))
    if delta == 0:
        return min(at_least, 1.0)
    back = np.arange(1, guesses.right + 1)
    just_below = binom.cdf(guesses.right - 1, guesses.guesses, chance) - binom.cdf(
        guesses.right - back - 1, guesses.guesses, chance
    )
    return min(at_least + 2 * guesses.canaries * delta * float(np.max(just_below / back)), 1.0)


def epsilon_for_any_mechanism(
    all_guesses: Sequence[Guesses], delta: float, level: float
) -> tuple[float, Guesses | None]:
    """(the largest epsilon that is refuted, the guesses that refute it): a lower bound, wrong with a
    probability of at most `level`.

    `found` are the outcomes of strategies that were fixed beforehand; `level` is shared out among them. (0,
    None): nothing is refuted.
    """
    best: tuple[float, Guesses | None] = (0.0, None)
    for guesses in all_guesses:
        share = level / len(all_guesses)
        if p_value(guesses, best[0], delta) > share:
            continue
        low, high = best[0], max(2 * best[0], 1.0)
        while high < _INFINITE and p_value(guesses, high, delta) <= share:
            low, high = high, 2 * high
        for _ in range(50):
            middle = (low + high) / 2
            low, high = (middle, high) if p_value(guesses, middle, delta) <= share else (low, middle)
        best = (low, guesses)
    return best


# -- a mechanism with a known profile ------------------------------------------------------------------------


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


def is_refuted(profile: Profile, guesses: Guesses, level: float) -> bool:
    """Whether at least this number of right guesses has a probability below `level` under the guarantee.

    With p_i the probability of i right guesses out of r about m canaries, turning one canary's coin makes a
    right guess a wrong one and leaves the output as it was. So the right ones' share of the outcomes with k
    right guesses or more, sum_{i>=k} i p_i / m, is held down by the wrong ones' share of those with k - 1 or
    more, sum_{i>=k-1} (r - i) p_i / m. If P[right >= v] were `level`, these limits would force a least mass
    on v - 1, v - 2, ...; refuted is what needs more than all of it.
    """
    m, r, v = guesses.canaries, guesses.guesses, guesses.right
    if v == 0:
        return False
    whole = r / m
    right, wrong = level * v / m, level * (r - v) / m
    for i in range(v - 1, -1, -1):
        forced = profile.least_error(right)
        if forced <= wrong:
            return False  # nothing more is forced, here or further down
        right += i / (r - i) * (forced - wrong)
        wrong = forced
        if right + wrong > whole:
            return True
    return False


# -- independent canaries ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rates:
    """How often a score was above a threshold, among canaries that were in and among those out."""

    hits: int
    inside: int
    alarms: int
    outside: int

    def is_refuted_by(self, profile: Profile, level: float) -> bool:
        """Whether the guarantee excludes these rates, with a probability of at most `level` of a false
        result.

        The rates are compared with Clopper and Pearson's bounds, each at half the level. Assumes that
        canaries were drawn, and got their noise, independently of one another, as a mechanism that does what
        it declares ensures.
        """
        from scipy.stats import beta

        if self.hits == 0 or self.outside == 0:
            return False
        at_least = float(beta.ppf(level / 2, self.hits, self.inside - self.hits + 1))
        at_most = (
            1.0
            if self.alarms == self.outside
            else float(beta.ppf(1 - level / 2, self.alarms + 1, self.outside - self.alarms))
        )
        return profile.least_error(at_least) > at_most


# The shares of the canaries that are out and whose scores a threshold leaves above it, if the noise is as
# declared.
_TAILS = (0.4, 0.1, 0.02, 0.003)
# A threshold above which fewer canaries than this are expected is not used.
_FEWEST_ABOVE = 2.0


def tails(canaries: int) -> list[float]:
    """The thresholds as shares of the canaries that are out, fixed by the number of canaries alone."""
    return [tail for tail in _TAILS if tail * canaries / 2 >= _FEWEST_ABOVE] or [_TAILS[0]]


def rates(scores: Array, inside: Array, threshold: float) -> Rates:
    """The rates of scores [m] of canaries with coins inside [m] above and below a threshold that was fixed
    without them.
    """
    above = scores > threshold
    hits, alarms = int(np.count_nonzero(above & inside)), int(np.count_nonzero(above & ~inside))
    count = int(np.count_nonzero(inside))
    return Rates(hits, count, alarms, len(scores) - count)


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
    which err on the safe side.
    """
    counts = merged(events)
    mu = distance(events)
    # Amplification only lowers losses: those of the plain Gaussian release span the range.
    largest = min(mu * mu / 2 + 8 * mu, _LARGEST)
    epsilons = np.concatenate([[0.0], np.geomspace(min(_SMALLEST, largest / 2), largest, _POINTS)])
    if all(event.sample_rate == 1 and event.sampling.scheme != "truncated_poisson" for event in counts):
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
    sampling, multiplier = (
        event.sampling,
        event.noise_multiplier * (2 if event.relation == "replace_one" else 1),
    )
    if sampling.scheme == "truncated_poisson":
        assert sampling.dataset_size is not None
        assert sampling.max_batch_size is not None
        return distributions.from_truncated_subsampled_gaussian_mechanism(
            dataset_size=sampling.dataset_size,
            sampling_probability=event.sample_rate,
            truncated_batch_size=sampling.max_batch_size,
            noise_multiplier=multiplier,
            value_discretization_interval=interval,
            neighboring_relation=neighbours,
        )
    return distributions.from_gaussian_mechanism(
        multiplier,
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
