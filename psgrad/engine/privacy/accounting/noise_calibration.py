"""The noise multiplier that a target epsilon needs."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress

from psgrad.engine.privacy.accounting.composition import epsilon_pld, plainly_sampled
from psgrad.engine.privacy.accounting.epsilon import Epsilon, assert_delta, epsilon_rdp, why_not_rdp
from psgrad.engine.privacy.accounting.events import Events, merged
from psgrad.errors import ConfigError

# Noise multipliers that are tried: beyond these, a target can't be met, or is met by next to no noise.
_LEAST, _MOST = 1e-3, 1e6
# How far below the target epsilon may stay, relative to it; for a start, and in the end.
_ROUGH, _CLOSE = 5e-2, 5e-4
# How much smaller a multiplier's logarithm is where that of epsilon is larger by one, in most runs.
_SLOPE = 0.7
# A multiplier has this number of digits, so that the printed number is the solution itself.
_DIGITS = 6


def noise_multiplier_for(target_epsilon: float, delta: float, events_for: Callable[[float], Events]) -> float:
    """The noise multiplier whose steps cost at most `target_epsilon` at delta, and at least 99.95 percent of
    it.

    The epsilon that is compared with the target is that of loss distributions (PLD), which is reported in the
    end, and of RDP for plans that PLD does not cover. The search begins where RDP leads.

    events_for: the steps of a run, by the noise multiplier.

    Raises ConfigError for a target that is not a positive number, that needs more noise than a multiplier of
    1e6, or that is met with almost none, and as `epsilon_pld` does.
    """
    assert_delta(delta)
    if not 0 < target_epsilon < math.inf:
        raise ConfigError(f"the target epsilon is {target_epsilon!r}; expected a positive number")
    kinds = list(merged(events_for(1.0)))
    if not kinds:
        raise ConfigError(
            "a target epsilon was given for no steps at all; expected at least one step",
            hint="privacy.steps is 0",
        )
    start = _start(target_epsilon, delta, events_for)
    losses = epsilon_pld(events_for(start[0]), delta)
    if losses.value is None:
        if any(why_not_rdp(event) for event in kinds):
            raise ConfigError(f"there is no epsilon for these steps: {losses.why_not}")
        return _solved(epsilon_rdp, events_for, target_epsilon, delta, start, _CLOSE)[0]
    return _solved(epsilon_pld, events_for, target_epsilon, delta, start, _CLOSE)[0]


def _start(target: float, delta: float, events_for: Callable[[float], Events]) -> tuple[float, float]:
    """A multiplier by moments, some percent too large, and the slope there: they cost next to nothing."""

    def plain(multiplier: float) -> Events:
        return [(plainly_sampled(event), steps) for event, steps in events_for(multiplier)]

    with suppress(ConfigError):  # a target that is out of reach is so for the accountant that counts
        return _solved(epsilon_rdp, plain, target, delta, (1.0, _SLOPE), _ROUGH)
    return 1.0, _SLOPE


def _solved(
    accountant: Callable[[Events, float], Epsilon],
    events_for: Callable[[float], Events],
    target: float,
    delta: float,
    start: tuple[float, float],
    close: float,
) -> tuple[float, float]:
    """(the multiplier at which this accountant gives between (1 - close) * target and target, the slope
    there), by secants of log epsilon over log multiplier.

    start: a multiplier, and a slope: the logarithm of a multiplier falls by it where that of epsilon grows by
    one.
    """
    aim = target * (1 - close / 2)
    low: tuple[float, float] | None = None  # (multiplier, epsilon) with too little noise
    high: tuple[float, float] | None = None  # with enough
    before: tuple[float, float] | None = None  # the last one
    multiplier, slope = start
    for attempt in range(200):
        multiplier = float(f"{multiplier:.{_DIGITS}g}")
        value = accountant(events_for(multiplier), delta).value
        epsilon = math.inf if value is None else value
        slope = _slope(before, (multiplier, epsilon), slope)
        before = multiplier, epsilon
        if epsilon <= target:
            if epsilon >= target * (1 - close):
                return multiplier, slope
            high = (multiplier, epsilon)
        else:
            low = (multiplier, epsilon)
        if low is None:
            multiplier *= max((epsilon / aim) ** slope, 0.25)
            if multiplier < _LEAST:
                raise ConfigError(
                    f"an epsilon of {target:g} at delta {delta:g} is met without noise to speak of (a noise"
                    f" multiplier of {_LEAST:g})",
                    hint="choose a delta below one over the number of records, or a smaller target",
                )
        elif high is None:
            multiplier *= min((epsilon / aim) ** slope, 4.0)
            if multiplier > _MOST:
                raise ConfigError(
                    f"an epsilon of {target:g} at delta {delta:g} needs a noise multiplier above {_MOST:g}",
                    hint="take fewer steps, draw fewer records a step, or allow a larger epsilon",
                )
        elif high[0] <= low[0] * (1 + 10.0 ** (2 - _DIGITS)):
            return high[0], slope
        else:
            multiplier = _between(low, high, aim, bisect=attempt % 4 == 3)
    raise AssertionError("a bracket that is halved every fourth time closes")  # pragma: no cover


def _slope(before: tuple[float, float] | None, now: tuple[float, float], usual: float) -> float:
    """The slope through two points (multiplier, epsilon); the usual one where they give none."""
    if before is None or not 0 < min(before[1], now[1]) <= max(before[1], now[1]) < math.inf:
        return usual
    fallen = math.log(before[1] / now[1])
    found = math.log(now[0] / before[0]) / fallen if fallen else 0.0
    return found if 0.1 < found < 3 else usual


def _between(low: tuple[float, float], high: tuple[float, float], aim: float, bisect: bool) -> float:
    """Where the line through both points, of logarithms, meets the aim; in the middle if there is no such
    line, or with `bisect`.
    """
    share = 0.5
    if not bisect and high[1] > 0 and math.isfinite(low[1]):
        share = min(max(math.log(low[1] / aim) / math.log(low[1] / high[1]), 0.01), 0.99)
    return math.exp((1 - share) * math.log(low[0]) + share * math.log(high[0]))
