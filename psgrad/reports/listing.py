"""A plain list of records, in the formats that people, shells and pages read."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from typing import TextIO

from rich.table import Table
from rich.text import Text

from psgrad.reports.terminal import print_table


def write_listing(headings: Sequence[str], rows: Sequence[Sequence[str]], style: str, stream: TextIO) -> None:
    """style: 'terminal', 'json' (a list of objects), 'csv' or 'markdown'."""
    if style == "json":
        json.dump([dict(zip(headings, row, strict=True)) for row in rows], stream, indent=2)
        stream.write("\n")
    elif style == "csv":
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerows([headings, *rows])
    elif style == "markdown":
        stream.writelines(f"| {' | '.join(cells)} |\n" for cells in (headings, ["---"] * len(headings), *rows))
    else:
        table = Table(*headings, box=None, pad_edge=False, header_style="bold")
        for row in rows:
            table.add_row(*map(Text, row))
        print_table(table, stream)
