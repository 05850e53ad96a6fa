"""`psgrad baseline save`: accept what a run has found."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from psgrad.cli.command import Panel, command
from psgrad.cli.options import RunPath

if TYPE_CHECKING:
    from psgrad.results.findings import BaselineChange

BaselinePath = Annotated[
    Path, typer.Option("--output", metavar="FILE", help="The baseline: a new file, or an existing one.")
]
Grow = Annotated[
    bool,
    typer.Option(
        "--grow", help="Also add new findings, and the scores of this run, to an existing baseline."
    ),
]


@command(Panel.QUALITY, 4, "baseline save")
def baseline_save(
    run: RunPath,
    output: BaselinePath = Path("psgrad-baseline.json"),
    grow: Grow = False,
) -> None:
    """Accept the findings of a finished run, so that later gates count only new ones; store its scores as a
    reference for later samples.

    An existing baseline only becomes smaller: entries that are no longer found are dropped, and new findings
    are refused, unless --grow is given. Prints the path of the file.
    """
    from psgrad.workflows.check import save_baseline

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
