"""`psgrad plan`: what a run would do, and what it would take."""

from __future__ import annotations

import sys

import typer

from psgrad.cli.options import AsJson, ConfigPath, Settings, read_config


def plan(
    config: ConfigPath,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Predict time and memory of analyze.

    Computes two chunks of the first few rows, and makes no pass over the dataset. Prints for each
    parameter the terms of its gradients and their order of contraction, then the chunk size, the time of
    one process and the memory.
    """
    resolved = read_config(config, settings, None)
    from psgrad.commands.plan import plan as run_plan
    from psgrad.reports.plan import write_plan

    result = run_plan(resolved, say=lambda message: typer.echo(message, err=True))
    write_plan(result, "json" if as_json else "terminal", sys.stdout)
