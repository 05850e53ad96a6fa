"""Ticks of axes: round places, as many as have room, in plain numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import Formatter, Locator, LogLocator, MaxNLocator, NullFormatter

_MOST = 8  # ticks of a log axis
_LINEAR = 5  # ticks within a part of a decade, where ticks at 1, 2 and 5 are too few
_INCHES = 0.55  # of an x axis: what a tick's words take, with a gap
_STEPS = (1, 2, 2.5, 5, 10)


class TickWords(Formatter):
    """Numbers as `power_words` has them, with as many digits as tell all ticks of the axis apart: formulas
    take ten times as long to draw, and what matplotlib would set off in a corner (1e-5+9.999e-1) is in each
    number.
    """

    def __call__(self, x: float, pos: int | None = None) -> str:
        return power_words(x)

    def format_ticks(self, values: Sequence[float]) -> list[str]:
        digits = _digits(np.asarray(values, dtype=np.float64))
        return [power_words(value, digits) for value in values]


def _digits(values: np.ndarray) -> int:
    """How many significant digits it takes to write each value to a hundredth of their smallest distance."""
    apart = float(np.diff(np.unique(values)).min()) if len(np.unique(values)) > 1 else 0.0
    for digits in range(1, 12):
        missed = [abs(float(f"{value:.{digits - 1}e}") - value) for value in values]
        if max(missed, default=0.0) <= max(apart / 100, 1e-11 * float(np.abs(values).max(initial=0.0))):
            return digits
    return 12


def power_words(value: float, digits: int = 4) -> str:
    """0.01, 2, 1,000, and 10⁻⁶ or 2×10⁷ where zeros would have to be counted."""
    value = float(f"{value:.{digits - 1}e}")
    if value == 0:
        return "0"
    if 1e-4 <= abs(value) < 1e5:
        decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
        text = f"{value:,.{decimals}f}"
        return text.rstrip("0").rstrip(".") if "." in text else text
    mantissa, _, exponent = f"{value:.{digits - 1}e}".partition("e")
    factor = f"{float(mantissa):.{digits}g}"
    raised = f"10{str(int(exponent)).translate(_RAISED)}"
    return raised if factor == "1" else f"-{raised}" if factor == "-1" else f"{factor}×{raised}"


_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


class LogTicks(Locator):
    """Powers of ten where the axis has three, else their multiples by 1, 2 and 5, else even steps. whole:
    whole numbers alone.
    """

    def __init__(self, whole: bool = False) -> None:
        self.whole = whole

    def __call__(self) -> list[float]:
        low, high = self.axis.get_view_interval()  # type: ignore[union-attr]
        return self.tick_values(low, high)

    def tick_values(self, vmin: float, vmax: float) -> list[float]:
        low, high = sorted((vmin, vmax))
        if not (low > 0 and math.isfinite(high)):
            return []
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        decades = _inside([10.0**power for power in powers], low, high)
        if len(decades) > 2:
            return self._wanted(decades[:: -(-len(decades) // _MOST)])
        multiples = _inside([base * 10.0**power for power in powers for base in (1, 2, 5)], low, high)
        if len(multiples) > 2:
            return self._wanted(multiples)
        return self._wanted(
            _inside(list(MaxNLocator(_LINEAR, steps=_STEPS).tick_values(low, high)), low, high)
        )

    def _wanted(self, places: list[float]) -> list[float]:
        return [place for place in places if place == round(place)] if self.whole else places


def _inside(places: Sequence[float], low: float, high: float) -> list[float]:
    return [place for place in places if low * (1 - 1e-9) <= place <= high * (1 + 1e-9)]


def log_axis(axes: Axes, *which: Literal["x", "y"], whole: bool = False) -> None:
    """Logarithmic scales with plain ticks. whole: of what is counted."""
    for name in which:
        axis = axes.xaxis if name == "x" else axes.yaxis
        (axes.set_xscale if name == "x" else axes.set_yscale)("log")
        axis.set_major_locator(LogTicks(whole))
        axis.set_minor_locator(LogLocator(subs=(2, 5)))
        axis.set_major_formatter(TickWords())
        axis.set_minor_formatter(NullFormatter())


def count_axis(axes: Axes, which: Literal["x", "y"] = "y") -> None:
    """Ticks at whole numbers alone, for what is counted."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def plain_ticks(figure: Figure) -> None:
    """Put plain numbers on all linear axes that have no ticks of their own, and no more of them along x than
    have room.
    """
    for axes in figure.axes:
        wide = axes.get_position().width * figure.get_size_inches()[0]
        for axis in (axes.xaxis, axes.yaxis):
            if axis.get_scale() != "linear":
                continue
            if axis.isDefault_majloc and axis is axes.xaxis:
                axis.set_major_locator(
                    MaxNLocator(max(2, min(9, int(wide / _INCHES))), steps=_STEPS, min_n_ticks=3)
                )
            if axis.isDefault_majfmt:
                axis.set_major_formatter(TickWords())
