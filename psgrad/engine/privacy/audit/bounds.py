"""A lower bound on epsilon from a game of canaries, and whether the declared guarantee is refuted.

The auditor takes thresholds that were fixed before any score was seen, and counts how many canaries score
above each: of those that were in, and of those that were out. A guarantee limits how far the two rates are
apart. The declared steps are tested with more and less noise: the most noise that the rates leave possible,
and its epsilon, are the result.

Canaries were drawn, and got their noise, independently of one another, as steps that do what they declare
ensure, with any amount of noise.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import numpy as np

from psgrad.engine.privacy.accounting import Events, merged
from psgrad.engine.privacy.audit.game import Array, Played
from psgrad.engine.privacy.audit.profiles import Profile, distance, profile_of, scaled

# The noise is searched in steps of a twelfth of an octave, from 8 octaves above the declared noise down to
# where neighbours are 25 standard deviations apart, which leaves no guarantee.
_TO_THE_OCTAVE, _OCTAVES, _NO_PROMISE = 12, 8, 25.0
# The shares of the canaries that are out and whose scores a threshold leaves above it, if the noise is as
# declared.
_TAILS = (0.4, 0.1, 0.02, 0.003)
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
        return profile_of(scaled(events, share_of(step)))

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
    epsilon = smallest_epsilon(profile(refuted), delta)
    return AuditVerdict(epsilon, delta, confidence, share_of(refuted), evidence.in_words())


def share_of(step: int) -> float:
    """How much noise a step of the search stands for, as a share of the declared noise."""
    return float(2.0 ** (step / _TO_THE_OCTAVE))


def smallest_epsilon(profile: Profile, delta: float) -> float:
    """The least epsilon, of those that the profile has, at which it keeps to delta; infinite where
    none does.
    """
    small = np.flatnonzero(profile.deltas <= delta)
    return float(profile.epsilons[small[0]]) if len(small) else math.inf


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
        return profile.least_error(at_least) > at_most

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
