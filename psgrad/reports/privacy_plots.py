"""The figures of a private run: epsilon against steps, for everybody; norms, clipping and losses, which are
NOT PRIVATE.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from psgrad.reports.drawing import (
    DARK,
    DASHES,
    INK,
    QUIET,
    REST,
    REVIEW,
    Array,
    Plot,
    figure_with_axes,
    legend_above,
    log_bins,
    say_empty,
)
from psgrad.reports.privacy import compact, epsilon, sampling_words
from psgrad.reports.ticks import count_axis, log_axis
from psgrad.reports.words import count, number, percent
from psgrad.run.results import DPPlanResult, DPStepResult, NoisePlan

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
        _draw_target(axes, step.get("target_epsilon"))
        _finish(axes, step)
    axes.set_title(_setting_words(step), fontsize=9, color=INK, loc="left", pad=_ABOVE_LEGEND)
    return Plot("epsilon", "Epsilon against steps", caption, figure)


def epsilon_by_multiplier(result: DPPlanResult) -> Plot:
    """What the planned steps would cost with several noise multipliers; the configured one in orange."""
    setting = result.setting
    figure, axes = figure_with_axes(4.2)
    others = iter(SHADES * (1 + len(result.rows) // len(SHADES)))
    drawn: list[tuple[NoisePlan, str]] = []
    for row in result.rows:
        steps, spent = _line(row.curve, result.curve_accountant)
        colour = REVIEW if row.configured else next(others)
        if len(steps):
            axes.plot(steps, spent, color=colour, linewidth=2.6 if row.configured else 1.8, zorder=3)
            drawn.append((row, colour))
            if _is_number(row.epsilon_pld):
                end = [setting["planned_steps"]], [row.epsilon_pld]
                axes.plot(*end, "D", color=colour, markersize=6, clip_on=False, zorder=4)
    if not drawn:
        say_empty(axes, "no finite epsilon to draw")
    else:
        log_axis(axes, "y")
        _name_ends(axes, drawn)
        label = f"after so many steps ({result.curve_accountant})"
        axes.plot([], [], color=DARK, linewidth=1.8, label=label)
        if any(_is_number(row.epsilon_pld) for row, _ in drawn):
            axes.plot([], [], "D", color=DARK, markersize=6, label="after all of them (PLD)")
        _draw_target(axes, setting.get("target_epsilon"))
        _finish(axes, setting)
        _plain_log_ticks(axes)
    axes.set_title(_setting_words(setting), fontsize=9, color=INK, loc="left", pad=_ABOVE_LEGEND)
    caption = (
        "Epsilon after so many steps, one line a noise multiplier; orange: the configured one."
        " Beside each its multiplier and the smaller bound on the epsilon of all"
        " steps. "
    )
    return Plot("epsilon_plan", "Epsilon against steps, by noise multiplier", caption, figure)


# -- NOT PRIVATE ---------------------------------------------------------------------------------------------


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
        log_axis(axes, "x")
        count_axis(axes)
        axes.set(
            xlabel="norm of a record's gradient before clipping (L2, log scale)", ylabel="records per bin"
        )
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


def _draw_target(axes: Axes, target: float | None) -> None:
    if target is not None:
        axes.axhline(
            target, color=QUIET, linewidth=1, linestyle=(0, (1, 2)), label=f"target {compact(target)}"
        )


def _finish(axes: Axes, step: dict[str, Any]) -> None:
    axes.set(xlabel=STEPS_AXIS, ylabel=f"epsilon at delta {compact(step['delta'])} (upper bound)")
    if axes.get_yscale() == "linear":
        axes.set_ylim(bottom=0)
    legend_above(axes, columns=3)


def _is_number(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def _name_ends(axes: Axes, drawn: list[tuple[NoisePlan, str]]) -> None:
    """Beside each line's end its multiplier and the smaller of its bounds, pushed apart where they would
    overlap; on a log axis.
    """
    ends = [
        (min(filter(_is_number, (row.epsilon_pld, row.epsilon_rdp, row.curve[-1][1]))), row, colour)
        for row, colour in drawn
    ]
    ends.sort(key=lambda end: end[0])
    heights = [math.log(spent) for spent, _, _ in ends]
    low, high = (math.log(limit) for limit in axes.get_ylim())
    apart = (high - low) / 16
    for index in range(1, len(heights)):
        heights[index] = max(heights[index], heights[index - 1] + apart)
    axes.set_ylim(math.exp(low), math.exp(max(high, heights[-1] + apart / 2)))
    last = max(row.curve[-1][0] for row, _ in drawn)
    for (spent, row, colour), height in zip(ends, heights, strict=True):
        words = f"  multiplier {number(row.noise_multiplier)}: {epsilon(spent)}"
        weight = "bold" if row.configured else "normal"
        axes.annotate(
            words,
            (last, math.exp(height)),
            color=colour,
            fontsize=9,
            va="center",
            fontweight=weight,
            annotation_clip=False,
        )
    axes.margins(x=0)


def _plain_log_ticks(axes: Axes) -> None:
    """1, 2, 5, 10 in place of powers of ten: a plan spans a decade or two."""
    low, high = axes.get_ylim()
    ticks = [base * 10.0**power for power in range(-4, 7) for base in (1, 2, 5)]
    shown = [tick for tick in ticks if low <= tick <= high]
    axes.set_yticks(shown, [compact(tick) for tick in shown])
    axes.set_yticks([], minor=True)


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
    figure: Figure = plot.figure
    figure.suptitle("NOT PRIVATE", x=0.99, ha="right", fontsize=9, fontweight="bold", color=REVIEW)
    return Plot(plot.name, plot.title, f"NOT PRIVATE. {plot.caption}", figure, plot.vector)
