"""The noise multiplier that a target epsilon needs, and the noise of a step shared between its sum of
gradients and the count of an adaptive bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from psgrad.engine.privacy.accounting.composition import coarse_epsilon_pld, epsilon_pld
from psgrad.engine.privacy.accounting.epsilon import Epsilon, assert_delta, epsilon_rdp, why_not_rdp
from psgrad.engine.privacy.accounting.events import Events, merged
from psgrad.errors import ConfigError

# Noise multipliers that are tried: beyond these, a target can't be met, or is met by next to no noise.
_LEAST, _MOST = 1e-3, 1e6
# How far below the target epsilon may stay, relative to it; for a first guess, and in the end.
_GUESS, _CLOSE = 1e-3, 5e-4
# A multiplier has this number of digits, so that the printed number is the solution itself.
_DIGITS = 6


def noise_multiplier_for(target_epsilon: float, delta: float, events_for: Callable[[float], Events]) -> float:
    """The noise multiplier whose steps cost at most `target_epsilon` at delta, and at least 99.95 percent of
    it.

    The epsilon that is compared with the target is that of loss distributions (PLD), which is reported in the
    end, and of RDP for noise that PLD does not cover. A coarse grid is searched first; it takes a few
    seconds.

    events_for: the steps of a run, by the noise multiplier (of a schedule, its base).

    Raises ConfigError for a target that is not a positive number, that needs more noise than a multiplier of
    1e6, or that is met with almost none, and as `epsilon_pld` does.
    """
    assert_delta(delta)
    if not 0 < target_epsilon < math.inf:
        raise ConfigError(f"the target epsilon is {target_epsilon!r}", expected="a positive number")
    kinds = list(merged(events_for(1.0)))
    if not kinds:
        raise ConfigError(
            "a target epsilon was given for no steps at all",
            expected="at least one step",
            cause="privacy.steps is 0",
        )
    by_moments = not any(why_not_rdp(event) for event in kinds)
    losses = coarse_epsilon_pld(events_for(1.0), delta)
    by_losses = losses.value is not None
    if not by_moments and not by_losses:
        raise ConfigError(f"there is no epsilon for these steps: {losses.why_not}")
    if not by_losses:
        return _solved(epsilon_rdp, events_for, target_epsilon, delta, 1.0, _CLOSE)
    guess = _solved(coarse_epsilon_pld, events_for, target_epsilon, delta, 1.0, _GUESS)
    return _solved(epsilon_pld, events_for, target_epsilon, delta, guess, _CLOSE)


def _solved(
    accountant: Callable[[Events, float], Epsilon],
    events_for: Callable[[float], Events],
    target: float,
    delta: float,
    guess: float,
    close: float,
) -> float:
    """The multiplier at which this accountant gives between (1 - close) * target and target, by secants of
    log epsilon over log multiplier.
    """
    aim = target * (1 - close / 2)
    low: tuple[float, float] | None = None  # (multiplier, epsilon) with too little noise
    high: tuple[float, float] | None = None  # with enough
    multiplier = guess
    for attempt in range(200):
        multiplier = float(f"{multiplier:.{_DIGITS}g}")
        value = accountant(events_for(multiplier), delta).value
        epsilon = math.inf if value is None else value
        if epsilon <= target:
            if epsilon >= target * (1 - close):
                return multiplier
            high = (multiplier, epsilon)
        else:
            low = (multiplier, epsilon)
        if low is None:
            multiplier *= max((epsilon / aim) ** 0.7, 0.25)
            if multiplier < _LEAST:
                raise ConfigError(
                    f"an epsilon of {target:g} at delta {delta:g} is met without noise to speak of (a noise"
                    f" multiplier of {_LEAST:g})",
                    cause=(
                        "delta is above the probability that a record is drawn at all, or the target promises"
                        " nothing"
                    ),
                    next_step="choose a delta below one over the number of records, and a smaller target",
                )
        elif high is None:
            multiplier *= min((epsilon / aim) ** 0.7, 4.0)
            if multiplier > _MOST:
                raise ConfigError(
                    f"an epsilon of {target:g} at delta {delta:g} needs a noise multiplier above {_MOST:g}",
                    cause="too many steps, a sampling rate too large, or a target next to 0",
                    next_step="take fewer steps, draw fewer records a step, or allow a larger epsilon",
                )
        elif high[0] <= low[0] * (1 + 10.0 ** (2 - _DIGITS)):
            return high[0]
        else:
            multiplier = _between(low, high, aim, bisect=attempt % 4 == 3)
    raise AssertionError("a bracket that is halved every fourth time closes")  # pragma: no cover


def _between(low: tuple[float, float], high: tuple[float, float], aim: float, bisect: bool) -> float:
    """Where the line through both points, of logarithms, meets the aim; in the middle if there is no such
    line, or with `bisect`.
    """
    share = 0.5
    if not bisect and high[1] > 0 and math.isfinite(low[1]):
        share = min(max(math.log(low[1] / aim) / math.log(low[1] / high[1]), 0.01), 0.99)
    return math.exp((1 - share) * math.log(low[0]) + share * math.log(high[0]))


def adaptive_multiplier(multiplier: float, count_multiplier: float) -> float:
    """The noise multiplier of the sum, if a count is released beside it and both together cost as much as
    `multiplier`.

    Sum and count, each divided by its noise's standard deviation, are one Gaussian release whose sensitivity
    is the root of multiplier_of_sum^-2 + multiplier_of_count^-2; that is to be multiplier^-1 (Andrew et al.,
    "Differentially Private Learning with Adaptive Clipping", arXiv 1905.03871, theorem 1).

    Args:
        multiplier: z, which is accounted.
        count_multiplier: sigma_b. The recentred count moves by 1/2, so that its multiplier is 2 * sigma_b:
            its noise must have the standard deviation 2 * sigma_b * (how far the recentred count moves under
            the relation).

    Raises ConfigError if the count alone costs as much as both may.
    """
    if multiplier == 0:
        return 0.0
    if not 0 < multiplier < 2 * count_multiplier:
        raise ConfigError(
            f"the noise multiplier is {multiplier!r}, and the count's is {count_multiplier!r}",
            expected="a count_noise_multiplier above half of the noise multiplier",
            cause=(
                "the count's noise is part of what the noise multiplier pays for, and leaves nothing to"
                " the sum"
            ),
            next_step=f"raise count_noise_multiplier, for example to {max(10.0, 5 * abs(multiplier)):g}",
        )
    return (multiplier**-2 - (2 * count_multiplier) ** -2) ** -0.5
