"""`psgrad validate`: what is wrong with a config, before it is run."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import typer

from psgrad.cli.options import AsJson, ConfigPath, Output, Settings, settings_of

if TYPE_CHECKING:
    from psgrad.commands.validate import Validation


def validate(
    config: ConfigPath, output: Output = None, settings: Settings = None, as_json: AsJson = False
) -> None:
    """List the mistakes in a config and in what it names.

    All mistakes of the config are listed at once. Of a config without mistakes, the model, the data and
    whatever else it names are loaded, a few rows go through the model, and the first mistake that is met is
    printed. Exit code 2 if the config is wrong, 3 if a file or code that it names is wrong.
    """
    from psgrad.commands.validate import validate as found_by

    found = found_by(config, settings_of(settings, output), say=lambda message: typer.echo(message, err=True))
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
        typer.echo(printable(f"  {problem}".replace("\n", "\n  "), keep="\n\t"), err=True)
