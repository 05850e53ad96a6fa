"""The figure of a private run: epsilon against steps, which is public."""

from __future__ import annotations

import math
from typing import Any, TypeGuard

from psgrad.reports.figures import (
    DARK,
    INK,
    QUIET,
    REST,
    REVIEW,
    Plot,
    figure_with_axes,
    legend_above,
    say_empty,
    styled,
)
from psgrad.reports.privacy import compact, epsilon, sampling_words
from psgrad.reports.words import count
from psgrad.run.results.privacy import DPStepResult

FAINT = "#b9c3ce"  # the looser bound
_ABOVE_LEGEND = 44  # points between axes and title, for up to three lines of a legend


@styled
def epsilon_against_steps(result: DPStepResult) -> Plot:
    """What all planned steps cost by RDP, how far the run has come, and its epsilon by each accountant."""
    step = result.step
    figure, axes = figure_with_axes(3.6)
    curve = [point for point in result.curve if math.isfinite(point[1])]
    if curve:
        if step["steps"] < step["planned_steps"]:
            dashes = (0, (4, 2))
            axes.plot(*zip(*curve, strict=True), color=REST, linewidth=1.8, ls=dashes, label="planned (RDP)")
        now = step.get("epsilon_rdp")
        taken = [point for point in curve if point[0] < step["steps"]]
        taken += [(step["steps"], now)] if _is_number(now) else []
        if len(taken) > 1:
            label = "taken (RDP)"
            axes.plot(*zip(*taken, strict=True), color=DARK, linewidth=2.6, label=label, zorder=3)
    marks = (("epsilon_pld", "D", "PLD", REVIEW, 7), ("epsilon_rdp", "o", "RDP", FAINT, 5))
    for key, marker, by, colour, size in marks:
        if _is_number(step.get(key)):
            words = f"after {count(step['steps'], 'step')}: {epsilon(step[key])} ({by})"
            place = [step["steps"]], [step[key]]
            axes.plot(*place, marker, label=words, zorder=4, color=colour, markersize=size)
    if not axes.lines:
        say_empty(axes, "no finite epsilon to draw")
    else:
        if (target := step.get("target_epsilon")) is not None:
            words = f"target {compact(target)}"
            axes.axhline(target, color=QUIET, linewidth=1, linestyle=(0, (1, 2)), label=words)
        axes.set(xlabel="steps", ylabel=f"epsilon at delta {compact(step['delta'])} (upper bound)")
        axes.set_ylim(bottom=0)
        legend_above(axes, columns=3)
    relation = step["relation"].replace("_", " ")
    setting = f"delta {compact(step['delta'])}, {relation} ({step['unit']}), {sampling_words(step)}"
    axes.set_title(setting, color=INK, pad=_ABOVE_LEGEND)
    caption = "Epsilon after so many steps, an upper bound. "
    return Plot("epsilon", "Epsilon against steps", caption, figure)


def _is_number(value: Any) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)
