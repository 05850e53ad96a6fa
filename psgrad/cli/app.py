"""The commands of psgrad. Nothing here may import torch, pandas or matplotlib: `--help` answers at once."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from psgrad.cli.analyze import analyze
from psgrad.cli.check import baseline_save, check
from psgrad.cli.command import with_boundary
from psgrad.cli.diff import diff
from psgrad.cli.dp_audit import dp_audit
from psgrad.cli.dp_budget import dp_budget
from psgrad.cli.dp_report import dp_report
from psgrad.cli.dp_step import dp_step
from psgrad.cli.influence import influence, influence_index
from psgrad.cli.init import init
from psgrad.cli.merge import merge
from psgrad.cli.ops import ops
from psgrad.cli.plan import plan
from psgrad.cli.report import report
from psgrad.cli.review import review
from psgrad.cli.schema import schema
from psgrad.cli.select import select
from psgrad.cli.validate import validate

COMMANDS: dict[str, dict[str, Callable[..., None]]] = {
    "Begin": {"init": init, "validate": validate, "schema": schema},
    "Data quality": {
        "analyze": analyze,
        "report": report,
        "merge": merge,
        "check": check,
        "baseline save": baseline_save,
        "diff": diff,
        "select": select,
    },
    "Influence": {"influence": influence, "influence index": influence_index, "review": review},
    "Private training": {
        "dp-step": dp_step,
        "dp-audit": dp_audit,
        "dp-budget": dp_budget,
        "dp-report": dp_report,
    },
    "Inside": {"plan": plan, "ops": ops},
}
"""heading -> name, of one word or two -> function, in the order of `psgrad --help`."""


class _Commands(TyperGroup):
    """Commands of one word or of two: `psgrad influence CONFIG` beside `psgrad influence index CONFIG`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        two = " ".join(args[:2])
        if two in self.commands:
            return two, self.commands[two], args[2:]
        return super().resolve_command(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """One screen: the options without those of completion, and a line for each command."""
        shown = [each for each in self.get_params(ctx) if "completion" not in str(each.name)]
        with formatter.section("Options"):
            formatter.write_dl([record for each in shown if (record := each.get_help_record(ctx))])
        formatter.write("\n")
        for heading, commands in COMMANDS.items():
            formatter.write(f"{heading}:\n")
            for name in commands:
                formatter.write(f"  {name:<16} {self.commands[name].get_short_help_str(60)}\n")


app = typer.Typer(
    name="psgrad",
    cls=_Commands,
    help="Look at a PyTorch model one training example at a time.",
    epilog=(
        "Exit codes: 0 ok, 1 a gate failed, 2 usage or config, 3 model, data or runtime, 4 a gate could not"
        " be evaluated, 130/143 interrupted."
    ),
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _commands in COMMANDS.values():
    for _name, _function in _commands.items():
        app.command(_name)(with_boundary(_function))


def main() -> None:
    """Run the command that the process's arguments name, and leave with its exit code."""
    if sys.stdout is None:  # closed by the process that started this one; output is lost
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 (for as long as the process lives)
    app(prog_name="psgrad")


def _print_version(wanted: bool) -> None:
    if wanted:
        from psgrad.cli.version import version_lines

        typer.echo("\n".join(version_lines()))
        raise typer.Exit


@app.callback()
def _psgrad(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the versions and leave."
        ),
    ] = False,
) -> None:
    pass
