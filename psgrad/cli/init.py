"""`psgrad init`: a folder to begin with, which runs without changes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import StrEnum
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from psgrad.cli.options import require_alone
from psgrad.errors import ConfigError, OutputError, OutputExistsError

CONFIG = "psgrad.yaml"
_ABOUT = "Paths are relative to this file. {}"
_FULL = "What is commented out has the value that it shows."
_SHORT = "psgrad init --full writes all keys, with their meanings."


class ExampleKind(StrEnum):
    image = "image"
    tabular = "tabular"
    text = "text"


Folder = Annotated[
    Path, typer.Argument(metavar="DIR", help="Folder to write to (the current one).", show_default=False)
]
KindOption = Annotated[
    ExampleKind | None, typer.Option("--kind", help="Write an example, of samples of this kind (image).")
]
FromModel = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="MODEL",
        help="Write a config for this model: a folder of save_pretrained, or FILE.py:FACTORY.",
    ),
]
DataPath = Annotated[
    Path | None,
    typer.Option(
        "--data", metavar="PATH", help="With --from: the dataset, a file of rows or a folder of images."
    ),
]
FullConfig = Annotated[bool, typer.Option("--full", help="Write every key there is, commented out.")]


def init(
    folder: Folder = Path(),
    kind: KindOption = None,
    model: FromModel = None,
    data: DataPath = None,
    full: FullConfig = False,
) -> None:
    """Write an example that runs, or a config for your model.

    The example is a config, a model, its weights and data. With --from it is a config alone, for a model and
    a dataset of your own. Prints the files that it wrote. A file that is there already is never replaced.
    """
    if str(folder) in list(ExampleKind):  # which would put the images into a folder of that name
        raise ConfigError(
            f"psgrad init {folder} names a folder, and {folder} is a kind of samples",
            hint=f"psgrad init --kind {folder}, or a folder of another name",
        )
    from psgrad.config.schema import commented

    notes: list[str] = []
    if (model is None) != (data is None):
        given, missing = ("--data", "--from") if model is None else ("--from", "--data")
        raise ConfigError(
            f"{given} was given without {missing}; expected both, or neither for an example that runs"
        )
    if model is None or data is None:
        settings, content = _example(kind or ExampleKind.image)
    else:
        require_alone("--from", {"--kind": kind is not None})
        from psgrad.commands.proposals import proposed

        settings, notes = proposed(model, data, folder)
        content = {}
    about = {"version": _ABOUT.format(_FULL if full else _SHORT)}
    content[CONFIG] = commented(settings, about, full=full).encode()  # last, as it names the others
    for name in _write(folder, content):
        typer.echo(str(folder / name))
    for note in notes:
        typer.echo(note, err=True)
    config = folder / CONFIG
    typer.echo(f"next: psgrad validate {config}, then psgrad analyze {config}", err=True)


def _example(kind: ExampleKind) -> tuple[dict[str, object], dict[str, bytes]]:
    """(the config of a kind as plain values, its other files: name -> content)."""
    from psgrad.yaml12 import parse

    template = files("psgrad") / "cli" / "templates" / kind.value
    found = {each.name.removesuffix(".txt"): each.read_bytes() for each in template.iterdir()}
    settings = parse(found.pop("config.yaml").decode(), CONFIG).content
    return settings, dict(sorted(found.items()))


def _write(folder: Path, content: Mapping[str, bytes]) -> list[str]:
    """Write the files that are not there; returns their names. Raises OutputExistsError, and writes none,
    where one is there with another content.
    """
    if folder.exists() and not folder.is_dir():
        raise OutputExistsError(
            f"{folder} exists and is not a folder",
            hint="name another folder",
        )
    try:
        there = [name for name in content if os.path.lexists(folder / name)]
        others = [
            name
            for name in there
            if not (folder / name).is_file() or (folder / name).read_bytes() != content[name]
        ]
        if others:
            raise OutputExistsError(
                f"{folder.resolve()} has {', '.join(others)} already; nothing was written",
                hint="psgrad init DIR writes to another folder",
            )
        folder.mkdir(parents=True, exist_ok=True)
        new = [name for name in content if name not in there]
        for name in new:
            with (folder / name).open("xb") as file:  # never over a file
                file.write(content[name])
    except OSError as error:
        raise OutputError(
            f"the files can't be written to {folder}: {error.strerror or error}",
            hint="name another folder",
        ) from error
    return new
