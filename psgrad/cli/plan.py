"""`psgrad plan`: what a run would do, and what it would take."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from psgrad.cli.command import Panel, command
from psgrad.cli.options import ConfigPath, Settings, read_config


@command(Panel.INSIDE, 1)
def plan(
    config: ConfigPath,
    settings: Settings = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object in place of the table.")
    ] = False,
) -> None:
    """Predict what `analyze` does with a config, and its time and memory, without a pass over the dataset.

    Prints for each parameter the terms of its gradients and their order of contraction, then the chunk size,
    the time and the memory. The time is that of one process, by two chunks of the first few rows.
    """
    resolved = read_config(config, settings, None)
    from psgrad.commands.plan import plan as run_plan
    from psgrad.reports.plan import write_plan

    result = run_plan(resolved, say=lambda message: typer.echo(message, err=True))
    write_plan(result, "json" if as_json else "terminal", sys.stdout)
