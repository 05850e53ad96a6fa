"""The figures of a private run: epsilon against steps, for everybody; norms, clipping and losses, which are
NOT PRIVATE.
"""

from __future__ import annotations

import math
from typing import Any, TypeGuard

import numpy as np
from matplotlib.axes import Axes

from psgrad.reports.figures import (
    DARK,
    DASHES,
    INK,
    QUIET,
    REST,
    REVIEW,
    Plot,
    count_axis,
    figure_with_axes,
    legend_above,
    log_bins,
    say_empty,
    styled,
)
from psgrad.reports.privacy import compact, epsilon, sampling_words
from psgrad.reports.words import count, number, percent
from psgrad.run.private_runs import PrivateRunFolder
from psgrad.run.results.privacy import DPStepResult

FAINT = "#b9c3ce"  # the looser bound
_ABOVE_LEGEND = 44  # points between axes and title, for up to three lines of a legend


def write_plots(result: DPStepResult, folder: PrivateRunFolder, unit: str = "") -> None:
    """Draw all figures of a run, each as <name>.png where it belongs. unit: of a loss, where it is known."""
    public = epsilon_against_steps(result)
    folder.write_public_bytes(f"{public.name}.png", public.png())
    for plot in private_plots(result, unit):
        folder.write_private_bytes(f"{plot.name}.png", plot.png())


def private_plots(result: DPStepResult, unit: str = "") -> list[Plot]:
    """The figures that say something of single records, each with NOT PRIVATE in the picture itself. unit: of
    a loss, where it is known.
    """
    # Without norms no step was taken now: the figure of the process that took one stays.
    norms = [norms_before_clipping(result)] if len(result.norms) else []
    return [*norms, clipping_by_step(result), losses_by_step(result, unit)]


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


@styled
def norms_before_clipping(result: DPStepResult) -> Plot:
    """How the norms of the latest records' gradients lie about the bound."""
    norms = np.asarray(result.norms, dtype=float).ravel()
    drawn = norms[np.isfinite(norms) & (norms > 0)]
    figure, axes = figure_with_axes(3.4)
    if not len(drawn):
        say_empty(axes)
    else:
        axes.hist(drawn, bins=list(log_bins(drawn, 50)), color=REST)
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


def _is_number(value: Any) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def _draw_by_step(axes: Axes, result: DPStepResult, column: str, scale: float = 1.0) -> bool:
    """A dot a step; False, with words in the figure, where there is nothing to draw."""
    rows = result.steps[np.isfinite(result.steps[column].astype(float))]
    if not len(rows):
        say_empty(axes, "no step with a record")
        return False
    values, many = scale * rows[column].astype(float), len(rows) > 40
    size, alpha = (10, 0.6) if many else (22, 1.0)
    axes.scatter(rows["step"], values, s=size, color=REST, alpha=alpha, linewidths=0)
    axes.set(xlabel="step", xlim=(0, float(rows["step"].max()) * 1.02 + 0.5))
    count_axis(axes, "x")
    return True


def _marked(plot: Plot) -> Plot:
    """A figure whose title, which its file has, says that it is not private."""
    title, caption = f"NOT PRIVATE: {plot.title}", f"NOT PRIVATE. {plot.caption}"
    return Plot(plot.name, title, caption, plot.figure)
