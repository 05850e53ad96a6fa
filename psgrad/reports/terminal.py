"""The end of a run on a terminal."""

from __future__ import annotations

import io
from collections.abc import Hashable
from typing import Any, TextIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from psgrad.reports.words import count, identifier, label, number, percentile
from psgrad.results import AnalyzeResult, top_samples

# Wide enough that a table in a pipe or a file is never cut to some screen's width.
PIPE_WIDTH = 240


def top_table(result: AnalyzeResult, n: int) -> Table:
    """The n samples with the largest gradient norms."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading, numeric in (
        ("rank", True),
        ("id", False),
        ("label", False),
        ("prediction", False),
        ("loss", True),
        ("gradient norm", True),
        ("percentile", True),
    ):
        table.add_column(heading, justify="right" if numeric else "left", no_wrap=numeric, overflow="fold")
    for row in top_samples(result.samples, n).to_dict("records"):
        # Text objects: an id such as "[red]" is no markup here.
        table.add_row(*(Text(cell) for cell in _cells(row, result.class_names)))
    return table


def summary(result: AnalyzeResult) -> str:
    """What was done and found, in a line or two."""
    samples = result.samples
    nonfinite = int((samples["status"] != "ok").sum())
    review = int(samples["is_outlier_issue"].sum()) - nonfinite
    lines = [
        f"{count(len(samples))}, {review:,} in the review list (a list to look at, not a verdict), "
        f"{nonfinite:,} with a loss or gradient that is not finite"
    ]
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


def _cells(row: dict[Hashable, Any], class_names: list[str] | None) -> tuple[str, ...]:
    return (
        str(row["rank"]),
        identifier(row["id"]),
        label(row.get("target"), class_names),
        label(row.get("prediction"), class_names),
        number(row["loss"]),
        number(row["grad_norm"]),
        percentile(row["percentile"]),
    )
