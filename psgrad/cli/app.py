"""The commands of psgrad. Nothing here may import torch, pandas or matplotlib: `--help` answers at once."""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from psgrad import __version__
from psgrad.cli.command import registered_commands


class _Commands(TyperGroup):
    """Commands of one word or of two: `psgrad influence CONFIG` beside `psgrad influence index CONFIG`. Their
    flags take no value, and `--help` shows none.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for command in (self, *self.commands.values()):
            for param in command.params:
                if getattr(param, "is_flag", False):
                    param.metavar = ""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        two = " ".join(args[:2])
        if two in self.commands:
            return two, self.commands[two], args[2:]
        return super().resolve_command(ctx, args)


app = typer.Typer(
    name="psgrad",
    cls=_Commands,
    help="Look at a PyTorch model one training example at a time.",
    epilog=(
        "Exit codes: 0 ok, 1 a gate failed, 2 usage or config, 3 model, data or runtime, 4 a gate could not"
        " be evaluated, 130/143 interrupted."
    ),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _module in pkgutil.iter_modules(importlib.import_module("psgrad.cli").__path__):
    if _module.name != "app":
        importlib.import_module(f"psgrad.cli.{_module.name}")
for _command in registered_commands():
    app.command(_command.name, rich_help_panel=str(_command.panel))(_command.function)


def main() -> None:
    """Run the command that the process's arguments name, and leave with its exit code."""
    if sys.stdout is None:  # closed by the process that started this one; output is lost
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 (for as long as the process lives)
    app(prog_name="psgrad")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"psgrad {__version__}")
        raise typer.Exit


@app.callback()
def _psgrad(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and leave."
        ),
    ] = False,
) -> None:
    pass
