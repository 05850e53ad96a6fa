"""The noise multiplier that a target epsilon needs."""

from __future__ import annotations

import math
from collections.abc import Callable

from psgrad.engine.privacy.accounting.composition import epsilon_pld, plainly_sampled
from psgrad.engine.privacy.accounting.epsilon import Epsilon, assert_delta, epsilon_rdp, why_not_rdp
from psgrad.engine.privacy.accounting.events import Events, merged
from psgrad.errors import ConfigError

# Noise multipliers that are tried: beyond these, a target can't be met, or is met by next to no noise.
_LEAST, _MOST = 1e-3, 1e6
# How far below the target epsilon may stay, relative to it; for a start, and in the end.
_ROUGH, _CLOSE = 5e-2, 5e-4
# A multiplier has this number of digits, so that the printed number is the solution itself.
_DIGITS = 6

Accountant = Callable[[Events, float], Epsilon]


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

    def plain(multiplier: float) -> Events:
        return [(plainly_sampled(event), steps) for event, steps in events_for(multiplier)]

    def epsilon(accountant: Accountant, events: Events) -> float:
        value = accountant(events, delta).value
        return math.inf if value is None else value

    try:  # some percent too large, for next to nothing
        start = _solved(lambda z: epsilon(epsilon_rdp, plain(z)), target_epsilon, delta, 1.0, 4.0, _ROUGH)
    except ConfigError:  # a target that is out of reach is so for the accountant that counts
        start = 1.0
    losses = epsilon_pld(events_for(start), delta)
    if losses.value is None and any(why_not_rdp(event) for event in kinds):
        raise ConfigError(f"there is no epsilon for these steps: {losses.why_not}")
    counted: Accountant = epsilon_rdp if losses.value is None else epsilon_pld
    return _solved(lambda z: epsilon(counted, events_for(z)), target_epsilon, delta, start, 1.15, _CLOSE)


def _solved(
    epsilon_at: Callable[[float], float],
    target: float,
    delta: float,
    start: float,
    widen: float,
    close: float,
) -> float:
    """The multiplier at which epsilon is between (1 - close) * target and target: by lines of log epsilon
    over log multiplier between two multipliers, one with too little noise and one with enough.

    widen: the factor by which the first two are apart; squared until they are on both sides.
    """
    aim = target * (1 - close / 2)
    low: tuple[float, float] | None = None  # (multiplier, epsilon) with too little noise
    high: tuple[float, float] | None = None  # with enough
    multiplier = start
    for attempt in range(200):
        multiplier = float(f"{multiplier:.{_DIGITS}g}")
        epsilon = epsilon_at(multiplier)
        if target * (1 - close) <= epsilon <= target:
            return multiplier
        if epsilon <= target:
            high = multiplier, epsilon
        else:
            low = multiplier, epsilon
        if low is None:
            multiplier, widen = multiplier / widen, widen**2
            if multiplier < _LEAST:
                raise ConfigError(
                    f"an epsilon of {target:g} at delta {delta:g} is met without noise to speak of (a noise"
                    f" multiplier of {_LEAST:g})",
                    hint="choose a delta below one over the number of records, or a smaller target",
                )
        elif high is None:
            multiplier, widen = multiplier * widen, widen**2
            if multiplier > _MOST:
                raise ConfigError(
                    f"an epsilon of {target:g} at delta {delta:g} needs a noise multiplier above {_MOST:g}",
                    hint="take fewer steps, draw fewer records a step, or allow a larger epsilon",
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
