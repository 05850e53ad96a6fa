"""`psgrad report`: the page of a finished run, made again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a finished `psgrad analyze`.", show_default=False)
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", metavar="DIR", help="Folder for report.html and plots/, instead of the run folder."
        ),
    ] = None,
) -> None:
    """Make report.html of a finished run again.

    And plots/, from the run folder alone, without the model and the data. Prints the path of the page.
    """
    from psgrad.commands.report import report as run_report

    typer.echo(str(run_report(run, output=output).page))
