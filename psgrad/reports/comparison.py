"""Two runs side by side, in the formats that people and shells read."""

from __future__ import annotations

import csv
import io
from collections.abc import Hashable
from typing import Any

import pandas as pd

from psgrad.reports.ci_data import cell
from psgrad.reports.ci_text import code, plain
from psgrad.reports.ci_words import clean
from psgrad.reports.tables import Table, TableColumn, table
from psgrad.reports.terminal import print_table, write_json
from psgrad.reports.words import MISSING, count, identifier, number, percentile
from psgrad.results.findings import Comparison
from psgrad.wording import correlation

FORMATS = ("terminal", "json", "csv", "markdown")

TITLES = {"rose": "Rose most", "fell": "Fell most", "came": "Came", "went": "Went"}


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


def tables(result: Comparison) -> list[Table]:
    """A table for each change that there is, and one of the groups. Cells are on one line and bounded, ids
    are not escaped.
    """
    found = []
    for change, title in TITLES.items():
        rows = result.changes[result.changes["change"] == change].to_dict("records")
        if rows:
            caption = f"{title} ({len(rows):,} of {result.counts[change]:,})"
            found.append(table(change, caption, _CHANGES, rows, tall=False))
    if len(result.groups):
        rows = result.groups.to_dict("records")
        found.append(table("groups", "Groups, the least alike first", _GROUPS, rows, tall=False))
    return found


def _number(words: str, key: str) -> TableColumn:
    return TableColumn(words, lambda row: number(row[key]), True)


def _percentile(words: str, key: str) -> TableColumn:
    return TableColumn(words, lambda row: MISSING if pd.isna(row[key]) else percentile(row[key]), True)


def _count(words: str, key: str) -> TableColumn:
    return TableColumn(words, lambda row: f"{row[key]:,}", True)


_CHANGES = (
    TableColumn("sample", lambda row: clean(identifier(row["id"])), key="id"),
    _number("score in A", "score_a"),
    _number("score in B", "score_b"),
    _percentile("percentile in A", "percentile_a"),
    _percentile("percentile in B", "percentile_b"),
    TableColumn("moved", lambda row: MISSING if pd.isna(row["moved"]) else f"{row['moved']:+.2f}", True),
    TableColumn("list", lambda row: row["list"], True),
)
_GROUPS = (
    TableColumn("group", lambda row: clean(identifier(row["group"])), key="id"),
    _count("samples", "samples"),
    TableColumn("rank correlation", lambda row: correlation(row["spearman"]), True),
    _number("median in A", "median_a"),
    _number("median in B", "median_b"),
    _count("entered", "entered"),
    _count("left", "left"),
)


def _terminal(result: Comparison) -> str:
    lines = io.StringIO()
    lines.writelines(f"{clean(line)}\n" for line in (f"A: {result.a}", f"B: {result.b}", *sentences(result)))
    lines.writelines(f"warning: {clean(warning)}\n" for warning in result.warnings)
    for each in tables(result):
        lines.write(f"\n{each.caption}\n")
        print_table(each, lines)
    return lines.getvalue()


def _json(result: Comparison) -> str:
    keys = ("a", "b", "score", "tail", "counts", "spearman", "warnings")
    content = {
        "version": 1,
        **{key: getattr(result, key) for key in keys},
        "changes": [_plain_values(row) for row in result.changes.to_dict("records")],
        "groups": [_plain_values(row) for row in result.groups.to_dict("records")],
    }
    stream = io.StringIO()
    write_json(content, stream)
    return stream.getvalue()


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
        *(f"- warning: {plain(clean(warning))}" for warning in result.warnings),
    ]
    for each in tables(result):
        headings = [column.words for column in each.columns]
        rows = [[code(row.cells[0]), *map(plain, row.cells[1:])] for row in each.rows]
        lines += ["", f"#### {plain(each.caption)}", ""]
        lines += [f"| {' | '.join(cells)} |" for cells in (headings, ["---"] * len(headings), *rows)]
    return "\n".join(lines) + "\n"
