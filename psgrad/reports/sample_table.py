"""The table of samples on the page: who is on it, in which order, and what each column says.

Each sample's loss against its gradient norm: as a figure, and as the part of the page that is linked with its
tables.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, LogNorm

from psgrad.reports.drawing import (
    DARK,
    REST,
    REVIEW,
    SHADES,
    Plot,
    figure_with_axes,
    legend_above,
    log_bins,
    say_empty,
)
from psgrad.reports.page import DataTable, Heading, TableRow, at, cell, key_of, loss_unit, words_of
from psgrad.reports.ticks import log_axis
from psgrad.reports.words import (
    MISSING,
    brief,
    count,
    group_words,
    identifier,
    label,
    number,
    percent,
    percentile,
    value_words,
)
from psgrad.results import AnalyzeResult, disagrees, has_classes, top_samples
from psgrad.wording import correlation

MAX_SAMPLES = 200
MAX_COLUMNS = 26
MAX_VALUE_ROWS, MAX_VALUES = 40, 40


@dataclass(frozen=True)
class Column:
    """A column of the table of samples that the page knows by name."""

    words: str
    meaning: str
    numeric: bool = True


KNOWN: Mapping[str, Column] = {
    "rank": Column("rank", "1 for the sample that is most unlike the others by the score that was asked for"),
    "id": Column("id", "of the sample, as the dataset names it", numeric=False),
    "target": Column("label", "what the dataset says", numeric=False),
    "prediction": Column("prediction", "what the model says", numeric=False),
    "confidence": Column("confidence", "the model's probability of its prediction (%)"),
    "group": Column("group", "that the sample was compared within", numeric=False),
    "loss": Column("loss", "the sample's own loss ({unit})"),
    "grad_norm": Column("gradient norm", "L2 norm of the sample's gradient ({unit} per unit of parameter)"),
    "percentile": Column(
        "percentile",
        "percentage of samples, of its group where there are groups, that are not more suspect (%)",
    ),
    "robust_z": Column(
        "robust z", "distance from the median of the log norms, in robust standard deviations (no unit)"
    ),
    "p_value": Column(
        "p-value", "conformal: how often a sample of the reference is at least as unusual (probability)"
    ),
    "q_value": Column(
        "q-value",
        "the p-value after Benjamini and Hochberg: the false discovery rate at which it is named (share)",
    ),
    "outlier_score": Column("outlier score", "0 to 1, low is bad (no unit)"),
}
"""The columns that come first, in this order, and what they say."""

LAST: Mapping[str, Column] = {"reasons": Column("reasons", "why the sample is on a list", numeric=False)}

_NOT_SHOWN = {"index", "fingerprint", "log_norm", "is_outlier_issue", "status"}


def listed_samples(samples: pd.DataFrame, count: int = MAX_SAMPLES) -> pd.DataFrame:
    """The samples to look at: those on the review list or named as outliers first, then by rank; unranked
    ones never appear.
    """
    ranked = samples[samples["rank"].notna().to_numpy()]
    issues = ranked[ranked["is_outlier_issue"].to_numpy(bool)].nsmallest(count, "rank")
    others = ranked[~ranked["is_outlier_issue"].to_numpy(bool)].nsmallest(count - len(issues), "rank")
    return pd.concat([issues, others]).sort_values("rank", kind="stable")


def meanings_of(result: AnalyzeResult) -> dict[str, str]:
    """What the columns say that measures brought."""
    return {
        column: meaning
        for measure in result.measures.values()
        for column, meaning in measure.meanings.items()
    }


def shown_columns(result: AnalyzeResult) -> list[str]:
    """The columns of the table, in order, as far as there is something in them."""
    samples = result.samples
    there = [
        str(column)
        for column in samples
        if column not in _NOT_SHOWN
        and not (column == "group" and samples[column].nunique() < 2)
        and column not in LAST
        and (column in ("target", "prediction") or samples[column].notna().any())
    ]
    known = [
        column for column in KNOWN if column in there and (column != "confidence" or has_classes(samples))
    ]
    others = [
        column for column in there if column not in KNOWN and pd.api.types.is_numeric_dtype(samples[column])
    ]
    return [*known, *others][:MAX_COLUMNS] + [column for column in LAST if column in samples]


def sample_table(result: AnalyzeResult) -> DataTable:
    """The table of the samples to look at."""
    listed = listed_samples(result.samples)
    columns, meanings = shown_columns(result), meanings_of(result)
    headings = [_heading(column, meanings, loss_unit(result.manifest)) for column in columns]
    write = {column: writer(column, result.class_names) for column in columns}
    if "group" in columns:
        by = at(result.manifest, "outliers", "groups", "by")
        write["group"] = lambda value: group_words(value, by, result.class_names)
    predicted = columns.index("prediction") if "prediction" in columns else 0
    rows = [
        TableRow(
            [write[column](record[column]) for column in columns],
            sample=int(record["index"]),
            differs=frozenset([predicted]) if differs else frozenset(),
        )
        for record, differs in zip(listed.to_dict("records"), disagrees(listed), strict=True)
    ]
    return DataTable("samples", "The samples to look at first", headings, rows)


def values_table(result: AnalyzeResult) -> DataTable | None:
    """The inputs of the first ranks, where they are rows of a table: a column a value."""
    rows = top_samples(result.samples, len(result.top_inputs)).to_dict("records")
    known = {row["id"]: row for row in rows}
    shown = [each for each in result.top_inputs if each.values and each.id in known][:MAX_VALUE_ROWS]
    if not shown:
        return None
    names = list(dict.fromkeys(name for each in shown for name, _ in each.values))
    classes = [column for column in ("target", "prediction") if column in result.samples]
    headings = [
        Heading("rank", "rank", True, sorted=True),
        Heading("id", "id"),
        *(_heading(column, {}, "") for column in classes),
        *(Heading(key_of(name), brief(name, 60), True) for name in names[:MAX_VALUES]),
    ]
    cells = [
        [
            *(
                writer(column, result.class_names)(known[each.id][column])
                for column in ("rank", "id", *classes)
            ),
            *(value_words(dict(each.values).get(name)) for name in names[:MAX_VALUES]),
        ]
        for each in shown
    ]
    note = f"The first {MAX_VALUES} of {len(names):,} values are shown." if len(names) > MAX_VALUES else ""
    table_rows = [
        TableRow(each, sample=int(known[sample.id]["index"]))
        for each, sample in zip(cells, shown, strict=True)
    ]
    return DataTable("values", "The values of the top samples", headings, table_rows, note)


def writer(column: str, class_names: list[str] | None) -> Callable[[Any], str]:
    """How the values of a column are written."""
    if column in ("target", "prediction"):
        return lambda value: label(value, class_names)
    if column == "id":
        return identifier
    if column == "rank":
        return str
    if column == "percentile":
        return lambda value: MISSING if pd.isna(value) else percentile(value)
    if column == "confidence":
        return lambda value: MISSING if pd.isna(value) else percent(value)
    if column == "reasons":
        return lambda value: brief(value if isinstance(value, str) else cell(value), 160)
    if column in KNOWN and KNOWN[column].numeric:
        return number
    return cell


def _heading(column: str, meanings: Mapping[str, str], unit: str) -> Heading:
    known = KNOWN.get(column) or LAST.get(column)
    if known:
        key = {"target": "label"}.get(column, column)
        return Heading(
            key, known.words, known.numeric, known.meaning.replace("{unit}", unit), sorted=column == "rank"
        )
    return Heading(key_of(column), words_of(column), True, brief(meanings.get(column, ""), 300))


MAX_POINTS = 4000  # single samples drawn as pixels; above, they are binned

# What the samples in orange are called: the first ranks, or those that a reference tells from trusted ones.
LISTED, UNLIKE = "review list", "unlike the reference"

NORM_AXIS = "gradient norm (L2 over all trainable parameters, log scale)"


def loss_against_norm(samples: pd.DataFrame, unit: str = "", listed: str = LISTED) -> Plot:
    """Each sample's loss, in a unit, against its norm: points while they can be told apart, binned above
    that.
    """
    log_loss = bool((samples.loc[samples["status"] == "ok", "loss"] >= 0).all())
    drawn, not_drawn = drawable(samples, ["grad_norm", "loss"] if log_loss else ["grad_norm"])
    figure, axes = figure_with_axes(4.2)
    alt = "Loss against gradient norm: nothing to draw."
    caption = (
        "One point a sample. Wherever the two orders disagree, neither is right by itself: look at both. "
    )
    if not len(drawn):
        say_empty(axes)
    else:
        caption += _draw_points(axes, drawn, listed)
        alt = (
            f"Loss against gradient norm of {count(len(drawn))},"
            f" {count(int(drawn['is_outlier_issue'].sum()))} of them listed."
        )
        log_axis(axes, "x")
        if log_loss:
            log_axis(axes, "y")
        axes.set(xlabel=NORM_AXIS, ylabel=f"loss ({unit})" if unit else "loss")
        if axes.get_legend_handles_labels()[0]:
            legend_above(axes, columns=2)
        if drawn["loss"].nunique() > 1 and drawn["grad_norm"].nunique() > 1:
            spearman = drawn["loss"].rank().corr(drawn["grad_norm"].rank())
            caption += f"Rank correlation of loss and norm (Spearman): {correlation(spearman)}. "
            alt += f" Their rank correlation is {correlation(spearman)}."
    return Plot(
        "loss_against_norm", "Loss against gradient norm", caption + not_drawn, figure, vector=False, alt=alt
    )


def linked_svg(plot: Plot, listed: pd.DataFrame, class_names: list[str] | None) -> str:
    """The figure of `loss_against_norm` as SVG for inside the page: each listed sample is an element of its
    own, marked with the sample's row (data-s).

    The other samples are pixels in it. Its colours are the page's own. The figure is changed: its file must
    be written before.
    """
    (axes,) = plot.figure.axes
    for artist in axes.collections:
        artist.set_rasterized(True)
    drawn = plot.adaptive_svg().decode("utf-8")
    log_loss = axes.get_yscale() == "log"
    there = listed[(listed["grad_norm"] > 0) & ((listed["loss"] > 0) | (not log_loss))]
    inside = (
        (axes.transData - axes.transAxes).transform(there[["grad_norm", "loss"]].to_numpy(np.float64))
        if len(there)
        else ()
    )
    box, (width, height) = axes.get_position(), 72 * plot.figure.get_size_inches()
    marks = [
        _mark(row, width * (box.x0 + x * box.width), height * (1 - box.y0 - y * box.height), class_names)
        for row, (x, y) in zip(there.assign(differs=disagrees(there)).to_dict("records"), inside, strict=True)
    ]
    return _page_svg(drawn, plot.alt, "".join(marks))


def _mark(row: dict[Any, Any], x: float, y: float, class_names: list[str] | None) -> str:
    """A listed sample as an element of its own, at a place in points: artists of matplotlib take ten times as
    long.
    """
    form = f"M{x:.2f},{y:.2f}{_CROSS if row['differs'] else _DISC}"
    colour = "review" if row["is_outlier_issue"] else "rest"
    words = html.escape(_point_words(row, class_names))
    return (
        f'<g class="pt" data-s="{int(row["index"])}"><title>{words}</title><path d="{form}" style="fill:'
        f' var(--plot-{colour}); stroke: var(--plot-ink); stroke-width: 0.6"/></g>'
    )


# From the middle on: a disc and a cross of the size of the other points, and a little more.
_DISC = "m-2.75,0a2.75,2.75 0 1,0 5.5,0a2.75,2.75 0 1,0 -5.5,0z"
_CROSS = (
    "m0,-1.6l1.6,-1.6l1.6,1.6l-1.6,1.6l1.6,1.6l-1.6,1.6"
    "l-1.6,-1.6l-1.6,1.6l-1.6,-1.6l1.6,-1.6l-1.6,-1.6l1.6,-1.6z"
)


def _point_words(row: dict[Any, Any], class_names: list[str] | None) -> str:
    about = (
        f", label {label(row['target'], class_names)}"
        if "target" in row and not np.ndim(row["target"])
        else ""
    )
    return f"{identifier(row['id'])}{about}: norm {number(row['grad_norm'])}, loss {number(row['loss'])}"


def _page_svg(drawn: str, alt: str, marks: str) -> str:
    """An SVG of matplotlib's as an element of the page: no ids that another figure may have, no comments,
    colours by name.
    """
    drawn = drawn[drawn.index("<svg") :]
    drawn = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>|<style.*?</style>", "", drawn, flags=re.DOTALL)
    box = re.search(r'viewBox="[-0-9. ]+"', drawn)
    assert box is not None
    drawn = drawn[drawn.index(">") + 1 :]
    for name, light, _ in SHADES:
        drawn = drawn.replace(light, f"var(--plot-{name})")
    drawn = re.sub(r'(\bid="|href="#|url\(#)', r"\1scatter-", drawn)
    return (
        f'<svg class="scatter" {box[0]} role="img"'
        f' aria-label="{html.escape(alt)}">{drawn.strip().removesuffix("</svg>")}{marks}</svg>'
    )


def drawable(samples: pd.DataFrame, positive: list[str]) -> tuple[pd.DataFrame, str]:
    """The rows that a log axis can show, and a sentence that counts the others."""
    finite = samples[samples["status"] == "ok"]
    drawn = finite[(finite[positive] > 0).all(axis=1)]
    missing = [
        f"{count:,} {what}"
        for count, what in (
            (int((samples["status"] == "nonfinite").sum()), "with a loss or gradient that is not finite"),
            (int((samples["status"] == "skipped").sum()), "that could not be judged"),
            (
                len(finite) - len(drawn),
                f"with a {' or '.join(_SHORT[column] for column in positive)} of exactly zero",
            ),
        )
        if count
    ]
    return drawn, f"Not drawn: {' and '.join(missing)}." if missing else ""


_SHORT = {"grad_norm": "norm", "loss": "loss"}


def _draw_points(axes: Axes, drawn: pd.DataFrame, listed: str) -> str:
    """Draw loss against norm, either group as points or, where it has too many, binned; returns what the
    caption must add.
    """
    binned = []
    for in_review, colour, words in ((False, REST, "other samples"), (True, REVIEW, listed)):
        rows = drawn[drawn["is_outlier_issue"] == in_review]
        if len(rows) > MAX_POINTS:
            _draw_density(axes, rows, within=drawn, colour=colour)
            binned.append(words)
        else:
            wrong = disagrees(rows)
            _scatter(axes, rows[~wrong], colour, "o", words)
            _scatter(axes, rows[wrong], colour, "x", f"{words}, prediction differs from label")
    return (
        f"Blue: other samples; orange: {listed}. Binned, darker for more samples (log shade):"
        f" {' and '.join(binned)}. "
        if binned
        else ""
    )


def _scatter(axes: Axes, rows: pd.DataFrame, colour: str, marker: str, words: str) -> None:
    if len(rows):
        axes.scatter(
            rows["grad_norm"],
            rows["loss"],
            s=16,
            color=colour,
            marker=marker,
            linewidths=1.1 if marker == "x" else 0,
            alpha=0.7,
            label=words,
        )


def _draw_density(axes: Axes, rows: pd.DataFrame, within: pd.DataFrame, colour: str) -> None:
    low, high = within["loss"].min(), within["loss"].max()
    across = log_bins(within["grad_norm"].to_numpy(float), 110)
    up = (
        log_bins(within["loss"].to_numpy(float), 70)
        if low > 0
        else np.linspace(low, max(high, low + 1e-9), 71)
    )
    counts, _, _ = np.histogram2d(rows["grad_norm"], rows["loss"], bins=[across, up])
    shades = LinearSegmentedColormap.from_list(
        "shades", ["#e4e9ef", REST, DARK] if colour == REST else ["#f7dcc6", REVIEW, "#7a3403"]
    )
    axes.pcolormesh(
        across, up, np.where(counts > 0, counts, np.nan).T, cmap=shades, norm=LogNorm(vmin=1), rasterized=True
    )
