"""Lower bounds on epsilon from a game of canaries, by three methods, and whether the declared guarantee is
refuted.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from psgrad.engine.privacy.accounting import Events, merged
from psgrad.engine.privacy.audit.game import Played
from psgrad.engine.privacy.audit.one_run import (
    Guesses,
    Profile,
    Rates,
    distance,
    epsilon_for_any_mechanism,
    guess,
    is_refuted,
    profile_of,
    rates,
    scaled,
    strategies,
    tails,
)

# The methods; _SHARES divides the probability of error among them. The last one is the strongest for sound
# mechanisms, and has the largest share.
METHODS = {
    "guesses": "any mechanism (Steinke et al. 2023, theorem 5.2)",
    "profile": "this mechanism with less noise (Mahloujifar et al. 2024)",
    "rates": "this mechanism with less noise, canaries independent (Clopper and Pearson)",
}
_SHARES = {"guesses": 0.1, "profile": 0.1, "rates": 0.8}
# The noise is searched in steps of a twelfth of an octave, from 8 octaves above the declared noise down to
# where neighbours are 25 standard deviations apart, which leaves no guarantee.
_TO_THE_OCTAVE, _OCTAVES, _NO_PROMISE = 12, 8, 25.0


@dataclass(frozen=True)
class Bound:
    """The result of one method.

    Attributes:
        method: a key of METHODS.
        epsilon: the largest epsilon that is refuted, at the audit's delta; 0 if none is.
        noise: the largest possible noise, as a share of the declared noise; None for a method without a
            mechanism. 1 or more: the declared noise is possible.
        evidence: the guesses or rates behind it, in words.
    """

    method: str
    epsilon: float
    noise: float | None
    evidence: str


@dataclass(frozen=True)
class AuditVerdict:
    """The result of a game, by all methods together.

    Attributes:
        epsilon: a lower bound on epsilon at `delta`, wrong with a probability of at most 1 - `confidence`:
            the best of the methods'.
        declared: whether the declared guarantee is possible. `epsilon` is then below the accounted one.
        guesses: of the best strategy against any mechanism: how many guesses, and how many right.
    """

    epsilon: float
    delta: float
    confidence: float
    declared: bool
    bounds: tuple[Bound, ...]
    guesses: Guesses


def judge(
    played: Played, events: Events, delta: float, confidence: float, accounted: float | None
) -> AuditVerdict:
    """Compare a game with the declared steps; `accounted` is their epsilon at this delta, None if there is
    none.
    """
    level = {method: (1 - confidence) * share for method, share in _SHARES.items()}
    guesses = [guess(played.scores, played.inside, strategy) for strategy in strategies(len(played.scores))]
    any_epsilon, best = epsilon_for_any_mechanism(guesses, delta, level["guesses"])
    shown = (
        best if best is not None else max(guesses, key=lambda candidate: candidate.right / candidate.guesses)
    )
    bounds = [Bound("guesses", any_epsilon, None, _in_words(shown))]
    noisy = all(event.noise_multiplier > 0 for event in merged(events))
    if noisy:
        thresholds = np.quantile(played.simulated, [1 - tail for tail in tails(len(played.scores))])
        found_rates = [rates(played.scores, played.inside, threshold) for threshold in thresholds]
        family = _Family(events, delta)
        bounds.append(
            _less_noise(
                "profile", [_of_guesses(each, level["profile"] / len(guesses)) for each in guesses], family
            )
        )
        bounds.append(
            _less_noise(
                "rates", [_of_rates(each, level["rates"] / len(found_rates)) for each in found_rates], family
            )
        )
    less = any(bound.noise is not None and bound.noise < 1 for bound in bounds)
    more = noisy and accounted is not None and any_epsilon > accounted
    return AuditVerdict(
        max(bound.epsilon for bound in bounds), delta, confidence, not (less or more), tuple(bounds), shown
    )


@dataclass(frozen=True)
class _Test:
    """Whether some evidence refutes a guarantee, and the evidence in words."""

    evidence: str
    refutes: Callable[[Profile], bool]


def _of_guesses(guesses: Guesses, level: float) -> _Test:
    return _Test(_in_words(guesses), lambda profile: is_refuted(profile, guesses, level))


def _of_rates(rates: Rates, level: float) -> _Test:
    evidence = (
        f"a threshold that {rates.hits} of {rates.inside} pass that are in, {rates.alarms} of {rates.outside}"
        " that are out"
    )
    return _Test(evidence, lambda profile: rates.is_refuted_by(profile, level))


def _in_words(guesses: Guesses) -> str:
    return f"{guesses.right} of {guesses.guesses} guesses right"


class _Family:
    """The declared steps with more or less noise: 2^(step / 12) times as much."""

    def __init__(self, events: Events, delta: float) -> None:
        self.events, self.delta = events, delta
        self.profile = functools.cache(self._profile)
        least = math.ceil(_TO_THE_OCTAVE * math.log2(distance(events) / _NO_PROMISE))
        self.least, self.most = max(min(least, 0), -_TO_THE_OCTAVE * _OCTAVES), _TO_THE_OCTAVE * _OCTAVES

    def share(self, step: int) -> float:
        return float(2.0 ** (step / _TO_THE_OCTAVE))

    def _profile(self, step: int) -> Profile:
        return profile_of(scaled(self.events, self.share(step)))


def _less_noise(method: str, tests: list[_Test], family: _Family) -> Bound:
    """The largest possible noise: the least share of the declared noise that some test refutes, and its
    epsilon.

    If one amount of noise is refuted, more of it is, too, as it promises more.
    """

    def refuting(step: int) -> _Test | None:
        return next((test for test in tests if test.refutes(family.profile(step))), None)

    refuting_noise = refuting(family.most)
    if refuting_noise is None:
        return Bound(method, 0.0, math.inf, tests[0].evidence)
    stands, refuted = family.least - 1, family.most
    while refuted - stands > 1:
        # The declared noise first, as all methods test it.
        middle = 0 if stands < 0 < refuted else (stands + refuted) // 2
        test = refuting(middle)
        stands, refuted, refuting_noise = (
            (stands, middle, test) if test is not None else (middle, refuted, refuting_noise)
        )
    return Bound(
        method,
        smallest_epsilon(family.profile(refuted), family.delta),
        family.share(refuted),
        refuting_noise.evidence,
    )


def smallest_epsilon(profile: Profile, delta: float) -> float:
    """The least epsilon, of those that the profile has, at which it keeps to delta; infinite where
    none does.
    """
    small = np.flatnonzero(profile.deltas <= delta)
    return float(profile.epsilons[small[0]]) if len(small) else math.inf
