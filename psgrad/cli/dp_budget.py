"""`psgrad dp-budget`: what all private runs on a dataset spent together."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from psgrad.cli.options import AsJson


def dp_budget(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="The file of privacy.budget.", show_default=False)
    ],
    as_json: AsJson = False,
) -> None:
    """Show what all private runs on a dataset spent.

    Verifies the file that says so. Exit code 3 if the file was edited, or lines of it are missing. An
    older copy of it is whole, too: compare the number of lines and the last hash with those that were
    printed before.
    """
    from psgrad.commands.dp_budget import dp_budget as read
    from psgrad.reports.privacy import write_budget

    write_budget(read(file), "json" if as_json else "terminal", sys.stdout)
