"""`psgrad check`: evaluates the gate of a finished run. `psgrad baseline save`: accepts what it has found."""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from psgrad.cli.options import RunPath
from psgrad.errors import EXIT_OK

if TYPE_CHECKING:
    from psgrad.run.results import CheckResult
    from psgrad.run.results.check import BaselineChange


class CheckFormat(StrEnum):
    terminal = "terminal"
    json = "json"
    junit = "junit"
    sarif = "sarif"
    github = "github"
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
BaselinePath = Annotated[
    Path, typer.Option("--output", metavar="FILE", help="The baseline: a new file, or an existing one.")
]
Grow = Annotated[
    bool,
    typer.Option(
        "--grow", help="Also add new findings, and the scores of this run, to an existing baseline."
    ),
]


def check(
    run: RunPath,
    baseline: BaselineFile = None,
    settings: GateSettings = None,
    style: AFormat = CheckFormat.terminal,
    output: ToFile = None,
    exit_zero: ExitZero = False,
) -> None:
    """Evaluate the gate of a finished run, for CI.

    The gate has limits on outliers and on samples that are not finite. Exit codes: 0 passed, 1 failed, 2
    a wrong option or config, 3 a run that can't be read, 4 not evaluable, which is not a pass. Writes
    findings.jsonl and check.json in the run folder. Needs neither the model nor the data.
    """
    from psgrad.commands.check import check as evaluated

    result = evaluated(run, settings=settings or (), baseline=baseline)
    show_check(result, style.value, output)
    if not exit_zero and result.exit_code != EXIT_OK:
        raise typer.Exit(result.exit_code)


def show_check(result: CheckResult, style: str, output: Path | None = None) -> None:
    """Print a verdict, or write it to a file and say it on stderr; on GitHub its summary is written, too."""
    from psgrad.reports.ci import render_check

    write_text(render_check(result, style), output)
    if style != "terminal" or output is not None:
        from psgrad.reports.ci import verdict_lines

        for line in verdict_lines(result):
            typer.echo(line, err=True)
    summary = os.environ.get("GITHUB_STEP_SUMMARY")
    if style == "github" and summary:
        from psgrad.reports.ci import write_summary

        try:
            write_summary(result, Path(summary))
        except OSError as error:
            typer.echo(f"warning: the step's summary can't be written: {error.strerror}", err=True)


def write_text(text: str, output: Path | None) -> None:
    """To a file, whole or not at all, or to standard output. Raises OutputError."""
    if output is None:
        sys.stdout.write(text)
        return
    from psgrad.run import RunFolder

    RunFolder(output.parent).write_bytes(output.name, text.encode("utf-8", "backslashreplace"))


def baseline_save(
    run: RunPath,
    output: BaselinePath = Path("psgrad-baseline.json"),
    grow: Grow = False,
) -> None:
    """Accept findings, so that later gates count new ones.

    The scores of the run are stored, too, as a reference for later samples. An existing baseline only
    becomes smaller: entries that are no longer found are dropped, and new findings are refused, unless
    --grow is given. Prints the path of the file.
    """
    from psgrad.commands.check import save_baseline

    change = save_baseline(run, output=output, grow=grow)
    for line in _words(change):
        typer.echo(line, err=True)
    typer.echo(change.path)


def _words(change: BaselineChange) -> list[str]:
    from psgrad.reports.words import count

    held = count(len(change.baseline.findings), "accepted finding")
    lines = [f"{held}: {change.taken:,} taken in, {change.dropped:,} dropped as they are gone"]
    if change.refused:
        lines.append(
            f"{count(change.refused, 'new finding')} refused: a baseline only shrinks, and these go on to"
            " count; --grow takes them in"
        )
    if change.reference_kept:
        lines.append("the scores to judge by are those that it had; --grow takes those of this run")
    return lines
