"""The end of an evaluation on a terminal: what was retrained, and a row for each method and each control."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TextIO

import pandas as pd

from psgrad.reports.tables import Table, TableColumn, Writer, table
from psgrad.reports.terminal import facts_lines, print_table, write_json
from psgrad.reports.words import MISSING, count, printable
from psgrad.run.results.influence_evaluation import (
    HEADLINE,
    EvaluationResult,
    Retrained,
    evaluation_content,
)

Row = Mapping[Hashable, Any]

TITLES: Mapping[str, str] = {
    "lds": (
        "linear datamodeling score (rank correlation of summed scores with what models retrained on subsets"
        " say)"
    ),
    "loo": "leave-one-out (what models retrained without one example say, against what was predicted)",
    "removal": "removal (rise of the query's measurement when its strongest proponents are left out)",
}


def write_evaluation(result: EvaluationResult, style: str, stream: TextIO) -> None:
    """style: 'terminal', the facts, the table and the folder last, or 'json', the content of
    evaluation.json.
    """
    if style == "json":
        write_json(evaluation_content(result), stream)
        return
    stream.write(facts_lines(evaluation_facts(result)) + "\n")
    print_table(evaluation_table(result), stream)
    for note in result.notes:
        stream.write(f"{printable(note)}\n")
    stream.write(f"{result.folder}\n")


def evaluation_facts(result: EvaluationResult) -> list[tuple[str, str]]:
    """What was done: (question, answer)."""
    found = [
        ("evaluated", TITLES[result.kind]),
        ("retrained", f"{count(result.retrained.models, 'model')}: {_trained_words(result)}"),
        ("queries", f"{result.retrained.queries:,}, each by the {result.unit}"),
    ]
    return found if result.kind == "removal" else [*found, ("noise", ceiling_words(result.retrained))]


def _trained_words(result: EvaluationResult) -> str:
    done, seeds = result.retrained, f"{count(result.retrained.seeds, 'seed')} each"
    if result.kind == "lds":
        return f"{done.subsets:,} subsets of {done.fraction:.0%} of the rows, {seeds}"
    if result.kind == "loo":
        removals = count(done.removals or 0, "example")
        return f"without each of {removals}, {done.highest} of them of the highest influence"
    return f"without the strongest proponents of each of {done.queries:,} queries, {seeds}"


def ceiling_words(done: Retrained) -> str:
    """How much of the truth is noise of retraining."""
    if done.ceiling is None:
        return "one training each, so that what the seeds do is not known"
    return (
        f"best reachable {done.ceiling:.3f} (one seed agrees with another to {done.single_seed:.3f},"
        f" the mean over the seeds with such a mean to {done.reliability:.3f})"
    )


def evaluation_table(result: EvaluationResult) -> Table:
    """A row a method, the best first, controls in their places among them."""
    columns = [TableColumn("method", method_name)]
    columns += [
        TableColumn(words.format(main=result.method), _cell(keys, form), True)
        for words, keys, form in _COLUMNS[result.kind]
    ]
    rows = ordered(result.table, result.kind).to_dict("records")
    return table("", "How well the scores did", columns, rows)


def method_name(row: Row) -> str:
    """A method's name, marked where it is a control."""
    return printable(f"{row['method']}{' (control)' if row['control'] else ''}")


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


def decimals(value: Any, digits: int = 3) -> str:
    """So many decimals, rounded towards zero where they would make it a 1 that it is not."""
    if value is None or pd.isna(value):
        return MISSING
    text = f"{value:.{digits}f}"
    if abs(float(text)) == 1 > abs(value):
        return f"{math.trunc(value * 10**digits) / 10**digits:.{digits}f}"
    return text


def _cell(keys: Sequence[str], form: str | int) -> Writer:
    """How a number is written, or two as an interval. form: so many decimals, or the format."""

    def write(row: Row) -> str:
        values = [row[key] for key in keys]
        if any(value is None or pd.isna(value) for value in values):
            return MISSING
        if isinstance(form, str):
            return form.format(*values)
        if len(values) == 1:
            return decimals(values[0], form)
        return " to ".join(f"{value:.{form}f}" for value in values)

    return write


_INTERVAL, _LEAD, _OF_LEAD = ["low", "high"], ["ahead"], ["ahead_low", "ahead_high"]
# Heading, columns of the table, and how they are written.
_COLUMNS: Mapping[str, list[tuple[str, list[str], str | int]]] = {
    "lds": [
        ("LDS", ["mean"], 3),
        ("95 % interval", _INTERVAL, 3),
        ("lead of {main}", _LEAD, 3),
        ("95 % interval of it", _OF_LEAD, 3),
        ("undefined", ["undefined"], "{:.0f}"),
    ],
    "loo": [
        ("Pearson", ["pearson"], 4),
        ("95 % interval", _INTERVAL, 4),
        ("Spearman", ["spearman"], 4),
        ("slope", ["slope"], 4),
        ("intercept", ["intercept"], "{:.2g}"),
        ("pooled", ["pooled"], 4),
        ("undefined", ["undefined"], "{:.0f}"),
    ],
    "removal": [
        ("removed", ["removed"], "{:.0f}"),
        ("rise", ["rise"], 4),
        ("95 % interval", _INTERVAL, 4),
        ("lead of {main}", _LEAD, 4),
        ("95 % interval of it", _OF_LEAD, 4),
    ],
}
