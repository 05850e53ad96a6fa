"""`psgrad select`: the rows of a dataset that a run chooses, or their ids."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from psgrad.cli.options import RunPath

Where = Annotated[
    str | None,
    typer.Option(
        "--where",
        metavar="CONDITION",
        help='The rows to write: "percentile < 99 and not is_outlier_issue", on columns of the run\'s table.',
        show_default=False,
    ),
]
By = Annotated[
    str | None,
    typer.Option(
        "--by",
        metavar="COLUMN",
        help="Of these rows the highest by this column; influence: the mean score over the queries.",
        show_default=False,
    ),
]
Top = Annotated[
    str | None,
    typer.Option("--top", metavar="N", help="How many, such as 20 or 5%.", show_default=False),
]
ToFile = Annotated[
    Path,
    typer.Option(
        "--output",
        metavar="FILE",
        help="The new file: rows of tables as .csv, .jsonl or .parquet like the dataset; ids as .txt.",
        show_default=False,
    ),
]
Drop = Annotated[bool, typer.Option("--drop", help="Write all rows but these.")]
Rejected = Annotated[
    Path | None,
    typer.Option(
        "--rejected",
        metavar="FILE",
        help="A list of the measured rows that are not written, with a reason for each.",
        show_default=False,
    ),
]
OverwriteFile = Annotated[bool, typer.Option("--overwrite", help="Replace the output file.")]


def select(
    run: RunPath,
    output: ToFile,
    where: Where = None,
    by: By = None,
    top: Top = None,
    drop: Drop = False,
    rejected: Rejected = None,
    overwrite: OverwriteFile = False,
) -> None:
    """Write the rows that a run chooses into a new file.

    They are chosen by columns of the run. The run is one of analyze or influence. Rows of tables are
    copied with all their columns; of arrays, archives, images and code the ids and indices are written
    (.txt, .csv, .jsonl, .parquet). Files that were changed after the run are refused. Prints the path of
    the new file.
    """
    from psgrad.commands.select import Choice
    from psgrad.commands.select import select as run_select

    choice = Choice(where, by, top, drop)
    found = run_select(run, choice, output=output, rejected=rejected, overwrite=overwrite)
    if found.measured < found.in_dataset:
        left_out = found.in_dataset - found.measured
        typer.echo(f"PARTIAL: {left_out:,} rows that the run did not measure are left out", err=True)
    typer.echo(f"wrote {found.rows:,} of {found.measured:,} rows", err=True)
    typer.echo(str(found.output))
