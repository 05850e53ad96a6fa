"""The figures of an analyze run: one function a plot, data frames in, a `Plot` out."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from psgrad.reports.analyze_tables import LISTED, listed_words
from psgrad.reports.figures import (
    DARK,
    DASHES,
    MAX_GROUPS,
    REST,
    REVIEW,
    Plot,
    count_axis,
    figure_with_axes,
    figure_with_panels,
    legend_above,
    log_bins,
    name_rows,
    rows_height,
    say_empty,
    scatter,
    styled,
)
from psgrad.reports.words import count, label, number
from psgrad.run.results import AnalyzeResult, disagrees, has_classes
from psgrad.wording import common_prefix, correlation, parameter_names, prefix_note

MAX_MARKS = 250  # single samples drawn as vectors
MAX_POINTS = 4000  # single samples drawn as pixels, of either colour
NORM_AXIS = "gradient norm (L2 over all trainable parameters, log scale)"


def draw_plots(result: AnalyzeResult) -> list[Plot]:
    """All figures that this result has the data for, in reading order."""
    samples, names = result.samples, result.class_names
    listed, unit = listed_words(result), result.manifest.loss_unit
    plots = [norm_histogram(samples, listed)]
    if not (samples["status"] == "ok").any():
        return plots
    plots.append(loss_against_norm(samples, unit, listed))
    if "length" in samples and samples["length"].nunique() > 1:
        plots.append(norm_against_length(samples, listed))
    if has_classes(samples):
        plots.append(norms_per_class(samples, names, listed))
    if len(result.parameters):
        plots.append(norms_per_layer(result.parameters))
    return plots


@styled
def norm_histogram(samples: pd.DataFrame, listed: str = LISTED) -> Plot:
    """How the norms are distributed (log axis), with those that are listed marked and every row that can't be
    drawn counted.
    """
    drawn, not_drawn = drawable(samples, ["grad_norm"])
    norm, review = drawn["grad_norm"].to_numpy(float), drawn["is_outlier_issue"].to_numpy(bool)
    figure, axes = figure_with_axes(3.2)
    caption = f"Distribution of the gradient norms of {count(len(drawn))}"
    if not len(drawn):
        say_empty(axes)
        caption += ". "
    else:
        caption += f": from {number(norm.min())} to {number(norm.max())}, median {number(np.median(norm))}. "
        bins, marks = log_bins(norm, 60), int(review.sum())
        counts, reviewed = (np.histogram(values, bins)[0] for values in (norm, norm[review]))
        # One outline each, as a bar a bin takes ten times as long.
        axes.stairs(counts - reviewed, bins, fill=True, color=REST, label="other samples")
        axes.stairs(counts, bins, baseline=counts - reviewed, fill=True, color=REVIEW, label=listed)
        axes.set(xscale="log", xlim=(bins[0], bins[-1]), xlabel=NORM_AXIS, ylabel="samples per bin")
        begins = bool(review.any() and not review.all() and norm[review].min() >= norm[~review].max())
        if begins:
            axes.axvline(norm[review].min(), color=REVIEW, linewidth=1, linestyle=DASHES)
        if 0 < marks <= MAX_MARKS:
            below, places = axes.get_xaxis_transform(), np.full(marks, -0.02)
            axes.plot(norm[review], places, "|", color=REVIEW, ms=7, transform=below, clip_on=False)
        axes.set_ylim(bottom=0)
        count_axis(axes)
        legend_above(axes)
        caption += f"Orange: {listed} ({count(marks)})"
        caption += ", from the dashed line on" if begins else ""
        caption += "; the ticks below are these samples. " if 0 < marks <= MAX_MARKS else ". "
    return Plot("norm_histogram", "Gradient norms", caption + not_drawn, figure)


@styled
def loss_against_norm(samples: pd.DataFrame, unit: str = "", listed: str = LISTED) -> Plot:
    """Each sample's loss, in a unit, against its norm."""
    log_loss = bool((samples.loc[samples["status"] == "ok", "loss"] >= 0).all())
    drawn, not_drawn = drawable(samples, ["grad_norm", "loss"] if log_loss else ["grad_norm"])
    figure, axes = figure_with_axes(4.2)
    caption = "Wherever the two orders disagree, neither is right by itself: look at both. "
    notes = [each for each in (unit, "log scale" if log_loss else "") if each]
    label_of_loss = f"loss ({', '.join(notes)})" if notes else "loss"
    axes.set(xscale="log", yscale="log" if log_loss else "linear", xlabel=NORM_AXIS, ylabel=label_of_loss)
    caption += _points(axes, drawn, "grad_norm", "loss", listed)
    return Plot("loss_against_norm", "Loss against gradient norm", caption + not_drawn, figure)


