"""`psgrad dp-report`: what a private run's public files say of its privacy."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from psgrad.cli.options import AsJson
from psgrad.errors import EXIT_GATE_FAILED


def dp_report(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="The folder of a psgrad dp-step.", show_default=False)
    ],
    as_json: AsJson = False,
) -> None:
    """Say what a private run guarantees, and assumes.

    To an attacker, for groups and at other deltas. Reads public/ alone, and writes public/report.html.
    Exit code 1 if the files contradict each other.
    """
    from psgrad.commands.dp_report import dp_report as report_of
    from psgrad.reports.privacy_report import write_report

    report = report_of(run)
    write_report(report, "json" if as_json else "terminal", sys.stdout)
    for problem in report.problems:
        typer.echo(f"PROBLEM: {problem}", err=True)
    if report.problems:
        raise typer.Exit(EXIT_GATE_FAILED)
