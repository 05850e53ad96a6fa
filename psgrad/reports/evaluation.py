"""The end of an evaluation on a terminal: what was retrained, and a row for each method and each control.

The figures of an evaluation: intervals, what was predicted against what happened, removal curves, and tuning.
"""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Mapping
from typing import Any, TextIO

import numpy as np
import pandas as pd
from rich.table import Table
from rich.text import Text

from psgrad.reports.drawing import (
    DARK,
    QUIET,
    REST,
    REVIEW,
    Plot,
    figure_with_axes,
    legend_above,
    name_rows,
    rows_height,
    say_empty,
)
from psgrad.reports.page import at
from psgrad.reports.privacy import facts_lines
from psgrad.reports.terminal import print_table
from psgrad.reports.ticks import count_axis, log_axis
from psgrad.reports.words import MISSING, brief, count, printable
from psgrad.results.influence import HEADLINE, EvaluationResult, evaluation_content

TITLES: Mapping[str, str] = {
    "lds": (
        "linear datamodeling score (rank correlation of summed scores with what models retrained on subsets"
        " say)"
    ),
    "loo": "leave-one-out (what models retrained without one example say, against what was predicted)",
    "mislabel": "mislabel detection (labels flipped on purpose, found by self-influence)",
    "removal": "removal (rise of the query's measurement when its strongest proponents are left out)",
}


def write_evaluation(result: EvaluationResult, style: str, stream: TextIO) -> None:
    """style: 'terminal', the facts, the table and the folder last, or 'json', the content of
    evaluation.json.
    """
    if style == "json":
        json.dump(finite(evaluation_content(result)), stream, indent=2, allow_nan=False)
        stream.write("\n")
        return
    stream.write(facts_lines(evaluation_facts(result)) + "\n")
    print_table(evaluation_table(result), stream)
    for note in result.notes:
        stream.write(f"{printable(note)}\n")
    stream.write(f"{result.folder}\n")


def evaluation_facts(result: EvaluationResult) -> list[tuple[str, str]]:
    """What was done: (question, answer)."""
    facts = result.facts
    found = [("evaluated", TITLES[result.kind]), ("retrained", retrained_words(result))]
    if "queries" in facts:
        found.append(("queries", f"{facts['queries']:,}, each by the {result.unit}"))
    if result.kind in ("lds", "loo"):
        found.append(("noise", ceiling_words(facts)))
    return found


def retrained_words(result: EvaluationResult) -> str:
    """How many models, of what."""
    facts = result.facts
    models = count(facts["models"], "model")
    if result.kind == "lds":
        return (
            f"{models}: {facts['subsets']:,} subsets of {facts['fraction']:.0%} of the rows,"
            f" {count(facts['seeds'], 'seed')} each"
        )
    if result.kind == "loo":
        return (
            f"{models}: without each of {count(facts['removals'], 'example')}, {facts['highest']} of them of"
            " the highest influence"
        )
    if result.kind == "mislabel":
        return (
            f"{models}: {count(facts['flips'], 'set')} of flips, {facts['share']:.0%} of the labels each, and"
            " cross-validation"
        )
    return (
        f"{models}: without the strongest proponents of each of {facts['queries']:,} queries,"
        f" {count(facts['seeds'], 'seed')} each"
    )


def ceiling_words(facts: Mapping[str, Any]) -> str:
    """How much of the truth is noise of retraining."""
    if facts.get("ceiling") is None:
        return "one training each, so that what the seeds do is not known"
    return (
        f"best reachable {facts['ceiling']:.3f} (one seed agrees with another to {facts['single_seed']:.3f},"
        f" the mean over the seeds with such a mean to {facts['reliability']:.3f})"
    )


def evaluation_table(result: EvaluationResult) -> Table:
    """A row a method, the best first, controls in their places among them."""
    columns = [(heading.format(main=result.method), words) for heading, words in _COLUMNS[result.kind]]
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("method", overflow="fold")
    for heading, _ in columns:
        table.add_column(heading, justify="right", no_wrap=True)
    for row in ordered(result.table, result.kind).to_dict("records"):
        mark = " (control)" if row["control"] else ""
        table.add_row(Text(printable(f"{row['method']}{mark}")), *(Text(words(row)) for _, words in columns))
    return table


