"""The figures of an evaluation: what was predicted against what happened, and removal curves."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from psgrad.reports.evaluation import ordered
from psgrad.reports.figures import (
    DARK,
    DASHES,
    QUIET,
    REST,
    REVIEW,
    Plot,
    count_axis,
    figure_with_axes,
    legend_above,
    say_empty,
    styled,
)
from psgrad.reports.words import brief
from psgrad.run.results.influence_evaluation import EvaluationResult

_NAME_LIMIT = 40
_MOST_POINTS = 20_000


def evaluation_plots(result: EvaluationResult) -> list[Plot]:
    """All figures that this result has the data for."""
    if result.kind == "removal":
        return [removal_curves(result)]
    return [predicted_and_actual(result)] if len(result.points) else []


@styled
def predicted_and_actual(result: EvaluationResult) -> Plot:
    """A point a removal and query, the line through all points, and the diagonal where scores predict
    amounts.
    """
    influence = result.manifest.influence
    predicts, unit = influence.predicts_removal is not False, influence.unit
    figure, axes = figure_with_axes(4.6)
    points = result.points
    if len(points) > _MOST_POINTS:
        points = points.iloc[np.linspace(0, len(points) - 1, _MOST_POINTS).astype(int)]
    x, y = points["predicted"].to_numpy(float), points["actual"].to_numpy(float)
    known = np.isfinite(x) & np.isfinite(y)
    if not known.any():
        say_empty(axes, "no finite rise to draw")
    else:
        axes.plot(x[known], y[known], ".", color=REST, markersize=3, alpha=0.4, rasterized=True)
        ends = np.array([x[known].min(), x[known].max()])
        if predicts:
            axes.plot(ends, ends, color=QUIET, linewidth=1.2, linestyle=DASHES, label="as predicted")
        main = result.table[result.table["method"] == result.method].iloc[0]
        slope, intercept = float(main["slope"]), float(main["intercept"])
        if np.isfinite(slope):
            axes.plot(ends, intercept + slope * ends, color=REVIEW, linewidth=1.6, label=f"slope {slope:.4f}")
        legend_above(axes)
        if predicts:
            axes.set(xlabel=f"predicted {result.unit}", ylabel="after retraining")
        else:
            axes.set(xlabel=f"score of {result.method} ({unit})", ylabel=f"{result.unit}, after retraining")
    caption = f"Each removed example and each query, by {result.method}."
    caption += (
        " On the dashed line the prediction is exact."
        if predicts
        else " The scores rank, and predict no amount."
    )
    return Plot(
        "predicted_and_actual",
        f"{'Predicted' if predicts else 'Scores'} and actual rises",
        caption,
        figure,
    )


@styled
def removal_curves(result: EvaluationResult) -> Plot:
    """The mean rise against the number of removed examples, one line for each method."""
    figure, axes = figure_with_axes(4.2)
    for name, rows in ordered(result.table, "removal").groupby("method", sort=False):
        _curve(axes, result, str(name), rows)
    axes.set(
        xlabel="examples left out: those with the largest scores for the query", ylabel=f"mean {result.unit}"
    )
    count_axis(axes, "x")
    legend_above(axes)
    return Plot("evaluation", "Removal curves", _BANDS, figure)


_BANDS = "Bands: 95 % intervals over the queries. Dashed: controls."


def _curve(axes: Axes, result: EvaluationResult, name: str, rows: pd.DataFrame) -> None:
    """A line with its band. rows: of one method, by the number of removed examples."""
    control = bool(rows["control"].iloc[0])
    colour = REVIEW if name == result.method else QUIET if control else DARK
    axes.fill_between(rows["removed"], rows["low"], rows["high"], color=colour, alpha=0.12, linewidth=0)
    axes.plot(
        rows["removed"],
        rows["rise"],
        color=colour,
        linestyle=DASHES if control else "-",
        marker="o",
        markersize=4,
        label=brief(name, _NAME_LIMIT),
    )