@styled
def norm_against_length(samples: pd.DataFrame, listed: str = LISTED) -> Plot:
    """Each sample's norm against how many of its positions count, with the median norm along the length."""
    drawn, not_drawn = drawable(samples, ["grad_norm", "length"])
    figure, axes = figure_with_axes(3.2)
    axes.set(xlabel="length (positions that count)", yscale="log", ylabel="gradient norm (log scale)")
    if len(drawn):
        bins = pd.qcut(drawn["length"], min(12, drawn["length"].nunique()), duplicates="drop")
        middle = drawn.groupby(bins, observed=True)[["length", "grad_norm"]].median()
        axes.plot(
            middle["length"], middle["grad_norm"], color=DARK, label="median along the length", zorder=3
        )
    caption = _points(axes, drawn, "length", "grad_norm", listed)
    return Plot("norm_against_length", "Gradient norm against length", caption + not_drawn, figure)


def _points(axes: Axes, drawn: pd.DataFrame, across: str, up: str, listed: str) -> str:
    """Draw a point a sample, crosses where the prediction differs from the label; returns words for the
    caption. Of either colour at most MAX_POINTS are drawn, chosen at random.
    """
    if not len(drawn):
        say_empty(axes)
        return ""
    review, wrong = drawn["is_outlier_issue"].to_numpy(bool), disagrees(drawn).to_numpy(bool)
    many = False
    for inside, colour, words in ((~review, REST, "other samples"), (review, REVIEW, listed)):
        some = drawn[inside].sample(min(int(inside.sum()), MAX_POINTS), random_state=0)
        many |= len(some) < inside.sum()
        crossed = wrong[drawn.index.get_indexer(some.index)]
        scatter(axes, some[~crossed], (across, up), (colour, "o"), words)
        scatter(axes, some[crossed], (across, up), (colour, "x"), f"{words}, prediction differs from label")
    if axes.get_legend_handles_labels()[0]:
        legend_above(axes, columns=2)
    words = f"One point a sample, of {count(len(drawn))}. "
    if many:
        words += f"At most {MAX_POINTS:,} samples of each colour are drawn. "
    if drawn[across].nunique() > 1 and drawn[up].nunique() > 1:
        names = " and ".join(name.removeprefix("grad_") for name in (across, up))
        spearman = correlation(drawn[across].rank().corr(drawn[up].rank()))
        words += f"Rank correlation of {names} (Spearman): {spearman}. "
    return words


def drawable(samples: pd.DataFrame, positive: list[str]) -> tuple[pd.DataFrame, str]:
    """The rows that a log axis can show, and a sentence that counts the others."""
    finite = samples[samples["status"] == "ok"]
    drawn = finite[(finite[positive] > 0).all(axis=1)]
    names = " or ".join(column.removeprefix("grad_") for column in positive)
    missing = [
        (int((samples["status"] == "nonfinite").sum()), "with a loss or gradient that is not finite"),
        (int((samples["status"] == "skipped").sum()), "that could not be judged"),
        (len(finite) - len(drawn), f"with a {names} of exactly zero"),
    ]
    parts = " and ".join(f"{n:,} {what}" for n, what in missing if n)
    return drawn, f"Not drawn: {parts}." if parts else ""


