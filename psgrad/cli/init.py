"""`psgrad init`: a folder to begin with, which runs without changes."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from enum import StrEnum
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import typer

from psgrad.cli.command import Panel, command
from psgrad.errors import ConfigError, OutputError, OutputExistsError

CONFIG = "psgrad.yaml"
SCHEMA = "psgrad.schema.json"


class ExampleKind(StrEnum):
    image = "image"
    tabular = "tabular"
    text = "text"


_ABOUT = {
    ExampleKind.image: (
        "600 of scikit-learn's handwritten digits, 12 of them with a wrong label put in on purpose, and a"
        " small convolutional network that was trained on them."
    ),
    ExampleKind.tabular: (
        "Ten measurements of each of scikit-learn's 569 cell nuclei, 11 of them with a wrong label put in on"
        " purpose, and a small network that was trained on them."
    ),
    ExampleKind.text: (
        "256 passages of the Python standard library's own source, byte by byte, and a small transformer that"
        " was trained to tell the next byte."
    ),
}
_HOW = (
    "psgrad.yaml: what psgrad looks at, and how. Paths are relative to this file, output to the current"
    " directory."
)
_ALL_KEYS = "Every key there is stands here; one that is commented out has the value that it shows."
_FEW_KEYS = "All other keys have defaults; psgrad init --full writes them all, with their meanings."

Folder = Annotated[
    Path,
    typer.Argument(
        metavar="[DIR]", help="Folder to write to; created if it does not exist.", show_default=False
    ),
]
KindOption = Annotated[
    ExampleKind | None, typer.Option("--kind", help="Write an example, of samples of this kind (image).")
]
FromModel = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="MODEL",
        help="Write a config for this model: a folder of save_pretrained or of PEFT, or FILE.py:FACTORY.",
    ),
]
DataPath = Annotated[
    Path | None,
    typer.Option(
        "--data", metavar="PATH", help="With --from: the dataset, a file of rows or a folder of images."
    ),
]
BaseModel = Annotated[
    str | None,
    typer.Option(
        "--base", metavar="MODEL", help="With --from and an adapter: its base model, where it names none."
    ),
]
FullConfig = Annotated[bool, typer.Option("--full", help="Write every key there is, commented out.")]


@command(Panel.BEGIN, 1)
def init(
    folder: Folder = Path(),
    kind: KindOption = None,
    model: FromModel = None,
    data: DataPath = None,
    base: BaseModel = None,
    full: FullConfig = False,
) -> None:
    """Write a small example: a config, a model, its weights and data, which run as they are. With --from,
    write a config for a model of your own and its data.

    Prints the files that it wrote. A file that is there already is never replaced.
    """
    if str(folder) in list(ExampleKind):  # which would put the images into a folder of that name
        raise ConfigError(
            f"psgrad init {folder} names a folder, and {folder} is a kind of samples",
            next_step=f"psgrad init --kind {folder}, or a folder of another name",
        )
    if model is None:
        given = [name for name, value in (("--data", data), ("--base", base)) if value is not None]
        if given:
            raise ConfigError(
                f"{given[0]} was given without --from",
                expected="--from FOLDER, or --from FILE.py:FACTORY, beside it",
            )
        content, notes = _example(kind or ExampleKind.image, full), []
    else:
        if kind is not None:
            raise ConfigError("--from was given together with --kind", expected="one of them")
        from psgrad.commands.proposals import proposed

        proposal = proposed(model, base, data, folder)
        content, notes = _with_schema(proposal.settings, {}, full), proposal.notes
    for name in _write(folder, content):
        typer.echo(str(folder / name))
    for note in notes:
        typer.echo(note, err=True)
    config = folder / CONFIG
    typer.echo(f"next: psgrad validate {config}, then psgrad analyze {config}", err=True)


def _example(kind: ExampleKind, full: bool) -> dict[str, bytes]:
    """The files of a kind: name -> content; the config last, as it names the others."""
    from psgrad.yaml12 import parse

    template = files("psgrad") / "cli" / "templates" / kind.value
    found = {
        each.name.removesuffix(".txt"): each.read_bytes()
        for each in sorted(template.iterdir(), key=lambda each: each.name)
    }
    settings = parse(found.pop("config.yaml").decode(), CONFIG).content
    return {**found, **_with_schema(settings, {"model": _ABOUT[kind]}, full)}


def _with_schema(settings: Mapping[str, Any], remarks: Mapping[str, str], full: bool) -> dict[str, bytes]:
    """The config, and the schema that it names."""
    from psgrad.config.schema import commented, schema

    about = {"version": f"{_HOW} {_ALL_KEYS if full else _FEW_KEYS}", **remarks}
    text = commented(settings, about, full=full)
    config = f"# yaml-language-server: $schema={SCHEMA}\n{text}"
    return {SCHEMA: json.dumps(schema(), indent=1).encode() + b"\n", CONFIG: config.encode()}


def _write(folder: Path, content: Mapping[str, bytes]) -> list[str]:
    """Write the files that are not there; returns their names. Raises OutputExistsError, and writes none,
    where one is there with another content.
    """
    if folder.exists() and not folder.is_dir():
        raise OutputExistsError(f"{folder} exists and is not a folder", next_step="name another folder")
    try:
        there = [name for name in content if os.path.lexists(folder / name)]
        others = [name for name in there if _content_of(folder / name) != content[name]]
        if others:
            raise OutputExistsError(
                f"{folder.resolve()} has {', '.join(others)} already; nothing was written",
                expected="a folder without files of these names",
                next_step=(
                    "psgrad init DIR writes to another folder;"
                    " --from FILE.py:FACTORY --data PATH writes a config for your own model"
                ),
            )
        folder.mkdir(parents=True, exist_ok=True)
        new = [name for name in content if name not in there]
        for name in new:
            with (folder / name).open("xb") as file:  # never over a file
                file.write(content[name])
    except OSError as error:
        raise OutputError(
            f"the files can't be written to {folder}: {error.strerror or error}",
            next_step="name another folder",
        ) from error
    return new


def _content_of(path: Path) -> bytes | None:
    """The content of a file; None of what is no file."""
    return path.read_bytes() if path.is_file() else None
