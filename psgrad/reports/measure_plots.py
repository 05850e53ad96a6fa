"""The figures of measures: how their columns are distributed, spectra, and samples through training."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from psgrad.reports.figures import (
    DARK,
    REST,
    REVIEW,
    Array,
    Plot,
    count_axis,
    figure_with_axes,
    figure_with_panels,
    legend_above,
    log_bins,
    say_empty,
    styled,
)
from psgrad.reports.words import count, number, percent, shorten, words_of
from psgrad.run.results import AnalyzeResult, MeasureResult

MAX_PANELS = 6
MAX_LINES = 10
MAX_FIGURES = 4  # of one measure

_SPECTRUM = re.compile(r"eigenvalue|spectrum|singular")


def measure_plots(result: AnalyzeResult, measure: MeasureResult) -> list[Plot]:
    """All figures of one measure, at most MAX_FIGURES."""
    samples, plots = result.samples, []
    columns = [
        column for column in measure.meanings if column in samples and samples[column].dtype.kind in "fiub"
    ]
    if columns:
        plots.append(histograms(measure, samples, columns[:MAX_PANELS]))
    if "checkpoints" in measure.numbers and {"loss", "grad_norm"} <= set(measure.arrays):
        plots.append(trajectories(measure, samples))
    for name, table in measure.tables.items():
        if "eigenvalue" in table and len(table) > 2:
            plots.append(spectrum(measure, name, table["eigenvalue"].to_numpy(np.float64)))
    for name, array in measure.arrays.items():
        if array.ndim == 1 and len(array) > 2 and _SPECTRUM.search(name):
            plots.append(spectrum(measure, name, array))
    return plots[:MAX_FIGURES]


@styled
def histograms(measure: MeasureResult, samples: pd.DataFrame, columns: list[str]) -> Plot:
    """How each column is distributed over the samples, with those that are listed in orange."""
    across = min(2, len(columns))
    down = -(-len(columns) // across)
    figure, panels = figure_with_panels(2.3 * down, across, down)
    listed = samples["is_outlier_issue"].to_numpy(bool)
    sentences = []
    for axes, column in zip(panels, columns, strict=False):
        values = samples[column].to_numpy(np.float64)
        finite = np.isfinite(values)
        missing = f" ({(~finite).sum():,} without a value)" if not finite.all() else ""
        sentences.append(f"{_histogram(axes, values[finite], listed[finite], words_of(column))}{missing}.")
    for axes in panels[len(columns) :]:
        axes.axis("off")
    return Plot(
        f"measure_{_file_name(measure.name)}",
        f"{measure.title}: distribution",
        f"Samples per bin; orange: those on the review list or named as outliers. {' '.join(sentences)}",
        figure,
    )


@styled
def spectrum(measure: MeasureResult, name: str, values: Array) -> Plot:
    """Values from the largest to the smallest, on a log axis where they are positive."""
    ordered = np.sort(values[np.isfinite(values)].astype(np.float64))[::-1]
    figure, axes = figure_with_axes(2.9)
    positive = ordered[ordered > 0]
    shown = positive if len(positive) else ordered
    places, marker = np.arange(1, len(shown) + 1), "o" if len(shown) < 60 else ""
    axes.plot(places, shown, color=REST, marker=marker, markersize=3.5, linewidth=1.4)
    axes.set(xlabel="place, the largest first", ylabel=words_of(name))
    if len(shown) > 30:
        axes.set(xscale="log", xlabel="place, the largest first (log scale)")
    else:
        count_axis(axes, "x")
    if len(positive):
        axes.set(yscale="log", ylabel=f"{words_of(name)} (log scale)")
    largest = number(ordered[0] if len(ordered) else None)
    words = f"{words_of(name)}: {count(len(ordered), 'value')}, the largest {largest}"
    if (total := float(ordered.sum())) > 0:
        words += f", which is {percent(ordered[0] / total)} of their sum"
    return _plot(measure, name, f"{words}.", figure)


def _plot(measure: MeasureResult, name: str, caption: str, figure: Figure) -> Plot:
    """The figure of something, by its name, that a measure found."""
    file_name = f"measure_{_file_name(measure.name)}_{_file_name(name)}"
    return Plot(file_name, f"{measure.title}: {words_of(name)}", caption, figure)


@styled
def trajectories(measure: MeasureResult, samples: pd.DataFrame) -> Plot:
    """Loss and gradient norm of the first listed samples at each checkpoint, over the band that holds the
    middle 90 % of all samples.
    """
    steps = np.arange(1, len(measure.numbers["checkpoints"]) + 1)
    worst = samples[samples["rank"].notna().to_numpy()].nsmallest(MAX_LINES, "rank")
    figure, panels = figure_with_panels(3.4, 2)
    sentences = []
    for axes, (name, words) in zip(panels, (("loss", "loss"), ("grad_norm", "gradient norm")), strict=True):
        values = np.where(np.isfinite(measure.arrays[name]), measure.arrays[name], np.nan).astype(np.float64)
        known = np.isfinite(values).any(axis=0)
        low, middle, high = np.full((3, len(steps)), np.nan)
        if known.any():
            middles = np.nanquantile(values[:, known], [0.05, 0.5, 0.95], axis=0)
            low[known], middle[known], high[known] = middles
            first, last = number(middle[known][0]), number(middle[known][-1])
            sentences.append(f"the median {words} goes from {first} to {last}")
        axes.fill_between(steps, low, high, color=REST, alpha=0.25, linewidth=0, label="middle 90 % of all")
        axes.plot(steps, middle, color=DARK, linewidth=2, label="median of all")
        lines = values[worst["index"].to_numpy(np.int64)].T
        axes.plot(steps, lines, "o-", color=REVIEW, linewidth=1, alpha=0.8, markersize=2.5)
        log = bool((values[np.isfinite(values)] > 0).all())
        axes.set(xlabel="checkpoint, in the order of training", yscale="log" if log else "linear")
        axes.set_ylabel(f"{words} (log scale)" if log else words)
        count_axis(axes, "x")
        legend_above(axes, columns=2)
    caption = (
        f"Samples at {count(len(steps), 'checkpoint')}: {' and '.join(sentences)}. Orange: the first"
        f" {len(worst)} ranks."
    )
    name = f"measure_{_file_name(measure.name)}_checkpoints"
    return Plot(name, f"{measure.title}: through training", caption, figure)


def _histogram(axes: Axes, values: Array, listed: Array, words: str) -> str:
    """Draw one, and say what it shows."""
    axes.set(xlabel=shorten(words, 60), ylabel="samples")
    if not len(values):
        say_empty(axes, "no finite value")
        return f"{words}: no finite value"
    low, high = float(values.min()), float(values.max())
    if low > 0 and high / low > 100 and np.median(values) < high / 4:
        bins = log_bins(values, 40)
        axes.set(xscale="log", xlabel=f"{shorten(words, 60)} (log scale)")
    else:
        bins = np.linspace(
            low, high if high > low else low + max(abs(low), 1) * 1e-3, min(40, 10 + len(values) // 4) + 1
        )
    counts, marked = np.histogram(values, bins)[0], np.histogram(values[listed], bins)[0]
    # One outline each, as a bar a bin is ten times the bytes.
    axes.stairs(counts, bins, fill=True, color=REST)
    axes.stairs(counts, bins, baseline=counts - marked, fill=True, color=REVIEW)
    axes.set_ylim(bottom=0)
    count_axis(axes)
    if axes.get_xscale() == "linear" and (values == values.round()).all():
        count_axis(axes, "x")
    return f"{words}: from {number(low)} to {number(high)}, median {number(float(np.median(values)))}"


def _file_name(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "_", name)[:60]
