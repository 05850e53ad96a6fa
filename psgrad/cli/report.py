"""`psgrad report`: the page of a finished run, made again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from psgrad.cli.options import RunPath


def report(
    run: RunPath,
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
