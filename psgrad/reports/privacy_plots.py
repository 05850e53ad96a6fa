"""The figures of a private run: epsilon against steps, for everybody; norms, clipping and losses, which are
NOT PRIVATE.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from psgrad.reports.figures import (
    DARK,
    DASHES,
    INK,
    QUIET,
    REST,
    REVIEW,
    Array,
    Plot,
    count_axis,
    figure_with_axes,
    legend_above,
    log_bins,
    plain_log_ticks,
    say_empty,
    styled,
)
from psgrad.reports.privacy import compact, epsilon, sampling_words
from psgrad.reports.words import count, number, percent
from psgrad.run.results.privacy import DPPlanResult, DPStepResult

STEPS_AXIS = "steps"
# Dark to light for the multipliers around the configured one: an order that greys and every kind of colour
# vision keep.
SHADES = ("#12263d", "#2a4f7a", "#5b7fa6", "#8aa6c4", "#b3c5d8")

FAINT = "#b9c3ce"  # the looser bound
_PLACES = 120  # along a curve that is known at a few points
_ABOVE_LEGEND = 44  # points between axes and title, for up to three lines of a legend

_SHORT_RELATIONS = {
    "add_or_remove_one": "add or remove one",
    "replace_one": "replace one",
    "zero_out": "zero out one",
}


def public_plots(result: DPStepResult) -> list[Plot]:
    """The figures that the guarantee covers: nothing in them follows from the data."""
    return [epsilon_against_steps(result)]


def private_plots(result: DPStepResult, unit: str = "") -> list[Plot]:
    """The figures that say something of single records, each with NOT PRIVATE in the picture itself. unit: of
    a loss, where it is known.
    """
    # Without norms no step was taken now: the figure of the process that took one stays.
    norms = [norms_before_clipping(result)] if len(result.norms) else []
    return [*norms, clipping_by_step(result), losses_by_step(result, unit)]


def write_plots(
    result: DPStepResult,
    public: Callable[[str, bytes], None],
    private: Callable[[str, bytes], None],
    unit: str = "",
) -> None:
    """Draw all figures of a run; `public(name, data)` and `private(name, data)` put each, as <name>.png,
    where it belongs. unit: of a loss, where it is known.
    """
    for plot in public_plots(result):
        public(f"{plot.name}.png", plot.png())
    for plot in private_plots(result, unit):
        private(f"{plot.name}.png", plot.png())


# -- public --------------------------------------------------------------------------------------------------


@styled
def epsilon_against_steps(result: DPStepResult) -> Plot:
    """What all planned steps cost, and how far the run has come: strong by the accountant that counts, faint
    by the looser one.
    """
    step = result.step
    figure, axes = figure_with_axes(3.6)
    curve, name = _line(result.curve, result.curve_accountant), result.curve_accountant
    caption = f"Epsilon after so many steps by {name}, an upper bound. "
    if not len(curve[0]):
        say_empty(axes, "no finite epsilon to draw")
    else:
        if step["steps"] < step["planned_steps"]:
            dashes = (0, (4, 2))
            axes.plot(*curve, color=REST, linewidth=1.8, linestyle=dashes, label=f"planned ({name})")
        now = step.get(f"epsilon_{name.lower()}")
        before = [point for point in zip(*curve, strict=True) if point[0] < step["steps"]]
        taken = before if not _is_number(now) else [*before, (step["steps"], now)]
        if len(taken) > 1:
            axes.plot(*_curve(taken), color=DARK, linewidth=2.6, label=f"taken ({name})", zorder=3)
        for key, marker, by in (("epsilon_pld", "D", "PLD"), ("epsilon_rdp", "o", "RDP")):
            if _is_number(step.get(key)):
                words = f"after {count(step['steps'], 'step')}: {epsilon(step[key])} ({by})"
                colour, size = (REVIEW, 7) if by == "PLD" else (FAINT, 5)
                place = [step["steps"]], [step[key]]
                axes.plot(*place, marker, label=words, zorder=4, color=colour, markersize=size)
        _target(axes, step.get("target_epsilon"))
        axes.set(xlabel=STEPS_AXIS, ylabel=f"{_epsilon_axis(step)})")
        axes.set_ylim(bottom=0)
        legend_above(axes, columns=3)
    axes.set_title(_setting_words(step), color=INK, pad=_ABOVE_LEGEND)
    return Plot("epsilon", "Epsilon against steps", caption, figure)


@styled
def epsilon_by_multiplier(result: DPPlanResult) -> Plot:
    """What the planned steps would cost with several noise multipliers; the configured one in orange."""
    setting = result.setting
    figure, axes = figure_with_axes(4.2)
    others = iter(SHADES * (1 + len(result.rows) // len(SHADES)))
    ends: list[tuple[float, Line2D]] = []  # (the smaller bound on the epsilon of all steps, its line)
    for row in result.rows:
        steps, spent = _line(row.curve, result.curve_accountant)
        colour = REVIEW if row.configured else next(others)
        if len(steps):
            width = 2.6 if row.configured else 1.8
            (line,) = axes.plot(steps, spent, color=colour, linewidth=width, zorder=3)
            end = min(filter(_is_number, (row.epsilon_pld, row.epsilon_rdp, row.curve[-1][1])))
            line.set_label(f"multiplier {number(row.noise_multiplier)}: {epsilon(end)}")
            ends.append((end, line))
            if _is_number(row.epsilon_pld):
                place = [setting["planned_steps"]], [row.epsilon_pld]
                axes.plot(*place, "D", color=colour, markersize=6, clip_on=False, zorder=4)
    if not ends:
        say_empty(axes, "no finite epsilon to draw")
    else:
        # Beside the ends of the lines, in their order.
        beside = [line for _, line in sorted(ends, key=lambda each: -each[0])]
        figure.legend(handles=beside, loc="outside right center")
        words = f"after so many steps ({result.curve_accountant})"
        shown = [Line2D([], [], color=DARK, linewidth=1.8, label=words)]
        if any(_is_number(row.epsilon_pld) for row in result.rows):
            shown.append(Line2D([], [], color=DARK, marker="D", ls="", label="after all of them (PLD)"))
        if (target := _target(axes, setting.get("target_epsilon"))) is not None:
            shown.append(target)
        axes.set(xlabel=STEPS_AXIS, ylabel=f"{_epsilon_axis(setting)}, log scale)", yscale="log")
        axes.margins(x=0)
        plain_log_ticks(axes.yaxis)
        axes.legend(handles=shown, loc="lower left", bbox_to_anchor=(0, 1), ncols=3)
    axes.set_title(_setting_words(setting), color=INK, pad=_ABOVE_LEGEND)
    caption = (
        "Epsilon after so many steps, one line a noise multiplier; orange: the configured one."
        " Beside each its multiplier and the smaller bound on the epsilon of all"
        " steps. "
    )
    return Plot("epsilon_plan", "Epsilon against steps, by noise multiplier", caption, figure)


# -- NOT PRIVATE ---------------------------------------------------------------------------------------------


@styled
def norms_before_clipping(result: DPStepResult) -> Plot:
    """How the norms of the latest records' gradients lie about the bound."""
    norms = np.asarray(result.norms, dtype=float).ravel()
    drawn = norms[np.isfinite(norms) & (norms > 0)]
    figure, axes = figure_with_axes(3.4)
    if not len(drawn):
        say_empty(axes)
    else:
        bins = log_bins(drawn, 50)
        axes.hist(drawn, bins=list(bins), color=REST)
        count_axis(axes)
        words = "norm of a record's gradient before clipping (L2, log scale)"
        axes.set(xscale="log", xlabel=words, ylabel="records per bin")
        if result.bound is not None:
            above = float((drawn > result.bound).mean())
            words = f"bound {number(result.bound)}; {percent(above, 0)} above"
            axes.axvline(result.bound, color=REVIEW, linewidth=1.6, linestyle=DASHES, label=words)
            legend_above(axes)
    missing = len(norms) - len(drawn)
    caption = f"The norms of {count(len(drawn), 'record')} of the latest steps. " + (
        f"{missing:,} zero or not finite. " if missing else ""
    )
    return _marked(Plot("norms", "Gradient norms before clipping", caption, figure))


