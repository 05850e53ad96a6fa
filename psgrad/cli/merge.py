"""`psgrad merge`: the parts of a run, judged and reported as one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from psgrad.cli.analyze import Check, Quiet, Report, Verbose, show_result
from psgrad.cli.boundary import boundary
from psgrad.cli.command import Panel, command
from psgrad.cli.options import AsJson, Debug
from psgrad.cli.processes import require_one
from psgrad.cli.progress import ProgressOption, ProgressStyle, progress_display

Run = Annotated[
    Path,
    typer.Argument(metavar="OUTPUT", help="The folder of psgrad analyze --part K/N.", show_default=False),
]


@command(Panel.QUALITY, 2)
def merge(
    output: Run,
    check: Check = False,
    report: Report = True,
    as_json: AsJson = False,
    quiet: Quiet = False,
    verbose: Verbose = False,
    shown: ProgressOption = ProgressStyle.auto,
    debug: Debug = False,
) -> None:
    """Check that all parts of a run are there, judge its samples, and write its tables and report.

    Prints what psgrad analyze prints.
    """
    with boundary(debug):
        require_one("merge")
        from psgrad.workflows.parts import merge as run_merge

        with progress_display(ProgressStyle.none if quiet else shown) as progress:
            result = run_merge(output, report=report, progress=progress)
        show_result(result, result.manifest["config"]["analyze"]["top"], check, as_json, quiet, verbose)
