"""The end of a run on a terminal."""

from __future__ import annotations

import io
from collections.abc import Callable, Hashable
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from psgrad.reports.rankings import OFFER, OPTION, rankings_of
from psgrad.reports.words import count, group_words, identifier, label, number, percentile, printable
from psgrad.results import AnalyzeResult, top_samples

# Wide enough that a table in a pipe or a file is never cut to some screen's width.
PIPE_WIDTH = 240


def top_table(result: AnalyzeResult, n: int) -> Table:
    """The first n ranks. What nobody has is left out: labels where there are none, q-values where there was no reference."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    columns = _columns(result)
    for heading, numeric, _ in columns:
        table.add_column(heading, justify="right" if numeric else "left", no_wrap=numeric, overflow="fold")
    for row in top_samples(result.samples, n).to_dict("records"):
        # Text objects: an id such as "[red]" is no markup here.
        table.add_row(*(Text(words(row)) for _, _, words in columns))
    return table


Row = dict[Hashable, Any]


def _columns(result: AnalyzeResult) -> list[tuple[str, bool, Callable[[Row], str]]]:
    """(heading, whether it is a number, a row's words)."""
    samples, names = result.samples, result.class_names
    there = {column for column in ("target", "prediction", "q_value") if column in samples and samples[column].notna().any()}
    judged_by = str(((result.manifest.get("outliers") or {}).get("score")) or "grad_norm")
    columns: list[tuple[str, bool, Callable[[Row], str]]] = [
        ("rank", True, lambda row: str(row["rank"])),
        ("id", False, lambda row: identifier(row["id"])),
    ]
    if "target" in there:
        columns.append(("label", False, lambda row: label(row["target"], names)))
    if "prediction" in there:
        columns.append(("prediction", False, lambda row: label(row["prediction"], names)))
    if "group" in samples and samples["group"].nunique() > 1:
        by = ((result.manifest.get("outliers") or {}).get("groups") or {}).get("by")
        columns.append(("group", False, lambda row: group_words(row["group"], by, names)))
    columns += [("loss", True, lambda row: number(row["loss"])), ("gradient norm", True, lambda row: number(row["grad_norm"]))]
    if judged_by not in ("loss", "grad_norm", "log_norm") and judged_by in samples:
        columns.append((judged_by, True, lambda row: number(row[judged_by])))
    columns.append(("percentile", True, lambda row: percentile(row["percentile"])))
    if "q_value" in there:
        columns.append(("q-value", True, lambda row: number(row["q_value"])))
    return columns


def summary(result: AnalyzeResult) -> str:
    """What was done and found, in a few lines."""
    samples, judged = result.samples, result.manifest.get("outliers") or {}
    nonfinite = int((samples["status"] == "nonfinite").sum())
    listed = int((samples["is_outlier_issue"] & (samples["status"] == "ok")).sum())
    referenced = judged.get("decided_by") == "reference"
    found = (
        f"{listed:,} unlike the reference at a false discovery rate of {number(judged.get('fdr'))}"
        if referenced
        else f"{listed:,} in the review list (a list to look at, not a verdict)"
    )
    lines = [f"{count(len(samples))}, {found}, {nonfinite:,} with a loss or gradient that is not finite"]
    if referenced:
        undecided = f"not evaluable: {judged.get('why_not')}"
        lines.append(printable(undecided if not judged.get("evaluable") else f"resolution limit: {judged.get('resolution')}"))
    if rankings := rankings_of(judged):
        lines.append(printable(rankings.sentence))
        if rankings.disagree and rankings.offers_loss:
            lines.append(f"{OFFER}: {OPTION} ranks and judges by it")
    check = result.manifest.get("self_check") or {}
    if check.get("samples"):
        lines.append(
            f"self-check: worst relative error {number(check.get('worst_relative_error'))} "
            f"over {check['samples']} samples, against a plain one-sample gradient"
        )
        if "worst_error_of_autocast" in check:
            apart = number(check["worst_error_of_autocast"])
            lines.append(f"mixed precision: a plain gradient differs from float32's by up to {apart} of its norm on these samples")
    elif check.get("reason"):
        lines.append(f"self-check: skipped, as {check['reason']}")
    return "\n".join(lines)


def print_table(table: Table, stream: TextIO) -> None:
    """Print the table: fitted to a terminal, uncut and plain elsewhere."""
    if stream.isatty():
        Console(file=stream, force_terminal=True, highlight=False).print(table)
        return
    lines = io.StringIO()
    Console(file=lines, width=PIPE_WIDTH, force_terminal=False, highlight=False).print(table)
    stream.writelines(f"{line.rstrip()}\n" for line in lines.getvalue().splitlines())
