"""Two runs side by side, on a terminal or as JSON."""

from __future__ import annotations

import io
from collections.abc import Hashable
from typing import Any

import pandas as pd

from psgrad.reports.ci import clean
from psgrad.reports.tables import Table, TableColumn, number_column, table
from psgrad.reports.terminal import print_table, write_json
from psgrad.reports.words import MISSING, count, identifier, percentile
from psgrad.run.results.check import Comparison
from psgrad.wording import correlation

TITLES = {"rose": "Rose most", "fell": "Fell most", "came": "Came", "went": "Went"}


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
    """A table for each change that there is. Cells are on one line and bounded, ids are not escaped."""
    columns = (
        TableColumn("sample", lambda row: clean(identifier(row["id"])), key="id"),
        number_column("score_a", "score in A"),
        number_column("score_b", "score in B"),
        number_column("percentile_a", "percentile in A", write=_percentile),
        number_column("percentile_b", "percentile in B", write=_percentile),
        number_column("moved", "moved", write=lambda value: MISSING if pd.isna(value) else f"{value:+.2f}"),
        number_column("list", "list", write=str),
    )
    found = []
    for change, title in TITLES.items():
        rows = result.changes[result.changes["change"] == change].to_dict("records")
        if rows:
            caption = f"{title} ({len(rows):,} of {result.counts[change]:,})"
            found.append(table(change, caption, columns, rows))
    return found


def _percentile(value: float) -> str:
    return MISSING if pd.isna(value) else percentile(value)


def render_comparison(result: Comparison, style: str) -> str:
    """A comparison in one of the formats 'terminal' and 'json'."""
    stream = io.StringIO()
    if style == "json":
        keys = ("a", "b", "score", "tail", "counts", "spearman", "warnings")
        changes = [_plain_values(row) for row in result.changes.to_dict("records")]
        about = {key: getattr(result, key) for key in keys}
        write_json({"version": 1, **about, "changes": changes}, stream)
        return stream.getvalue()
    lines = [f"A: {result.a}", f"B: {result.b}", *sentences(result)]
    lines += [f"warning: {warning}" for warning in result.warnings]
    stream.writelines(f"{clean(line)}\n" for line in lines)
    for each in tables(result):
        stream.write(f"\n{each.caption}\n")
        print_table(each, stream)
    return stream.getvalue()


def _plain_values(row: dict[Hashable, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {
        str(key): None if not isinstance(value, str) and pd.isna(value) else value
        for key, value in row.items()
    }
    # Rows are floats in the frame, as one of the two may be missing.
    return found | {key: int(found[key]) for key in ("row_a", "row_b") if found.get(key) is not None}
