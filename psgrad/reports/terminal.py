"""The end of a run on a terminal.

A finished run as one JSON object, for the next program: `psgrad analyze --json`.

A plain list of records, in the formats that people, shells and pages read.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from psgrad.reports.outlier_sections import OFFER, OPTION, rankings_of
from psgrad.reports.words import count, group_words, identifier, label, number, percentile, printable
from psgrad.results import AnalyzeResult, top_samples
from psgrad.results.analyze import check_record

# Wide enough that a table in a pipe or a file is never cut to some screen's width.
PIPE_WIDTH = 240


def top_table(result: AnalyzeResult, n: int) -> Table:
    """The first n ranks. What nobody has is left out: labels where there are none, q-values where there was
    no reference.
    """
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
    there = {
        column
        for column in ("target", "prediction", "q_value")
        if column in samples and samples[column].notna().any()
    }
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
    columns += [
        ("loss", True, lambda row: number(row["loss"])),
        ("gradient norm", True, lambda row: number(row["grad_norm"])),
    ]
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
        lines.append(
            printable(
                undecided if not judged.get("evaluable") else f"resolution limit: {judged.get('resolution')}"
            )
        )
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
            lines.append(
                f"mixed precision: a plain gradient differs from float32's by up to {apart} of its norm on"
                " these samples"
            )
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


SCHEMA_VERSION = 1


def run_record(result: AnalyzeResult, top: int) -> dict[str, Any]:
    """Plain values that JSON has: numbers that are not finite are null.

    schema_version, folder; samples, in_dataset and partial (whether rows were left out); nonfinite, review;
    top: the samples with the largest gradient norms with all their columns; measures: the numbers of each;
    self_check, engine, timings (s) as in manifest.json; check: the gate's verdict without its findings, which
    are in findings.jsonl, or null.
    """
    counts = result.manifest.get("counts") or {}
    samples = result.samples
    in_dataset = counts.get("in_dataset", len(samples))
    record = {
        "schema_version": SCHEMA_VERSION,
        "folder": str(result.folder),
        "samples": len(samples),
        "in_dataset": in_dataset,
        "partial": len(samples) < in_dataset,
        "nonfinite": int((samples["status"] == "nonfinite").sum()),
        "review": int((samples["is_outlier_issue"] & (samples["status"] == "ok")).sum()),
        "top": json.loads(top_samples(samples, top).to_json(orient="records", double_precision=15)),
        "measures": {name: dict(measure.numbers) for name, measure in result.measures.items()},
        **{about: result.manifest.get(about) for about in ("self_check", "engine", "timings")},
        "check": None if result.check is None else check_record(result.check),
    }
    found: dict[str, Any] = json.loads(json.dumps(record, default=str), parse_constant=lambda _: None)
    return found


def write_listing(headings: Sequence[str], rows: Sequence[Sequence[str]], style: str, stream: TextIO) -> None:
    """style: 'terminal', 'json' (a list of objects), 'csv' or 'markdown'."""
    if style == "json":
        json.dump([dict(zip(headings, row, strict=True)) for row in rows], stream, indent=2)
        stream.write("\n")
    elif style == "csv":
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerows([headings, *rows])
    elif style == "markdown":
        stream.writelines(
            f"| {' | '.join(cells)} |\n" for cells in (headings, ["---"] * len(headings), *rows)
        )
    else:
        table = Table(*headings, box=None, pad_edge=False, header_style="bold")
        for row in rows:
            table.add_row(*map(Text, row))
        print_table(table, stream)
