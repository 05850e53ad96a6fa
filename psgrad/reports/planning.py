"""What a run will take, as a table with its totals, or as JSON."""

from __future__ import annotations

import dataclasses
import json
from typing import TextIO

from rich.table import Table
from rich.text import Text

from psgrad.reports.terminal import print_table
from psgrad.reports.words import count, number, printable
from psgrad.results import PlanResult
from psgrad.wording import common_prefix, listed_names, parameter_names, prefix_note

_UNITS = ("B", "kB", "MB", "GB", "TB")


def write_plan(result: PlanResult, style: str, stream: TextIO) -> None:
    """style: 'terminal', a table and its totals, or 'json', one object."""
    if style == "json":
        json.dump(dataclasses.asdict(result) | {"total_bytes": result.total_bytes}, stream, indent=2)
        stream.write("\n")
        return
    if prefix := common_prefix([row.parameter for row in result.parameters]):
        stream.write(f"{prefix_note(prefix)}\n\n")
    print_table(plan_table(result), stream)
    stream.write("\n" + "\n".join(totals(result)) + "\n")


def plan_table(result: PlanResult) -> Table:
    """One row a parameter: its shape, its terms, how they are contracted, and what that takes a sample."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading, numeric in (
        ("parameter", False),
        ("shape", True),
        ("terms", False),
        ("way", False),
        ("us a sample", True),
        ("bytes a sample", True),
    ):
        table.add_column(heading, justify="right" if numeric else "left", no_wrap=numeric, overflow="fold")
    for row, name in zip(result.parameters, parameter_names([row.parameter for row in result.parameters], 60), strict=True):
        cells = (name, row.shape, row.terms, row.way, number(row.microseconds), f"{row.bytes:,}")
        table.add_row(*map(Text, cells))
    return table


def totals(result: PlanResult) -> list[str]:
    """The run as a whole, a line for each question."""
    chunks = -(-result.rows // result.chunk_size)
    lines = [
        f"chunk size   {result.chunk_size:,}, {count(chunks, 'chunk')} for {count(result.rows)}",
        f"time         {duration(result.seconds)} for the gradients, {duration(result.chunk_seconds)} a chunk",
        f"memory       {amount(result.total_bytes)} at its highest: a pass {amount(result.peak_bytes)}, "
        f"a chunk's inputs {amount(result.input_bytes)}, the parameters {amount(result.parameter_bytes)}",
        f"replay       {'yes' if result.replayed else 'no'}: {printable(result.replay_reason)}",
        f"written out  {listed_names([p.parameter for p in result.parameters if not p.factored]) or 'no parameter'}",
        f"machine      {printable(result.machine)}",
    ]
    if result.obstacle is not None:
        lines.append(f"note         the pass was followed while the first rows ran: {printable(result.obstacle)}")
    return lines


def amount(size: float) -> str:
    """Bytes with a unit: 512 B, 18.2 MB."""
    for unit in _UNITS:
        if size < 1000 or unit == _UNITS[-1]:
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}"


def duration(seconds: float) -> str:
    """Seconds with a unit that suits them: 12.3 ms, 4.56 s, 3 min 20 s, 2 h 5 min."""
    if seconds < 1:
        return f"{1e3 * seconds:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
