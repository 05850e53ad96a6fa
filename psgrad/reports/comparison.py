"""Two runs side by side, in the formats that people, shells and pages read.

Two runs as one figure and as one page that needs nothing else.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Hashable, Iterable
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from rich.table import Table
from rich.text import Text

from psgrad.reports.ci.as_csv import cell
from psgrad.reports.ci.markdown import code, plain
from psgrad.reports.ci.words import clean
from psgrad.reports.drawing import DARK, QUIET, REST, Plot, figure_with_axes, say_empty
from psgrad.reports.outlier_sections import score_words
from psgrad.reports.page import plot_uri, templates
from psgrad.reports.terminal import print_table
from psgrad.reports.ticks import log_axis
from psgrad.reports.words import MISSING, count, identifier, number, percentile
from psgrad.results.findings import Comparison
from psgrad.wording import correlation

FORMATS = ("terminal", "json", "csv", "markdown")

TITLES = {"rose": "Rose most", "fell": "Fell most", "came": "Came", "went": "Went"}
HEADINGS = ("sample", "score in A", "score in B", "percentile in A", "percentile in B", "moved", "list")
GROUP_HEADINGS = ("group", "samples", "rank correlation", "median in A", "median in B", "entered", "left")


def render_comparison(result: Comparison, style: str) -> str:
    """A comparison in one of FORMATS."""
    return {"terminal": _terminal, "json": _json, "csv": _csv, "markdown": _markdown}[style](result)


def sentences(result: Comparison) -> list[str]:
    """The comparison in a few sentences."""
    n, order = result.counts, correlation(result.spearman)
    return [
        (
            f"{count(n['common'])} in both, {n['came']:,} came, {n['went']:,} went (A has {n['samples_a']:,},"
            f" B {n['samples_b']:,})"
        ),
        (
            f"{result.score}: rank correlation (Spearman) {order}; {n['rose']:,} rose and {n['fell']:,} fell"
            " in percentile"
        ),
        f"{n['entered']:,} entered the list of B and {n['left']:,} left that of A",
    ]


def sections(result: Comparison) -> list[tuple[str, list[tuple[str, ...]]]]:
    """(title, rows of cells under HEADINGS) for each change that there is. Cells are on one line and bounded,
    ids are not escaped.
    """
    found = []
    for change, title in TITLES.items():
        rows = result.changes[result.changes["change"] == change].to_dict("records")
        if rows:
            found.append(
                (f"{title} ({len(rows):,} of {result.counts[change]:,})", [_cells(row) for row in rows])
            )
    return found


def group_cells(result: Comparison) -> list[tuple[str, ...]]:
    """Rows of cells under GROUP_HEADINGS."""

    def cells(row: dict[Hashable, Any]) -> tuple[str, ...]:
        numbers = correlation(row["spearman"]), number(row["median_a"]), number(row["median_b"])
        return (
            clean(identifier(row["group"])),
            f"{row['samples']:,}",
            *numbers,
            f"{row['entered']:,}",
            f"{row['left']:,}",
        )

    return [cells(row) for row in result.groups.to_dict("records")]


def _cells(row: dict[Hashable, Any]) -> tuple[str, ...]:
    moved = MISSING if pd.isna(row["moved"]) else f"{row['moved']:+.2f}"
    scores = (number(row[key]) for key in ("score_a", "score_b"))
    places = (
        MISSING if pd.isna(row[key]) else percentile(row[key]) for key in ("percentile_a", "percentile_b")
    )
    return (clean(identifier(row["id"])), *scores, *places, moved, row["list"])


def _terminal(result: Comparison) -> str:
    lines = io.StringIO()
    lines.writelines(f"{clean(line)}\n" for line in (f"A: {result.a}", f"B: {result.b}", *sentences(result)))
    lines.writelines(f"warning: {clean(warning)}\n" for warning in result.warnings)
    for title, rows in sections(result):
        lines.write(f"\n{title}\n")
        print_table(_table(HEADINGS, rows), lines)
    if len(result.groups):
        lines.write("\nGroups, the least alike first\n")
        print_table(_table(GROUP_HEADINGS, group_cells(result)), lines)
    return lines.getvalue()


def _table(headings: Iterable[str], rows: Iterable[tuple[str, ...]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="right" if place else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _json(result: Comparison) -> str:
    content = {
        "version": 1,
        **{
            key: getattr(result, key) for key in ("a", "b", "score", "tail", "counts", "spearman", "warnings")
        },
        "changes": [_plain_values(row) for row in result.changes.to_dict("records")],
        "groups": [_plain_values(row) for row in result.groups.to_dict("records")],
    }
    return json.dumps(content, indent=2, allow_nan=False) + "\n"


def _plain_values(row: dict[Hashable, Any]) -> dict[str, Any]:
    values = {
        str(key): None if not isinstance(value, str) and pd.isna(value) else value
        for key, value in row.items()
    }
    # Rows are floats in the frame, as one of the two may be missing.
    return {
        key: int(value) if key in ("row_a", "row_b") and value is not None else value
        for key, value in values.items()
    }


def _csv(result: Comparison) -> str:
    lines = io.StringIO()
    writer = csv.writer(lines, lineterminator="\n")
    writer.writerow(result.changes.columns)
    for row in result.changes.to_dict("records"):
        writer.writerow(
            [cell(value) if isinstance(value, str) else value for value in _plain_values(row).values()]
        )
    return lines.getvalue()


def _markdown(result: Comparison) -> str:
    lines = [
        f"### psgrad diff {code(clean(result.a))} {code(clean(result.b))}",
        "",
        *(f"- {plain(line)}" for line in sentences(result)),
    ]
    lines += [f"- warning: {plain(clean(warning))}" for warning in result.warnings]
    groups = (
        [("Groups, the least alike first", GROUP_HEADINGS, group_cells(result))] if len(result.groups) else []
    )
    for title, headings, rows in [*((title, HEADINGS, rows) for title, rows in sections(result)), *groups]:
        lines += [
            "",
            f"#### {plain(title)}",
            "",
            f"| {' | '.join(headings)} |",
            f"| {' | '.join(['---'] * len(headings))} |",
        ]
        lines += [f"| {' | '.join([code(row[0]), *map(plain, row[1:])])} |" for row in rows]
    return "\n".join(lines) + "\n"


MAX_POINTS = 4000  # above, they are binned
_BINS = 160
_HEADLINE = {
    "common": "samples in both",
    "came": "came",
    "went": "went",
    "entered": "entered the list",
    "left": "left the list",
}


def draw_comparison(result: Comparison) -> Plot:
    """Each common sample's score in B against that in A; on the line nothing has changed."""
    a, b = (result.common[column].to_numpy(float) for column in ("score_a", "score_b"))
    figure, axes = figure_with_axes(5.0)
    log = len(a) > 0 and min(a.min(), b.min()) > 0
    if not len(a):
        say_empty(axes, "no sample has a finite score in both")
    else:
        low, high = min(a.min(), b.min()), max(a.max(), b.max())
        axes.plot([low, high], [low, high], color=QUIET, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
        if len(a) <= MAX_POINTS:
            axes.scatter(a, b, s=9, color=REST, alpha=0.6, linewidths=0, zorder=2)
        else:
            edges = np.geomspace(low, high, _BINS) if log else np.linspace(low, high, _BINS)
            colours = LinearSegmentedColormap.from_list("", [REST + "55", DARK])
            binned = np.histogram2d(a, b, bins=[edges, edges])[0].T
            drawn = axes.pcolormesh(
                edges, edges, np.where(binned > 0, binned, np.nan), norm=LogNorm(), cmap=colours, zorder=2
            )
            figure.colorbar(drawn, ax=axes, label="samples per bin (log scale)")
        if log:
            log_axis(axes, "x", "y")
        scale = " (log scale)" if log else ""
        axes.set_xlabel(f"{score_words(clean(result.score))} in A{scale}", parse_math=False)
        axes.set_ylabel(f"{score_words(clean(result.score))} in B{scale}", parse_math=False)
    caption = (
        f"{count(len(a))} that are in both runs and have a score in both. On the line nothing has changed. "
    )
    alt = f"{clean(result.score)} in run B against run A; {sentences(result)[1]}."
    return Plot("comparison", "Score in B against A", caption, figure, vector=False, alt=alt)


def render_page(result: Comparison) -> str:
    """The comparison as HTML. All text of the data is escaped."""
    plot = draw_comparison(result)
    return templates.get_template("comparison.html").render(
        title="Two runs compared",
        a=clean(result.a),
        b=clean(result.b),
        headline=[
            (correlation(result.spearman), "rank correlation (Spearman)"),
            *((f"{result.counts[key]:,}", words) for key, words in _HEADLINE.items()),
        ],
        facts=[
            ("Run A", clean(result.a)),
            ("Run B", clean(result.b)),
            ("Score", score_words(clean(result.score))),
        ],
        made="",
        notes=[],
        sentences=sentences(result),
        warnings=[clean(warning) for warning in result.warnings],
        plot=plot,
        image=plot_uri(plot),
        headings=HEADINGS,
        sections=sections(result),
        group_headings=GROUP_HEADINGS,
        groups=group_cells(result),
    )