@styled
def clipping_by_step(result: DPStepResult) -> Plot:
    """The share of the drawn records that was clipped, at each step."""
    figure, axes = figure_with_axes(3.0)
    if _draw_by_step(axes, result, "clip_fraction", 100.0):
        axes.set(ylabel="records above their bound (%)", ylim=(-3, 103))
    caption = (
        "Near 100 % the bound sets the size of the update and the noise nothing; near 0 % the noise could be"
        " smaller. "
    )
    return _marked(Plot("clip_fraction", "Share of clipped records", caption, figure))


@styled
def losses_by_step(result: DPStepResult, unit: str = "") -> Plot:
    """The mean loss of the records of each step's batch, before the step."""
    figure, axes = figure_with_axes(3.0)
    if _draw_by_step(axes, result, "mean_loss"):
        axes.set(ylabel=f"mean loss of the batch ({unit})" if unit else "mean loss of the batch")
        low, high = axes.get_ylim()
        axes.set_ylim(min(0.0, low), high + 0.05 * (high - min(0.0, low)))  # whole markers at the top
    caption = "Mean loss of each batch, before its step; batches are drawn at random. "
    return _marked(Plot("losses", "Loss", caption, figure))


# -- what they share -----------------------------------------------------------------------------------------


def _curve(points: Sequence[tuple[int, float]]) -> tuple[Array, Array]:
    finite = [(steps, value) for steps, value in points if math.isfinite(value)]
    steps, values = zip(*finite, strict=True) if finite else ((), ())
    return np.array(steps, dtype=float), np.array(values, dtype=float)