def ordered(table: pd.DataFrame, kind: str) -> pd.DataFrame:
    """The rows by the kind's first number, the largest first; of removal by method, in order of what the most
    removed examples bring.
    """
    if kind != "removal":
        return table.sort_values(HEADLINE[kind], ascending=False, kind="stable")
    last = table[table["removed"] == table["removed"].max()].set_index("method")["rise"]
    return table.assign(_last=table["method"].map(last)).sort_values(
        ["_last", "method", "removed"], ascending=[False, True, True]
    )


def finite(value: Any) -> Any:
    """JSON that every reader accepts: numbers that are not finite are null."""
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


Row = dict[Hashable, Any]


def _decimals(value: Any, digits: int = 3) -> str:
    """So many decimals, rounded towards zero where they would make it a 1 that it is not."""
    if value is None or pd.isna(value):
        return MISSING
    text = f"{value:.{digits}f}"
    return (
        f"{math.trunc(value * 10**digits) / 10**digits:.{digits}f}"
        if abs(float(text)) == 1 > abs(value)
        else text
    )


def _interval(row: Row, low: str = "low", high: str = "high", digits: int = 3) -> str:
    return MISSING if pd.isna(row[low]) else f"{row[low]:.{digits}f} to {row[high]:.{digits}f}"


def _with_deviation(name: str) -> Any:
    return lambda row: (
        _decimals(row[name])
        + ("" if pd.isna(row[f"{name}_deviation"]) else f" ± {row[f'{name}_deviation']:.3f}")
    )


def _plain(name: str, digits: int = 3) -> Any:
    return lambda row: _decimals(row[name], digits)


_AHEAD = [
    ("lead of {main}", _plain("ahead")),
    ("95 % interval of it", lambda row: _interval(row, "ahead_low", "ahead_high")),
]
_COLUMNS: Mapping[str, list[tuple[str, Any]]] = {
    "lds": [
        ("LDS", _plain("mean")),
        ("95 % interval", _interval),
        *_AHEAD,
        ("undefined", lambda row: str(int(row["undefined"]))),
        ("damping", lambda row: MISSING if pd.isna(row["damping"]) else f"{row['damping']:g} x mean"),
    ],
    "loo": [
        ("Pearson", _plain("pearson", 4)),
        ("95 % interval", lambda row: _interval(row, digits=4)),
        ("Spearman", _plain("spearman", 4)),
        ("slope", _plain("slope", 4)),
        ("intercept", lambda row: MISSING if pd.isna(row["intercept"]) else f"{row['intercept']:.2g}"),
        ("pooled", _plain("pooled", 4)),
        ("undefined", lambda row: str(int(row["undefined"]))),
    ],
    "mislabel": [
        ("ROC-AUC", _with_deviation("auc")),
        ("average precision", _with_deviation("average_precision")),
        ("recall at 10 %", _with_deviation("recall")),
    ],
    "removal": [
        ("removed", lambda row: str(int(row["removed"]))),
        ("rise", _plain("rise", 4)),
        ("95 % interval", lambda row: _interval(row, digits=4)),
        ("lead of {main}", _plain("ahead", 4)),
        ("95 % interval of it", lambda row: _interval(row, "ahead_low", "ahead_high", 4)),
    ],
}


_AXES = {
    "lds": "linear datamodeling score (mean rank correlation over the queries)",
    "loo": "Pearson correlation of predicted and actual rises (mean over the queries)",
    "mislabel": "ROC-AUC of the flipped labels (mean over the sets of flips)",
}
_NAME_LIMIT = 40
_MOST_POINTS = 20_000


def evaluation_plots(result: EvaluationResult) -> list[Plot]:
    """All figures that this result has the data for."""
    if result.kind == "removal":
        return [removal_curves(result)]
    plots = [intervals(result)]
    if len(result.points):
        plots.append(predicted_and_actual(result))
    if result.curves:
        plots.append(tuning(result))
    return plots


