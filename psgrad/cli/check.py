"""`psgrad check`: evaluates the gate of a finished run."""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from psgrad.cli.command import Panel, command
from psgrad.cli.options import RunPath
from psgrad.errors import EXIT_OK

if TYPE_CHECKING:
    from psgrad.results import CheckResult


class CheckFormat(StrEnum):
    terminal = "terminal"
    json = "json"
    csv = "csv"
    junit = "junit"
    sarif = "sarif"
    github = "github"
    gitlab = "gitlab"
    markdown = "markdown"


BaselineFile = Annotated[
    Path | None,
    typer.Option(
        "--baseline",
        metavar="FILE",
        help="Count only what is not in this baseline, in place of the config's.",
    ),
]
GateSettings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="gate.KEY=VALUE",
        help="Change one value of the gate, such as gate.max_outliers=3. May be repeated.",
    ),
]
AFormat = Annotated[
    CheckFormat, typer.Option("--format", help="How the verdict is written.", show_choices=True)
]
ToFile = Annotated[
    Path | None, typer.Option("--output", metavar="FILE", help="Write it to a file, not to standard output.")
]
ExitZero = Annotated[
    bool,
    typer.Option("--exit-zero", help="Exit with 0 whatever the verdict is; errors keep their exit codes."),
]


@command(Panel.QUALITY, 3)
def check(
    run: RunPath,
    baseline: BaselineFile = None,
    settings: GateSettings = None,
    style: AFormat = CheckFormat.terminal,
    output: ToFile = None,
    exit_zero: ExitZero = False,
) -> None:
    """Evaluate the gate of a finished run: its limits on outliers and on samples that are not finite.

    Exit codes: 0 passed, 1 failed, 2 a wrong option or config, 3 a run that can't be read, 4 not evaluable,
    which is not a pass. Writes findings.jsonl and check.json in the run folder. Needs neither the model nor
    the data.
    """
    from psgrad.workflows.check import check as evaluated

    result = evaluated(run, settings=settings or (), baseline=baseline)
    show_check(result, style.value, output)
    if not exit_zero and result.exit_code != EXIT_OK:
        raise typer.Exit(result.exit_code)


def show_check(result: CheckResult, style: str, output: Path | None = None) -> None:
    """Print a verdict, or write it to a file and say it on stderr; on GitHub its summary is written, too."""
    from psgrad.reports.ci import render_check

    write_text(render_check(result, style), output)
    if style != "terminal" or output is not None:
        from psgrad.reports.ci_text import clean, headline, outcome_line

        for line in (
            headline(result),
            *map(outcome_line, result.outcomes),
            *(f"warning: {clean(each)}" for each in result.warnings),
        ):
            typer.echo(line, err=True)
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if style == "github" and summary:
        from psgrad.reports.ci_text import write_summary

        try:
            write_summary(result, Path(summary))
        except OSError as error:
            typer.echo(f"warning: the step's summary can't be written: {error.strerror}", err=True)


def write_text(text: str, output: Path | None) -> None:
    """To a file, whole or not at all, or to standard output. Raises OutputError."""
    if output is None:
        sys.stdout.write(text)
        return
    from psgrad.storage import RunFolder

    RunFolder(output.parent).write_bytes(output.name, text.encode("utf-8", "backslashreplace"))
