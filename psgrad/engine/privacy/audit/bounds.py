"""A lower bound on epsilon from a game of canaries, and whether the declared guarantee is refuted.

The auditor takes thresholds that were fixed before any score was seen, and counts how many canaries score
above each: of those that were in, and of those that were out. A guarantee limits how far the two rates are
apart (see accounting/trade_off.py). The declared steps are tested with more and less noise: the most noise
that the rates leave possible, and its epsilon, are the result.

Canaries were drawn, and got their noise, independently of one another, as steps that do what they declare
ensure, with any amount of noise. Noise that is rounded to its grid counts as continuous.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

import numpy as np

from psgrad.engine.privacy.accounting import Events, merged
from psgrad.engine.privacy.accounting.composition import delta_curve
from psgrad.engine.privacy.accounting.trade_off import Profile, epsilon_at, true_positive_rate
from psgrad.engine.privacy.audit.game import Array, Played

# The noise is searched in steps of a twelfth of an octave, from 8 octaves above the declared noise down to
# where neighbours are 25 standard deviations apart, which leaves no guarantee.
_TO_THE_OCTAVE, _OCTAVES, _NO_PROMISE = 12, 8, 25.0
# The shares of the canaries that are out and whose scores a threshold leaves above it, if the noise is as
# declared.
_TAILS = (0.4, 0.1, 0.02, 0.003)
# The number of privacy losses that a distribution is kept with, about, and the finest step between them; and
# the epsilons at which a guarantee is evaluated. Each is a valid claim: coarser ones only weaken the result.
_LOSSES, _FINEST = 4_000, 1e-4
_POINTS, _SMALLEST, _LARGEST = 400, 1e-3, 600.0
# A threshold above which fewer canaries than this are expected is not used.
_FEWEST_ABOVE = 2.0


@dataclass(frozen=True)
class AuditVerdict:
    """The result of a game.

    Attributes:
        epsilon: a lower bound on epsilon at `delta`, wrong with a probability of at most 1 - `confidence`; 0
            where nothing is refuted.
        noise: the largest possible noise, as a share of the declared noise; infinite where nothing is
            refuted, and None without declared noise. Above 1: the declared noise is possible.
        evidence: the rates behind it, in words.
    """

    epsilon: float
    delta: float
    confidence: float
    noise: float | None
    evidence: str

    @property
    def declared(self) -> bool:
        """Whether the declared guarantee is possible."""
        return self.noise is None or self.noise > 1


def judge(played: Played, events: Events, delta: float, confidence: float) -> AuditVerdict:
    """Compare a game with the declared steps."""
    if any(event.noise_multiplier == 0 for event in merged(events)):
        return AuditVerdict(0.0, delta, confidence, None, "no noise is declared, and nothing can be refuted")
    thresholds = np.quantile(played.simulated, [1 - tail for tail in tails(len(played.scores))])
    found = [rates(played.scores, played.inside, threshold) for threshold in thresholds]
    level = (1 - confidence) / len(found)
    least = math.ceil(_TO_THE_OCTAVE * math.log2(distance(events) / _NO_PROMISE))
    most = _TO_THE_OCTAVE * _OCTAVES

    @functools.cache
    def profile(step: int) -> Profile:
        return coarse_profile(scaled(events, share_of(step)))

    def refuting(step: int) -> Rates | None:
        return next((each for each in found if each.is_refuted_by(profile(step), level)), None)

    evidence = refuting(most)
    if evidence is None:
        return AuditVerdict(0.0, delta, confidence, math.inf, found[0].in_words())
    # If one amount of noise is refuted, more of it is, too, as it promises more.
    stands, refuted = max(min(least, 0), -most) - 1, most
    while refuted - stands > 1:
        # The declared noise first.
        middle = 0 if stands < 0 < refuted else (stands + refuted) // 2
        against = refuting(middle)
        stands, refuted, evidence = (
            (middle, refuted, evidence) if against is None else (stands, middle, against)
        )
    epsilon = epsilon_at(profile(refuted), delta)
    return AuditVerdict(
        math.inf if epsilon is None else epsilon, delta, confidence, share_of(refuted), evidence.in_words()
    )


def share_of(step: int) -> float:
    """How much noise a step of the search stands for, as a share of the declared noise."""
    return float(2.0 ** (step / _TO_THE_OCTAVE))


def coarse_profile(events: Events) -> Profile:
    """What the steps guarantee, as accounting/trade_off.py has it; some noise in each of them."""
    mu = distance(events)
    # Amplification only lowers losses: those of the plain Gaussian release span the range.
    largest = min(mu * mu / 2 + 8 * mu, _LARGEST)
    epsilons = np.concatenate([[0.0], np.geomspace(min(_SMALLEST, largest / 2), largest, _POINTS)])
    deltas = delta_curve(events, epsilons, max(_FINEST, (mu * mu + 16 * mu) / _LOSSES))
    return [] if deltas is None else list(zip(epsilons.tolist(), deltas.tolist(), strict=True))


def scaled(events: Events, share: float) -> Events:
    """The steps with `share` times their noise."""
    return [
        (replace(event, noise_multiplier=event.noise_multiplier * share), steps) for event, steps in events
    ]


def distance(events: Events) -> float:
    """How many standard deviations of the noise a record makes, over all steps, if it is drawn in each of
    them.
    """
    return math.sqrt(math.fsum(steps / event.noise_multiplier**2 for event, steps in merged(events).items()))


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

        The rates are compared with Clopper and Pearson's bounds, each at half the level.
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
        return true_positive_rate(profile, at_most) < at_least

    def in_words(self) -> str:
        """The rates as a part of a sentence."""
        return (
            f"a threshold that {self.hits} of {self.inside} canaries pass that are in, and {self.alarms} of"
            f" {self.outside} that are out"
        )


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
