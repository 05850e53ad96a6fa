"""Images in files: a folder of images as a table, with a folder for each class, and images out
of files and bytes, by Pillow: their modes, and what is wrong with them. No torch.
"""

from __future__ import annotations

import hashlib
import io
import os
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from psgrad.config import DataConfig
from psgrad.config.values import require_regular
from psgrad.data.columns import ColumnRoles, require_columns
from psgrad.data.sources.table_rows import TableRows
from psgrad.errors import ConfigError, DataError, UnreadableRow
from psgrad.models.hub import library
from psgrad.wording import first_line, first_of

if TYPE_CHECKING:
    from PIL.Image import Image


IMAGE, LABEL = "image", "label"
_SHOWN = 5
_TABLES = (".csv", ".jsonl", ".parquet")


def with_names(config: DataConfig, base: Path) -> DataConfig:
    """The config of a folder of images with the names of its columns: image, label for its classes, and for
    the id, where none is named, the path of the image.
    """
    assert config.images is not None
    target = config.target or (LABEL if class_folders(base / config.images) else None)
    image = config.image or IMAGE
    return config.model_copy(update={"image": image, "target": target, "id": config.id or image})


def folder_rows(config: DataConfig, base: Path, unit: str | None = None) -> TableRows:
    """The images of data.images, with the columns that the config names. Raises ConfigError and DataError."""
    assert config.images is not None
    folder = base / config.images
    if not folder.is_dir():
        raise ConfigError(
            f"data.images: there is no folder {folder}",
            hint="check the path; it is relative to the config file's folder",
        )
    config = with_names(config, base)
    assert config.image is not None
    metadata = next((each for each in sorted(folder.glob("metadata.*")) if each.suffix in _TABLES), None)
    if metadata is not None:
        raise ConfigError(
            f"data.images: the folder {folder} has a table of its images",
            hint=f"name it in place of the folder: data.path: {metadata}, with image: file_name",
        )
    classes = class_folders(folder)
    images, others = listed_images(folder, {*classes})
    there = {parts[0] for parts in images}
    if empty := [name for name in classes if name not in there] or ([] if images else [""]):
        raise DataError(
            f"the folder {folder / empty[0]} has no images; expected files that end in one of"
            f" {', '.join(SUFFIXES)}, in a folder for each class",
        )
    columns = {config.image: ["/".join(parts) for parts in images]}
    if classes:
        columns[LABEL] = [parts[0] for parts in images]
    wanted = ColumnRoles.of(config, unit).columns
    require_columns(wanted, list(columns), str(folder))
    table = pa.table({name: columns[name] for name in wanted})
    listing = hashlib.sha256(str(table.to_pydict()).encode()).hexdigest()
    return TableRows(table, str(folder), listing, notes=_left_out(others, bool(classes)))


def _left_out(others: Sequence[str], classes: bool) -> tuple[str, ...]:
    """What is to be said of the files of a folder that are no rows."""
    if not others:
        return ()
    where = " in the folder of a class" if classes else ""
    count = "1 file was" if len(others) == 1 else f"{len(others):,} files were"
    return (f"{count} left out, as no image{where} by name: {first_of(others, _SHOWN)}",)


def class_folders(folder: Path) -> list[str]:
    """The names of the classes: the folders in a folder, in sorted order."""
    return sorted(each.name for each in os.scandir(folder) if each.is_dir() and not each.name.startswith("."))


def listed_images(folder: Path, classes: Set[str]) -> tuple[list[tuple[str, ...]], list[str]]:
    """The images in a folder and below it, in the folder of a class where there are classes: the parts of
    their paths, in order. And the paths of all other files that are not hidden.
    """
    images, others = [], []
    for parts, is_file in sorted(_files(str(folder), (), classes)):
        if is_file and (not classes or parts[0] in classes) and parts[-1].lower().endswith(SUFFIXES):
            images.append(parts)
        else:
            others.append("/".join(parts))
    return images, others


def _files(folder: str, above: tuple[str, ...], followed: Set[str]) -> Iterator[tuple[tuple[str, ...], bool]]:
    """(the parts of its path, whether it is a file) of all that is in a folder and below it, and neither
    hidden nor a folder. Of links to folders those with a name in `followed` are looked into.

    A folder is read once, and the system is not asked about each file: there may be millions.
    """
    with os.scandir(folder) as entries:
        for entry in entries:
            parts = (*above, entry.name)
            if entry.is_dir():
                if entry.name in followed or not entry.is_symlink():
                    yield from _files(entry.path, parts, frozenset())
            elif not entry.name.startswith("."):
                yield parts, entry.is_file()


SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
"""Of the files in a folder that are images."""
_SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I")
_NOTES: Mapping[str, str] = {
    "RGBA": "with transparency, put on white",
    "LA": "with transparency, put on white",
    "PA": "with transparency, put on white",
    "P": "with a palette, in its colours",
    **dict.fromkeys(_SIXTEEN_BITS, "of 16 bits, divided by 257"),
}


class BrokenImage(UnreadableRow):
    """An image that can't be read."""


def content_of(value: Any, folder: Path, where: str) -> tuple[bytes, str]:
    """(the bytes of an image, their name for messages): of a path relative to `folder`, of bytes, or of
    datasets' {bytes, path}. Raises BrokenImage.
    """
    if isinstance(value, Mapping):
        value = value.get("bytes") if value.get("bytes") is not None else value.get("path")
    if isinstance(value, bytes):
        return value, f"the image in {where}"
    if not isinstance(value, str) or not value:
        raise BrokenImage(f"{where} has no image; expected the path of an image, or its bytes")
    path = folder / value
    try:
        require_regular(path, "image")
    except ConfigError as error:  # one row's, which may be left out
        raise BrokenImage(f"{where}: {error.message}") from error
    try:
        return path.read_bytes(), f"the image {path} in {where}"
    except OSError as error:
        raise BrokenImage(
            f"the image {path} in {where} can't be read: {error.strerror}",
            hint=f"check the path; it is relative to {folder}",
        ) from error


def opened(content: bytes, named: str) -> Image:
    """An image of which only the header was read. Raises BrokenImage."""
    pillow = library("PIL.Image", "vision")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pillow.DecompressionBombWarning)
            image: Image = pillow.open(io.BytesIO(content))
            return image
    except Exception as error:  # Pillow's readers have a dozen errors for files that are not images
        raise _broken(named, error) from error


def decoded(content: bytes, named: str, channels: int) -> Image:
    """An image of mode L (one channel) or RGB (three). Raises BrokenImage, and DataError for a mode that has
    no meaning as colours.

    Transparent images are put on white, 16 bits become 8.
    """
    image = opened(content, named)
    try:
        image.load()
    except Exception as error:
        raise _broken(named, error) from error
    if image.mode == "F":
        raise DataError(f"{named} has the mode F, fractions without a range; expected 8 or 16 bits a channel")
    if image.mode in _SIXTEEN_BITS:
        image = _of_eight_bits(image, named)
    elif image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = _on_white(image)
    return image.convert("L" if channels == 1 else "RGB")


def channels_of(mode: str) -> int:
    """How many channels an image of this mode has, without transparency."""
    return 1 if mode in ("1", "L", "LA", *_SIXTEEN_BITS) else 3


def notes_on(modes: Counter[str], channels: int) -> tuple[str, ...]:
    """What is done to images of these modes, for the manifest."""
    total, found = modes.total(), Counter[str]()
    for mode, count in modes.items():
        if mode in _NOTES:
            found[_NOTES[mode]] += count
        if channels_of(mode) != channels:
            found["in colour, made grey" if channels == 1 else "in grey, repeated in three channels"] += count
    return tuple(f"{count:,} of {total:,} images: {note}" for note, count in found.items())


def _of_eight_bits(image: Image, named: str) -> Image:
    pillow = library("PIL.Image", "vision")
    values = np.asarray(image).astype(np.int64)
    if values.min() < 0 or values.max() > 65535:
        raise DataError(
            f"{named} has values from {values.min()} to {values.max()}; expected 8 or 16 bits a channel"
        )
    made: Image = pillow.fromarray(np.round(values / 257).astype(np.uint8))
    return made


def _on_white(image: Image) -> Image:
    pillow = library("PIL.Image", "vision")
    whole = image.convert("RGBA")
    white = pillow.new("RGBA", whole.size, (255, 255, 255, 255))
    made: Image = pillow.alpha_composite(white, whole)
    return made


def _broken(named: str, error: Exception) -> BrokenImage:
    reason = first_line(error)
    if "cannot identify" in reason:
        reason = "it is no image that Pillow knows"
    return BrokenImage(
        f"{named} can't be read: {reason}",
        hint="an interrupted copy or download, or a file of another kind",
    )
