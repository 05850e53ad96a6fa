"""`psgrad select`: the rows of a dataset that a run chooses, written again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from psgrad.cli.command import Panel, command
from psgrad.cli.options import RunPath

Where = Annotated[
    str,
    typer.Option(
        "--where",
        metavar="CONDITION",
        help='The rows to write: "percentile < 99 and not is_outlier_issue", on columns of samples.parquet.',
        show_default=False,
    ),
]
ToFile = Annotated[
    Path,
    typer.Option(
        "--output",
        metavar="FILE",
        help="The new file, in the format of the dataset's; without a suffix a new folder.",
        show_default=False,
    ),
]
Drop = Annotated[bool, typer.Option("--drop", help="Write the rows for which the condition does not hold.")]
OverwriteFile = Annotated[bool, typer.Option("--overwrite", help="Replace the output file.")]


@command(Panel.QUALITY, 6)
def select(
    run: RunPath,
    where: Where,
    output: ToFile,
    drop: Drop = False,
    overwrite: OverwriteFile = False,
) -> None:
    """Write the rows of a run's dataset for which a condition holds into a new file, with all their columns.

    Rows are copied from the dataset's files as they are there. Files that were changed after the run are
    refused. Of rows that code makes the ids are written. Prints the path of the new file.
    """
    from psgrad.workflows.select import select as run_select

    found = run_select(run, where, output=output, drop=drop, overwrite=overwrite)
    if found.measured < found.in_dataset:
        left_out = found.in_dataset - found.measured
        typer.echo(f"PARTIAL: {left_out:,} rows that the run did not measure are left out", err=True)
    typer.echo(f"wrote {found.rows:,} of {found.measured:,} rows", err=True)
    typer.echo(str(found.output))
