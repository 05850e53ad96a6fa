"""The arguments that every command takes, declared once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from psgrad.cli.completing import complete_setting

if TYPE_CHECKING:
    from psgrad.config import Config

ConfigPath = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="YAML file that names the model, the loss and the data.", show_default=False)
]
Output = Annotated[Path | None, typer.Option("--output", metavar="DIR", help="Run folder, instead of the config's `output`.")]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="A.B=C",
        help="Change one value of the config: dotted path, YAML value. May be repeated.",
        autocompletion=complete_setting,
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an earlier run in the run folder.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object in place of the tables.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def read_config(path: Path, settings: list[str] | None, output: Path | None) -> Config:
    """The config with the command line's changes, the last of which win."""
    from psgrad.config import load_config

    return load_config(path, settings_of(settings, output))


def settings_of(settings: list[str] | None, output: Path | None) -> list[str]:
    """The command line's changes, the last of which win, as `--set` takes them."""
    overrides = list(settings or ())
    if output is not None:
        # A JSON string is a YAML string: a folder named `no` or `1e3` stays text.
        overrides.append(f"output={json.dumps(str(output), ensure_ascii=False)}")
    return overrides
