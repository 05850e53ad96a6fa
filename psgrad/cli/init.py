"""`psgrad init`: a folder to begin with, which runs without changes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from enum import StrEnum
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from psgrad.cli.command import Panel, command
from psgrad.errors import ConfigError, OutputError, OutputExistsError

if TYPE_CHECKING:
    from psgrad.workflows.proposals import Proposal

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
    "psgrad.yaml: what psgrad looks at, and how. Every key there is stands here; one that is commented out"
    " has the value that it shows. Paths are relative to this file, output to the current directory."
)

_RUN = (
    "Scores over the checkpoints of one training run agree better with retraining than those of the last one."
    ' Two lines of a training loop save them: checkpoints = psgrad.RunCheckpoints("run", epochs=60), and'
    " checkpoints.save(model, epoch + 1, optimizer) after each epoch. Then: checkpoints: run/*.safetensors"
)

Folder = Annotated[
    Path,
    typer.Argument(
        metavar="[DIR]", help="Folder to write to; created if it does not exist.", show_default=False
    ),
]
KindOption = Annotated[
    ExampleKind | None, typer.Option("--kind", help="Write an example, of samples of this kind (image).")
]
FromFolder = Annotated[
    Path | None,
    typer.Option(
        "--from",
        metavar="FOLDER",
        help="Write a config for this model: a folder of save_pretrained or of PEFT.",
    ),
]
DataFile = Annotated[
    Path | None,
    typer.Option("--data", metavar="FILE", help="With --from: the dataset, whose columns are named."),
]
OverwriteFiles = Annotated[bool, typer.Option("--overwrite", help="Replace files of the same names.")]


@command(Panel.BEGIN, 1)
def init(
    folder: Folder = Path(),
    kind: KindOption = None,
    model: FromFolder = None,
    data: DataFile = None,
    overwrite: OverwriteFiles = False,
) -> None:
    """Write a commented config: for a pretrained model and its data, for the model.py and the data file that
    lie in the folder, or with a small example: a model, its weights and its data, which run as they are.

    Prints the files that it wrote.
    """
    if str(folder) in list(ExampleKind):  # which would put the images into a folder of that name
        raise ConfigError(
            f"psgrad init {folder} names a folder, and {folder} is a kind of samples",
            next_step=f"psgrad init --kind {folder}, or a folder of another name",
        )
    proposal = _proposal(folder, kind, model, data)
    if proposal is None:
        content = _content(kind or ExampleKind.image)
    else:
        content = _with_schema(proposal.settings, {"version": _HOW, **proposal.remarks})
    _require_free(folder, content, overwrite)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in content.items():
            (folder / name).write_bytes(text)
    except OSError as error:
        raise OutputError(
            f"the files can't be written to {folder}: {error.strerror or error}",
            next_step="name another folder",
        ) from error
    for name in content:
        typer.echo(str(folder / name))
    for note in [] if proposal is None else proposal.notes:
        typer.echo(note, err=True)
    config = folder / CONFIG
    typer.echo(f"next: psgrad validate {config}, then psgrad analyze {config}", err=True)


def _proposal(
    folder: Path, kind: ExampleKind | None, model: Path | None, data: Path | None
) -> Proposal | None:
    """A config for what there is; None for an example."""
    from psgrad.workflows.proposals import MODEL, has_own_files, own_files, pretrained

    if (model is None and data is not None) or (model is not None and kind is not None):
        raise ConfigError(
            "--data was given without --from" if model is None else "--from was given together with --kind",
            expected="--from FOLDER [--data FILE] for a model of your own, or --kind for an example",
        )
    if model is not None:
        return pretrained(model, data, folder)
    if kind is not None or not folder.is_dir() or not has_own_files(folder):
        return None
    examples = [_content(each)[MODEL] for each in ExampleKind]
    return None if (folder / MODEL).read_bytes() in examples else own_files(folder)


def _content(kind: ExampleKind) -> dict[str, bytes]:
    """The files of a kind: name -> content; the config last, as it names the others."""
    from psgrad.yaml12 import parse

    template = files("psgrad") / "cli" / "templates" / kind.value
    found = {
        each.name.removesuffix(".txt"): each.read_bytes()
        for each in sorted(template.iterdir(), key=lambda each: each.name)
    }
    settings = parse(found.pop("config.yaml").decode(), CONFIG).content
    remarks = {"version": _HOW, "model": _ABOUT[kind]}
    return {**found, **_with_schema(settings, remarks)}


def _with_schema(settings: Mapping[str, Any], remarks: Mapping[str, str]) -> dict[str, bytes]:
    """The commented config, and the schema that it names."""
    from psgrad.config.schema import commented, schema

    remarks = {"influence.checkpoints": _RUN, **remarks}
    config = f"# yaml-language-server: $schema={SCHEMA}\n{commented(settings, remarks)}"
    return {SCHEMA: json.dumps(schema(), indent=1).encode() + b"\n", CONFIG: config.encode()}


def _require_free(folder: Path, content: dict[str, bytes], overwrite: bool) -> None:
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