@styled
def norms_per_class(samples: pd.DataFrame, class_names: list[str] | None, listed: str = LISTED) -> Plot:
    """The norms of each class: median, middle half, middle 90 %, and the samples that are listed."""
    drawn, not_drawn = drawable(samples, ["grad_norm"])
    groups = drawn.groupby("target", observed=True)["grad_norm"]
    spread = groups.quantile(np.array([0.05, 0.25, 0.5, 0.75, 0.95])).unstack()
    total = len(spread)
    if total > MAX_GROUPS:
        spread = spread.loc[spread[0.5].nlargest(MAX_GROUPS).index.sort_values()]
    figure, axes = figure_with_axes(rows_height(len(spread)))
    caption = (
        f"Tick: median; bar: the middle half of the class; line: the middle 90 %. Orange dots: {listed}. "
    )
    if total > MAX_GROUPS:
        caption += f"The {MAX_GROUPS} of {total:,} classes with the largest median are shown. "
    if not total:
        say_empty(axes)
    else:
        rows = np.arange(len(spread))
        axes.hlines(rows, spread[0.05], spread[0.95], color=REST, linewidth=1.4, alpha=0.7)
        half = spread[0.75] - spread[0.25]
        axes.barh(rows, half, left=spread[0.25], height=0.5, color=REST, alpha=0.55)
        axes.vlines(spread[0.5], rows - 0.32, rows + 0.32, color=DARK, linewidth=2)
        axes.set_xscale("log")
        review = drawn[drawn["is_outlier_issue"] & drawn["target"].isin(spread.index)]
        if len(review) > MAX_MARKS:
            caption += f"Of these only the {MAX_MARKS} with the largest norms are drawn. "
            review = review.nlargest(MAX_MARKS, "grad_norm")
        axes.scatter(
            review["grad_norm"],
            spread.index.get_indexer(pd.Index(review["target"])),
            s=14,
            color=REVIEW,
            linewidths=0,
            alpha=0.8,
            zorder=4,
        )
        sizes = groups.size()
        name_rows(axes, [f"{label(target, class_names)}  (n = {sizes[target]:,})" for target in spread.index])
        axes.set(xlabel=NORM_AXIS)
    return Plot("norms_per_class", "Gradient norms per class", caption + not_drawn, figure)


@styled
def norms_per_layer(parameters: pd.DataFrame) -> Plot:
    """For each parameter the spread of its own per-sample norms, and its share of the mean squared norm."""
    shown = parameters
    if len(parameters) > MAX_GROUPS:
        shown = parameters.loc[parameters["share"].fillna(0).nlargest(MAX_GROUPS).index.sort_values()]
    figure, (axes, shares) = figure_with_panels(rows_height(len(shown)), 2, sharey=True, width_ratios=[3, 1])
    spread = shown[["q05", "median", "q95"]].reset_index(drop=True)
    positive = spread["q95"] > 0
    caption = (
        "Left: the norm of each parameter's own gradient, per sample; dot: median, line: the middle 90 % of"
        " samples. Right: its share of the mean squared norm; the shares of all parameters add up to 100 %."
        " Model order, top to bottom. "
    )
    if len(parameters) > MAX_GROUPS:
        caption += f"The {MAX_GROUPS} of {len(parameters):,} parameters with the largest share are shown. "
    if positive.any():
        drawn = spread[positive]
        floor = float(drawn.to_numpy()[drawn.to_numpy() > 0].min())
        axes.hlines(
            drawn.index, drawn["q05"].clip(lower=floor), drawn["q95"], color=REST, linewidth=2.5, alpha=0.55
        )
        axes.scatter(drawn["median"].clip(lower=floor), drawn.index, s=26, color=REST, zorder=3)
        axes.set_xscale("log")
    else:
        say_empty(axes)
    shares.barh(np.arange(len(shown)), 100 * shown["share"].fillna(0), height=0.6, color=REST)
    prefix = common_prefix(list(map(str, parameters["parameter"])))
    name_rows(axes, parameter_names(list(map(str, shown["parameter"])), 44, prefix))
    caption += f"{prefix_note(prefix)}. " if prefix else ""
    axes.set(xlabel="gradient norm of the parameter (log scale)")
    shares.set(xlabel="share (%)")
    shares.tick_params(labelleft=False)
    shares.grid(axis="y", visible=False)
    return Plot("norms_per_layer", "Gradient norms per layer", caption, figure)
