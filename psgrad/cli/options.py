"""The arguments that commands share, declared once, and what `-v` prints. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from psgrad.errors import ConfigError

if TYPE_CHECKING:
    from psgrad.config import Config
ConfigPath = Annotated[
    Path,
    typer.Argument(
        metavar="CONFIG", help="YAML file that names the model, the loss and the data.", show_default=False
    ),
]
RunPath = Annotated[
    Path, typer.Argument(metavar="RUN", help="The folder of a finished psgrad analyze.", show_default=False)
]
Output = Annotated[
    Path | None, typer.Option("--output", metavar="DIR", help="Run folder, instead of the config's `output`.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="A.B=C",
        help="Change one value of the config: dotted path, YAML value. May be repeated.",
    ),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an earlier run in the run folder.")]
Part = Annotated[
    str | None,
    typer.Option(
        "--part",
        metavar="K/N",
        help="Compute only part K of N of the rows, for job arrays; psgrad merge joins the parts.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object in place of the tables.")]


def part_of(given: str) -> tuple[int, int]:
    """Which part, and how many there are. Raises ConfigError."""
    number, _, count = given.partition("/")
    if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
        raise ConfigError(f"--part {given}; expected K/N: which part, and how many there are, such as 3/64")
    return int(number), int(count)


def require_alone(option: str, others: Mapping[str, bool]) -> None:
    """Raises ConfigError where an option was given with one that it excludes. others: option -> whether it
    was given.
    """
    for other, given in others.items():
        if given:
            raise ConfigError(
                f"{option} was given together with {other}",
                hint="leave one of them out",
            )


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
