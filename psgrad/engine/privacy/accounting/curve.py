"""Epsilon after each of many steps, for a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from psgrad.engine.privacy.accounting.composed import coarse_epsilon_pld, why_not_pld
from psgrad.engine.privacy.accounting.epsilon import Epsilon, assert_delta
from psgrad.engine.privacy.accounting.events import Events, StepEvent, merged
from psgrad.engine.privacy.accounting.moments import ORDERS, epsilon_of, step_moments, why_not_rdp
from psgrad.errors import ConfigError


def epsilon_curve(events: Events, delta: float, points: int | Sequence[int] = 50) -> list[tuple[int, float]]:
    """(steps, epsilon after so many of them), by moments, or where these don't cover the steps by loss distributions on a coarse grid.

    events: in the order in which they are taken. points: after how many steps, or how many evenly spaced numbers of steps, the last one
    among them; numbers beyond the last step are left out.

    Raises ConfigError as `epsilon_rdp` does, and where neither accountant covers the steps.
    """
    assert_delta(delta)
    if isinstance(points, int) and points < 1:
        raise ConfigError(f"{points} points of a curve were asked for", expected="at least 1")
    runs = [(event, steps) for event, steps in events if merged([(event, steps)])]
    kinds = merged(runs)
    total = sum(kinds.values())
    chosen = np.linspace(1, total, min(points, total)).round() if isinstance(points, int) else points
    places = sorted({int(place) for place in chosen if 1 <= place <= total})
    if curve_accountant(events) == "RDP":
        return _by_moments(runs, delta, places)
    curve = []
    for place in _thinned(places, points):
        epsilon = coarse_epsilon_pld(_first(runs, place), delta)
        curve.append((place, _known(epsilon)))
    return curve


# Each point by loss distributions takes a hundredth of a second for equal steps, and up to some seconds for many unlike ones.
_FEW_POINTS = 8
_ALIKE = 3


def pld_curve(events: Events, delta: float) -> list[tuple[int, float]]:
    """(steps, epsilon after so many of them) by loss distributions on a coarse grid, at a few places: the first step, the last one, and
    some between, densest at first, where epsilon grows the least like the square root of the steps.

    Empty where loss distributions don't cover the steps, or where the steps are of more than _ALIKE kinds, as each point takes long then.
    """
    runs = [(event, steps) for event, steps in events if merged([(event, steps)])]
    kinds = merged(runs)
    if not kinds or len(kinds) > _ALIKE or any(why_not_pld(event) for event in kinds):
        return []
    total = sum(kinds.values())
    squares = [total * (place / _FEW_POINTS) ** 2 for place in range(1, _FEW_POINTS + 1)]
    places = sorted({max(1, round(place)) for place in [*(squares[0] ** (part / 3) for part in range(3)), *squares]})
    found = [(place, coarse_epsilon_pld(_first(runs, place), delta).value) for place in places]
    return [(place, epsilon) for place, epsilon in found if epsilon is not None]


def _thinned(places: list[int], points: int | Sequence[int]) -> list[int]:
    """Fewer places, where it was left open which: the first, the last and some between."""
    if not isinstance(points, int) or len(places) <= _FEW_POINTS:
        return places
    return [places[round(at)] for at in np.linspace(0, len(places) - 1, _FEW_POINTS)]


def curve_accountant(events: Events) -> Literal["RDP", "PLD"]:
    """Which accountant `epsilon_curve` asks about these steps."""
    return "PLD" if any(why_not_rdp(event) for event in merged(events)) else "RDP"


def _by_moments(runs: Sequence[tuple[StepEvent, int]], delta: float, places: Sequence[int]) -> list[tuple[int, float]]:
    curve, spent, taken, ahead = [], np.zeros(len(ORDERS)), 0, iter(runs)
    event, left = next(ahead, (None, 0))
    for place in places:
        while taken < place:
            if not left:
                event, left = next(ahead)
            assert event is not None
            now = min(left, place - taken)
            spent, taken, left = spent + now * step_moments(event), taken + now, left - now
        curve.append((place, _known(epsilon_of(spent, delta))))
    return curve


def _first(runs: Sequence[tuple[StepEvent, int]], steps: int) -> list[tuple[StepEvent, int]]:
    """The first so many steps."""
    some = []
    for event, number in runs:
        some.append((event, min(number, steps)))
        steps -= some[-1][1]
    return some


def _known(epsilon: Epsilon) -> float:
    if epsilon.value is None:
        raise ConfigError(f"there is no epsilon for these steps: {epsilon.why_not}")
    return epsilon.value
