"""`psgrad validate`: everything that can be wrong with a config, before it is run."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from psgrad.cli.command import Panel, command
from psgrad.cli.options import AsJson, ConfigPath, Output, Settings, settings_of

if TYPE_CHECKING:
    from psgrad.commands.validation import Validation

Deep = Annotated[
    bool,
    typer.Option("--deep", help="Also load model and data, and compute loss and gradients of a few rows."),
]


@command(Panel.BEGIN, 2)
def validate(
    config: ConfigPath,
    deep: Deep = False,
    output: Output = None,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """List all mistakes in a config and in the files that it names, without running it.

    Reads headers only: columns, types and lengths of the data, the tensors of checkpoints. Finds the code
    that the config names, but does not import it. Exit code 2 if the config is wrong, 3 if a file or code
    that it names is wrong.
    """
    from psgrad.commands.validate import validate as look

    found = look(
        config,
        settings_of(settings, output),
        deep=deep,
        say=lambda message: typer.echo(message, err=True),
    )
    if as_json:
        typer.echo(json.dumps(found.content(), indent=2, ensure_ascii=False))
    else:
        _show(found)
    raise typer.Exit(found.exit_code)


def _show(found: Validation) -> None:
    from psgrad.reports.words import count, printable

    for about, words in found.facts.items():
        typer.echo(printable(f"{about}: {words}"))
    for note in found.notes:
        typer.echo(printable(f"note: {note}"), err=True)
    if not found.problems:
        typer.echo(printable(f"{found.config}: no problems found"))
        return
    problems = count(len(found.problems), "problem")
    typer.echo(printable(f"error: the config {found.config} has {problems}:"), err=True)
    for problem in found.problems:
        where = f"{problem.where}: " if problem.where else ""
        typer.echo(printable(f"  {where}{problem.error}".replace("\n", "\n  "), keep="\n\t"), err=True)