def _line(points: Sequence[tuple[int, float]], accountant: str) -> tuple[Array, Array]:
    """The line through the points of a curve. Those by PLD are far apart, and as even in the square root of
    the steps as epsilon nearly is: straight lines between them would lie below it.
    """
    steps, spent = _curve(points)
    if accountant == "RDP" or len(steps) < 2:
        return steps, spent
    places = np.union1d(steps, np.linspace(np.sqrt(steps[0]), np.sqrt(steps[-1]), _PLACES) ** 2)
    return places, np.interp(np.sqrt(places), np.sqrt(steps), spent)


def _setting_words(step: dict[str, Any]) -> str:
    relation = _SHORT_RELATIONS[step["relation"]]
    return f"delta {compact(step['delta'])}, {relation} ({step['unit']}), {sampling_words(step)}"


def _target(axes: Axes, target: float | None) -> Line2D | None:
    """The line of a target epsilon, where there is one."""
    if target is None:
        return None
    words = f"target {compact(target)}"
    return axes.axhline(target, color=QUIET, linewidth=1, linestyle=(0, (1, 2)), label=words)


def _epsilon_axis(step: dict[str, Any]) -> str:
    return f"epsilon at delta {compact(step['delta'])} (upper bound"


def _is_number(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def _draw_by_step(axes: Axes, result: DPStepResult, column: str, scale: float = 1.0) -> bool:
    """A dot a step and, where they are many, their running median; False, with words in the figure, where
    there is nothing to draw.
    """
    rows = result.steps[np.isfinite(result.steps[column].astype(float))]
    if not len(rows):
        say_empty(axes, "no step with a record")
        return False
    values = scale * rows[column].astype(float)
    many = len(rows) > 40
    axes.scatter(
        rows["step"], values, s=10 if many else 22, color=REST, alpha=0.6 if many else 1.0, linewidths=0
    )
    if many:
        middle = values.rolling(max(5, len(rows) // 20), center=True, min_periods=3).median()
        axes.plot(rows["step"], middle, color=DARK, linewidth=1.8, label="running median")
        legend_above(axes)
    axes.set(xlabel="step", xlim=(0, float(rows["step"].max()) * 1.02 + 0.5))
    count_axis(axes, "x")
    return True


def _marked(plot: Plot) -> Plot:
    """A figure whose title, which its file has, says that it is not private."""
    title, caption = f"NOT PRIVATE: {plot.title}", f"NOT PRIVATE. {plot.caption}"
    return Plot(plot.name, title, caption, plot.figure)
