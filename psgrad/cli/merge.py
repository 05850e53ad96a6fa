"""`psgrad merge`: the parts of a run, judged and reported as one; the parts of an index."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from psgrad.cli.analyze import Check, Quiet, Report, show_result
from psgrad.cli.options import AsJson
from psgrad.cli.processes import require_one
from psgrad.cli.progress import ProgressOption, ProgressStyle, progress_display

Run = Annotated[
    Path,
    typer.Argument(
        metavar="OUTPUT",
        help="The folder of psgrad analyze or psgrad influence index with --part K/N.",
        show_default=False,
    ),
]


def merge(
    output: Run,
    check: Check = False,
    report: Report = True,
    as_json: AsJson = False,
    quiet: Quiet = False,
    shown: ProgressOption = ProgressStyle.auto,
) -> None:
    """Join the parts of a run that were made with --part.

    Checks that all parts are there. Of analyze it judges the samples, and writes tables and report; an index
    is finished. Prints what psgrad analyze or psgrad influence index prints.
    """
    require_one("merge")
    from psgrad.run.gradient_index import GradientIndex

    if GradientIndex.begun(output) is not None:
        from psgrad.commands.influence_index import finish_index
        from psgrad.reports.influence_terminal import index_summary

        finished = finish_index(output)
        typer.echo(index_summary(finished), err=True)
        typer.echo(str(finished.folder))
        return
    from psgrad.commands.merge import merge as run_merge

    with progress_display(ProgressStyle.none if quiet else shown) as progress:
        result = run_merge(output, report=report, progress=progress)
    show_result(result, result.manifest.setting("analyze", "top"), check, as_json, quiet)
