"""What is printed on a terminal: tables, facts, lists and JSON."""

from __future__ import annotations

import io
import json
from typing import Any, TextIO

import rich.table
from rich.console import Console
from rich.text import Text

from psgrad.reports.tables import Pairs, Table
from psgrad.reports.words import printable
from psgrad.wording import json_values

# Wide enough that a table in a pipe or a file is never cut to some screen's width.
PIPE_WIDTH = 240


def print_table(shown: Table, stream: TextIO) -> None:
    """Print the table: fitted to a terminal, uncut and plain elsewhere. In a narrow terminal texts are broken
    into lines, and never numbers.
    """
    drawn = rich.table.Table(box=None, pad_edge=False, header_style="bold")
    for column in shown.columns:
        side = "right" if column.numeric else "left"
        drawn.add_column(column.words, justify=side, no_wrap=column.numeric, overflow="fold")  # type: ignore[arg-type]
    for row in shown.rows:
        # Text objects: an id such as "[red]" is no markup here.
        drawn.add_row(*map(Text, row.cells))
    if stream.isatty():
        Console(file=stream, force_terminal=True, highlight=False).print(drawn)
        return
    lines = io.StringIO()
    Console(file=lines, width=PIPE_WIDTH, force_terminal=False, highlight=False).print(drawn)
    stream.writelines(f"{line.rstrip()}\n" for line in lines.getvalue().splitlines())


def facts_lines(facts: Pairs) -> str:
    """A line a fact, the values one below another."""
    width = max(len(name) for name, _ in facts)
    return "".join(f"{name:<{width}}  {printable(value)}\n" for name, value in facts)


def write_json(content: Any, stream: TextIO) -> None:
    """One JSON value; numbers that are not finite are null, as in the files of a run."""
    json.dump(json_values(content), stream, indent=2, allow_nan=False)
    stream.write("\n")
