"""`psgrad diff`: what changed between two runs."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class DiffFormat(StrEnum):
    terminal = "terminal"
    json = "json"


RunA = Annotated[
    Path,
    typer.Argument(
        metavar="A", help="The folder of a finished psgrad analyze: the earlier run.", show_default=False
    ),
]
RunB = Annotated[Path, typer.Argument(metavar="B", help="The folder of the later run.", show_default=False)]
Top = Annotated[
    int, typer.Option("--top", metavar="N", min=1, help="How many samples of each change are listed.")
]
AFormat = Annotated[DiffFormat, typer.Option("--format", help="How the comparison is written.")]


def diff(
    a: RunA,
    b: RunB,
    top: Top = 20,
    style: AFormat = DiffFormat.terminal,
) -> None:
    """Compare two finished runs, sample by sample.

    Says which samples are new, gone, higher or lower, and how similar the two rankings are. Samples are
    matched by their id if the config names one, else by their content. Needs neither the model nor the
    data.
    """
    from psgrad.commands.diff import diff as compared
    from psgrad.reports.comparison import render_comparison

    typer.echo(render_comparison(compared(a, b, top=top), style.value), nl=False)
