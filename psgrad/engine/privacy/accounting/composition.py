"""Epsilon by privacy loss distributions (PLD), the tightest figure, and curves of epsilon over the steps.

dp-accounting computes it, so anyone's call of that library gives the same figure. Chosen here are the grid of
losses and the number of unlike steps: each unlike one costs dp-accounting a quarter of a second on its own
grid. The Fourier transforms of dp-accounting round; where that shows, the epsilon of a slightly smaller delta
is taken.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Literal

import numpy as np

from psgrad.engine.privacy.accounting.epsilon import (
    Epsilon,
    assert_delta,
    epsilon_of,
    epsilon_rdp,
    pld_deltas,
    pld_epsilon,
    total_moments,
    why_not_rdp,
)
from psgrad.engine.privacy.accounting.events import Events, StepEvent, merged, rounded_down
from psgrad.engine.privacy.sampling import Sampling
from psgrad.errors import ConfigError

# Between two losses of the grid; dp-accounting's default.
INTERVAL = 1e-4
# Up to this number of different steps are composed at this interval. More steps take a coarser one, which
# costs little where losses are wide.
_FEW = 8
# Intervals in the root-mean-square loss of a step. With 8 of them epsilon comes out about 0.1 percent too
# large, with 16 a quarter of that.
_FINE, _COARSE = 8.0, 16.0
_COARSEST = 1e-2
# Points that a distribution may have, roughly.
_POINTS = 200_000
# The standard deviations of noise that a step's losses cover, one more than dp-accounting's.
_TAILS = 11.0
# Composing more takes dp-accounting minutes.
_MOST_STEPS = 10_000_000
# How much rounding may change delta for each step that is composed: ten times what was measured on Gaussians,
# whose composition is known.
_ROUNDING = 2e-16
# Below this share of delta the rounding is ignored, so that all digits are those of dp-accounting.
_UNSEEN = 1e-7


def epsilon_pld(events: Iterable[tuple[StepEvent, int]], delta: float) -> Epsilon:
    """Epsilon of steps by privacy loss distributions: within 0.2 percent of the truth in most runs, and never
    below. Of more than 40 unlike noise multipliers each is rounded down (see `rounded_down`), and epsilon is
    some percent too large.

    Half a second for equal steps, up to ten for hundreds of unlike ones.

    Raises ConfigError for a delta that is not between 0 and 1, for steps that don't compose (see `merged`),
    and where dp-accounting is not installed.
    """
    assert_delta(delta)
    counts = merged(events)
    if not counts:
        return Epsilon(0.0)
    if any(event.noise_multiplier == 0 for event in counts):
        return Epsilon(math.inf)
    steps = sum(counts.values())
    if steps > _MOST_STEPS:
        return Epsilon(
            None,
            f"{steps:,} steps are more than the {_MOST_STEPS:,} that loss distributions are composed for",
        )
    rounding = _ROUNDING * steps
    if delta < 10 * rounding:
        return Epsilon(
            None,
            f"delta is {delta:g}, and loss distributions of {steps} steps are exact to {10 * rounding:.0e}"
            " only",
        )
    counts, interval, note = _composable(counts)
    value = _composed(
        tuple(counts.items()), delta - rounding if rounding > _UNSEEN * delta else delta, interval
    )
    return Epsilon(value, interval=interval, note=note)


def _composable(counts: Mapping[StepEvent, int]) -> tuple[dict[StepEvent, int], float, str | None]:
    """(the steps, few enough to be composed; the interval of their grid; a note of what was rounded)."""
    note, found = None, dict(counts)
    if len(counts) > _FEW:
        found, note = rounded_down(counts)
    return found, interval_for(found), note


def delta_curve(events: Events, epsilons: np.ndarray) -> np.ndarray | None:
    """[k] float64: delta of steps at epsilons [k] by loss distributions; None for more steps than they are
    composed for, for none, and where a step had no noise.
    """
    counts = merged(events)
    steps = sum(counts.values())
    if not counts or any(event.noise_multiplier == 0 for event in counts) or steps > _MOST_STEPS:
        return None
    counts, interval, _ = _composable(counts)
    return np.minimum(pld_deltas(counts, epsilons, interval) + _ROUNDING * steps, 1.0)


@functools.lru_cache(maxsize=256)
def _composed(counts: tuple[tuple[StepEvent, int], ...], delta: float, interval: float) -> float:
    """`pld_epsilon`, once for the same numbers: a plan, its figure and its statement ask for the same."""
    return pld_epsilon(dict(counts), delta, interval)


def interval_for(counts: Mapping[StepEvent, int]) -> float:
    """The grid's interval: dp-accounting's default where possible, finer if losses are small beside it,
    coarser if there would be too many points, or for more than _FEW unlike steps.
    """
    steps = sum(counts.values())
    # The root-mean-square loss of one step is about q / z.
    spread = math.sqrt(
        math.fsum(
            number * (event.sample_rate / event.noise_multiplier) ** 2 for event, number in counts.items()
        )
        / steps
    )
    interval = min(INTERVAL, spread / _FINE)
    if len(counts) > _FEW:
        interval = max(interval, min(spread / _COARSE, _COARSEST))
    # The widest losses of one step are those of the least noise, and the range of all together is about
    # epsilon, for which RDP of plain sampling is near enough.
    least = min(event.pld_multiplier for event in counts)
    width = 2 * (_TAILS * least + 1) / least**2
    plain = [(plainly_sampled(event), number) for event, number in counts.items()]
    reach = epsilon_of(total_moments(plain), 1e-9).value or 0.0
    return _tidy(max(interval, width / _POINTS, reach / _POINTS if math.isfinite(reach) else 0.0))


def plainly_sampled(event: StepEvent) -> StepEvent:
    """The step by Poisson sampling under addition or removal of a record, for which RDP is known."""
    return StepEvent(
        event.noise_multiplier, Sampling("poisson", sample_rate=event.sample_rate), "add_or_remove_one"
    )


def _tidy(interval: float) -> float:
    """The largest of 1, 2 and 5 times a power of ten that is at most the interval, as the number that is
    written so.
    """
    power = math.floor(math.log10(interval) + 1e-9)
    digit = max(digit for digit in (1, 2, 5) if digit * 10.0**power <= interval * (1 + 1e-9))
    return float(f"{digit}e{power}")


# Points of a curve by each accountant: one by loss distributions takes some tenths of a second.
_CURVE_POINTS = {"RDP": 50, "PLD": 8}


def epsilon_curve(event: StepEvent, steps: int, delta: float) -> list[tuple[int, float]]:
    """(number of steps, epsilon after them) at some places up to so many equal steps, by `curve_accountant`.

    Raises ConfigError as `epsilon_rdp` does, and if neither accountant covers the steps.
    """
    name = curve_accountant(event)
    accountant = epsilon_rdp if name == "RDP" else epsilon_pld
    return [
        (place, _known(accountant([(event, place)], delta)))
        for place in curve_points(steps, _CURVE_POINTS[name])
    ]


def curve_points(steps: int, count: int) -> list[int]:
    """After how many of `steps` steps a curve of epsilon has its points: densest at first, where it is steep,
    as it grows like a root.
    """
    return sorted(
        {max(1, round(steps * (place / count) ** 2)) for place in range(1, count + 1)} if steps else ()
    )


def curve_accountant(event: StepEvent) -> Literal["RDP", "PLD"]:
    """The accountant that `epsilon_curve` uses: moments, which are fast, where they cover the step."""
    return "PLD" if why_not_rdp(event) else "RDP"


def tightest_epsilon(events: Events, delta: float) -> Epsilon:
    """The smaller of both accountants' epsilons, which are upper bounds; `why_not` has both reasons where
    there is none.
    """
    both = [epsilon_pld(events, delta), epsilon_rdp(events, delta)]
    both = [replace(found, accountant=name) for found, name in zip(both, ("PLD", "RDP"), strict=True)]
    known = [found for found in both if found.value is not None]
    if known:
        return min(known, key=lambda found: found.value or 0.0)
    return Epsilon(None, "; ".join(str(found.why_not) for found in both))


def _known(epsilon: Epsilon) -> float:
    if epsilon.value is None:
        raise ConfigError(f"there is no epsilon for these steps: {epsilon.why_not}")
    return epsilon.value
