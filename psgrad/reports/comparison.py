"""Two runs side by side, in the formats that people and shells read."""

from __future__ import annotations

import io
from collections.abc import Hashable
from typing import Any

import pandas as pd

from psgrad.reports.ci_text import clean, code, plain
from psgrad.reports.tables import Table, TableColumn, number_column, table
from psgrad.reports.terminal import print_table, write_json
from psgrad.reports.words import MISSING, count, identifier, percentile
from psgrad.run.results.findings import Comparison
from psgrad.wording import correlation

TITLES = {"rose": "Rose most", "fell": "Fell most", "came": "Came", "went": "Went"}


def render_comparison(result: Comparison, style: str) -> str:
    """A comparison in one of the formats 'terminal', 'json' and 'markdown'."""
    return {"terminal": _terminal, "json": _json, "markdown": _markdown}[style](result)


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
            found.append(table(change, caption, _CHANGES, rows))
    if len(result.groups):
        rows = result.groups.to_dict("records")
        found.append(table("groups", "Groups, the least alike first", _GROUPS, rows))
    return found


def _percentile(value: float) -> str:
    return MISSING if pd.isna(value) else percentile(value)


def _moved(value: float) -> str:
    return MISSING if pd.isna(value) else f"{value:+.2f}"


def _whole(value: int) -> str:
    return f"{value:,}"


_CHANGES = (
    TableColumn("sample", lambda row: clean(identifier(row["id"])), key="id"),
    number_column("score_a", "score in A"),
    number_column("score_b", "score in B"),
    number_column("percentile_a", "percentile in A", write=_percentile),
    number_column("percentile_b", "percentile in B", write=_percentile),
    number_column("moved", "moved", write=_moved),
    number_column("list", "list", write=str),
)
_GROUPS = (
    TableColumn("group", lambda row: clean(identifier(row["group"])), key="id"),
    number_column("samples", "samples", write=_whole),
    number_column("spearman", "rank correlation", write=correlation),
    number_column("median_a", "median in A"),
    number_column("median_b", "median in B"),
    number_column("entered", "entered", write=_whole),
    number_column("left", "left", write=_whole),
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
    found: dict[str, Any] = {
        str(key): None if not isinstance(value, str) and pd.isna(value) else value
        for key, value in row.items()
    }
    # Rows are floats in the frame, as one of the two may be missing.
    return found | {key: int(found[key]) for key in ("row_a", "row_b") if found.get(key) is not None}


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
