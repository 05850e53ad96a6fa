"""The end of an evaluation on a terminal: what was retrained, and a row for each method and each control."""

from __future__ import annotations

import json
import math
from collections.abc import Hashable, Mapping
from typing import Any, TextIO

import pandas as pd
from rich.table import Table
from rich.text import Text

from psgrad.reports.privacy import facts_lines
from psgrad.reports.terminal import print_table
from psgrad.reports.words import MISSING, count, printable
from psgrad.results.evaluation import HEADLINE, EvaluationResult, evaluation_content

TITLES: Mapping[str, str] = {
    "lds": "linear datamodeling score (rank correlation of summed scores with what models retrained on subsets say)",
    "loo": "leave-one-out (what models retrained without one example say, against what was predicted)",
    "mislabel": "mislabel detection (labels flipped on purpose, found by self-influence)",
    "removal": "removal (rise of the query's measurement when its strongest proponents are left out)",
}


def write_evaluation(result: EvaluationResult, style: str, stream: TextIO) -> None:
    """style: 'terminal', the facts, the table and the folder last, or 'json', the content of evaluation.json."""
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
        return f"{models}: {facts['subsets']:,} subsets of {facts['fraction']:.0%} of the rows, {count(facts['seeds'], 'seed')} each"
    if result.kind == "loo":
        return f"{models}: without each of {count(facts['removals'], 'example')}, {facts['highest']} of them of the highest influence"
    if result.kind == "mislabel":
        return f"{models}: {count(facts['flips'], 'set')} of flips, {facts['share']:.0%} of the labels each, and cross-validation"
    return f"{models}: without the strongest proponents of each of {facts['queries']:,} queries, {count(facts['seeds'], 'seed')} each"


def ceiling_words(facts: Mapping[str, Any]) -> str:
    """How much of the truth is noise of retraining."""
    if facts.get("ceiling") is None:
        return "one training each, so that what the seeds do is not known"
    return (
        f"best reachable {facts['ceiling']:.3f} (one seed agrees with another to {facts['single_seed']:.3f}, the mean over the seeds with "
        f"such a mean to {facts['reliability']:.3f})"
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
    """The rows by the kind's first number, the largest first; of removal by method, in order of what the most removed examples bring."""
    if kind != "removal":
        return table.sort_values(HEADLINE[kind], ascending=False, kind="stable")
    last = table[table["removed"] == table["removed"].max()].set_index("method")["rise"]
    return table.assign(_last=table["method"].map(last)).sort_values(["_last", "method", "removed"], ascending=[False, True, True])


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
    return f"{math.trunc(value * 10**digits) / 10**digits:.{digits}f}" if abs(float(text)) == 1 > abs(value) else text


def _interval(row: Row, low: str = "low", high: str = "high", digits: int = 3) -> str:
    return MISSING if pd.isna(row[low]) else f"{row[low]:.{digits}f} to {row[high]:.{digits}f}"


def _with_deviation(name: str) -> Any:
    return lambda row: _decimals(row[name]) + ("" if pd.isna(row[f"{name}_deviation"]) else f" ± {row[f'{name}_deviation']:.3f}")


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