def intervals(result: EvaluationResult) -> Plot:
    """Each method's first number with its interval; controls lighter, the config's method in orange, the
    noise ceiling as a line.
    """
    table, headline = ordered(result.table, result.kind), HEADLINE[result.kind]
    figure, axes = figure_with_axes(rows_height(len(table)))
    for place, row in enumerate(table.to_dict("records")):
        value = float(row[headline])
        low, high = (
            (row["low"], row["high"])
            if "low" in row
            else (value - row["auc_deviation"], value + row["auc_deviation"])
        )
        colour = REVIEW if row["method"] == result.method else REST if row["control"] else DARK
        if np.isfinite(low) and np.isfinite(high):
            axes.plot([low, high], [place, place], color=colour, linewidth=2)
        axes.plot([value], [place], "o", color=colour, markersize=6)
    name_rows(
        axes,
        [
            brief(f"{row['method']}{' (control)' if row['control'] else ''}", _NAME_LIMIT)
            for row in table.to_dict("records")
        ],
    )
    axes.set_xlabel(_AXES[result.kind])
    best = result.facts.get("ceiling") if result.kind == "lds" else None
    if best is not None:
        axes.axvline(
            best,
            color=QUIET,
            linewidth=1.2,
            linestyle=(0, (4, 3)),
            label="best reachable: the rest is noise of retraining",
        )
        legend_above(axes)
    bars = (
        "one standard deviation over the sets of flips"
        if result.kind == "mislabel"
        else "95 % bootstrap intervals"
    )
    return Plot(
        "evaluation",
        "How well the scores did",
        f"Bars: {bars}. Orange: the config's method; light: controls.",
        figure,
    )


def predicted_and_actual(result: EvaluationResult) -> Plot:
    """A point a removal and query, the line through all points, and the diagonal where scores predict
    amounts.
    """
    predicts = at(result.manifest, "influence", "predicts_removal") is not False
    unit = at(result.manifest, "influence", "unit")
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
            axes.plot(ends, ends, color=QUIET, linewidth=1.2, linestyle=(0, (4, 3)), label="as predicted")
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
        vector=False,
    )


def removal_curves(result: EvaluationResult) -> Plot:
    """The mean rise against the number of removed examples, one line a method."""
    figure, axes = figure_with_axes(4.2)
    for name, rows in ordered(result.table, "removal").groupby("method", sort=False):
        control = bool(rows["control"].iloc[0])
        colour = REVIEW if name == result.method else QUIET if control else DARK
        style = (0, (4, 3)) if control else "-"
        axes.fill_between(rows["removed"], rows["low"], rows["high"], color=colour, alpha=0.12, linewidth=0)
        axes.plot(
            rows["removed"],
            rows["rise"],
            color=colour,
            linestyle=style,
            marker="o",
            markersize=4,
            label=brief(str(name), _NAME_LIMIT),
        )
    axes.set(
        xlabel="examples left out: those with the largest scores for the query", ylabel=f"mean {result.unit}"
    )
    count_axis(axes, "x")
    legend_above(axes)
    return Plot(
        "evaluation",
        "Removal curves",
        "Bands: 95 % bootstrap intervals over the queries. Dashed: controls.",
        figure,
    )


def tuning(result: EvaluationResult) -> Plot:
    """The score on the tuning subsets and queries against the damping."""
    figure, axes = figure_with_axes(3.6)
    for name, curve in result.curves.items():
        colour = REVIEW if name == result.method else DARK
        axes.plot(
            list(curve),
            list(curve.values()),
            color=colour,
            marker="o",
            markersize=4,
            label=brief(name, _NAME_LIMIT),
        )
    log_axis(axes, "x")
    axes.set(
        xlabel="damping, as a multiple of the curvature's mean eigenvalue (log scale)",
        ylabel="linear datamodeling score",
    )
    legend_above(axes)
    caption = "On subsets and queries that are not reported. The damping with the largest score was taken."
    return Plot("tuning", "Score by damping", caption, figure)
