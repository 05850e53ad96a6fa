"""`psgrad analyze`: which training examples pull hardest."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import typer

from psgrad.cli.boundary import boundary
from psgrad.cli.options import ConfigPath, Debug, Output, Overwrite, Settings, read_config
from psgrad.cli.progress import progress_display

if TYPE_CHECKING:
    from psgrad.results import AnalyzeResult


def analyze(
    config: ConfigPath,
    output: Output = None,
    settings: Settings = None,
    overwrite: Overwrite = False,
    debug: Debug = False,
) -> None:
    """Rank the training examples by the norm of their own gradient.

    Prints the top of the ranking, then the path of the run folder with the whole table, the plots and report.html.
    """
    with boundary(debug):
        resolved = read_config(config, settings, output)
        from psgrad import workflows

        with progress_display() as progress:
            result = workflows.analyze(resolved, overwrite=overwrite, progress=progress)
        _show(result, resolved.analyze.top)


def _show(result: AnalyzeResult, top: int) -> None:
    from psgrad.reports.terminal import print_table, summary, top_table

    typer.echo(summary(result), err=True)
    print_table(top_table(result, top), sys.stdout)
    typer.echo(str(result.folder))
