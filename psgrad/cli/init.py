"""`psgrad init`: a folder to begin with, that runs as it is."""

from __future__ import annotations

import json
from enum import StrEnum
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from psgrad.cli.boundary import boundary
from psgrad.cli.command import Panel, command
from psgrad.cli.options import Debug

if TYPE_CHECKING:
    from psgrad.errors import PsgradError

CONFIG = "psgrad.yaml"
SCHEMA = "psgrad.schema.json"


class Kind(StrEnum):
    image = "image"
    tabular = "tabular"
    text = "text"


_ABOUT = {
    Kind.image: (
        "600 of scikit-learn's handwritten digits, 12 of them with a wrong label put in on purpose, and a"
        " small convolutional network that was trained on them."
    ),
    Kind.tabular: (
        "Ten measurements of each of scikit-learn's 569 cell nuclei, 11 of them with a wrong label put in on"
        " purpose, and a small network that was trained on them."
    ),
    Kind.text: (
        "256 passages of the Python standard library's own source, byte by byte, and a small transformer that"
        " was trained to tell the next byte."
    ),
}
_HOW = (
    "psgrad.yaml: what psgrad looks at, and how. Every key there is stands here; one that is commented out"
    " has the value that it shows. Paths are relative to this file, output to the current directory."
)

Folder = Annotated[
    Path,
    typer.Argument(
        metavar="[DIR]", help="Folder to write to; created if it does not exist.", show_default=False
    ),
]
KindOption = Annotated[Kind, typer.Option("--kind", help="What the samples are.")]
OverwriteFiles = Annotated[bool, typer.Option("--overwrite", help="Replace files of the same names.")]


@command(Panel.BEGIN, 1)
def init(
    folder: Folder = Path(),
    kind: KindOption = Kind.image,
    overwrite: OverwriteFiles = False,
    debug: Debug = False,
) -> None:
    """Write a commented config, a small model, its weights and its data. They run as they are; change them to
    your own.

    Prints the files that it wrote.
    """
    with boundary(debug):
        _require_no_kind(folder)
        content = _content(kind)
        _require_free(folder, content, overwrite)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, data in content.items():
                (folder / name).write_bytes(data)
        except OSError as error:
            raise _unwritable(folder, error) from error
        for name in content:
            typer.echo(str(folder / name))
        typer.echo(_next_steps(folder / CONFIG), err=True)


def _require_no_kind(folder: Path) -> None:
    """Raises ConfigError for `psgrad init tabular`, which would put the images into a folder of that name."""
    from psgrad.errors import ConfigError

    if str(folder) in list(Kind):
        raise ConfigError(
            f"psgrad init {folder} names a folder, and {folder} is a kind of samples",
            next_step=f"psgrad init --kind {folder}, or a folder of another name",
        )


def _content(kind: Kind) -> dict[str, bytes]:
    """The files of a kind: name -> content, the config last, so that a config never stands without what it
    names.
    """
    from psgrad.config.schema import commented, schema
    from psgrad.yaml12 import parse

    template = files("psgrad") / "cli" / "templates" / kind.value
    found = {
        each.name.removesuffix(".txt"): each.read_bytes()
        for each in sorted(template.iterdir(), key=lambda each: each.name)
    }
    settings = parse(found.pop("config.yaml").decode(), CONFIG).content
    remarks = {"version": _HOW, "model": _ABOUT[kind]}
    config = f"# yaml-language-server: $schema={SCHEMA}\n{commented(settings, remarks)}"
    return {**found, SCHEMA: json.dumps(schema(), indent=1).encode() + b"\n", CONFIG: config.encode()}


def _require_free(folder: Path, content: dict[str, bytes], overwrite: bool) -> None:
    from psgrad.errors import OutputError, OutputExistsError

    if folder.exists() and not folder.is_dir():
        raise OutputExistsError(f"{folder} exists and is not a folder", next_step="name another folder")
    try:
        there = [name for name in content if (folder / name).exists() or (folder / name).is_symlink()]
    except OSError as error:
        raise OutputError(f"the folder {folder} can't be read: {error.strerror}") from error
    if there and not overwrite:
        raise OutputExistsError(
            f"{folder.resolve()} has {', '.join(there)} already; nothing was written",
            expected="a folder without files of these names",
            next_step="name another folder, or replace the files with --overwrite",
        )


def _unwritable(folder: Path, error: OSError) -> PsgradError:
    from psgrad.errors import OutputError

    return OutputError(
        f"the files can't be written to {folder}: {error.strerror or error}", next_step="name another folder"
    )


def _next_steps(config: Path) -> str:
    return f"next: psgrad validate {config}, then psgrad analyze {config}"
