"""Images in files: a folder of images as a table, with a folder for each class, and images out
of files and bytes, by Pillow: their modes, and what is wrong with them. No torch.
"""

from __future__ import annotations

import hashlib
import io
import os
import warnings
from collections.abc import Mapping, Sequence
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
from psgrad.wording import first_line

if TYPE_CHECKING:
    from PIL.Image import Image


IMAGE, LABEL = "image", "label"
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
    images = _listed_images(folder, classes)
    with_images = {parts[0] for parts in images}
    if empty := [name for name in classes if name not in with_images] or ([] if images else [""]):
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
    return TableRows(table, str(folder), listing)


def class_folders(folder: Path) -> list[str]:
    """The names of the classes: the folders in a folder, in sorted order."""
    return sorted(each.name for each in os.scandir(folder) if each.is_dir() and not each.name.startswith("."))


def _listed_images(folder: Path, classes: Sequence[str]) -> list[tuple[str, ...]]:
    """The images in a folder and below it, in the folder of a class where there are classes: the parts of
    their paths, in order. Hidden ones are left out, and links to folders below those of classes.
    """
    found = []
    for start in [folder / name for name in classes] or [folder]:
        for place, folders, files in os.walk(start):
            folders[:] = [name for name in folders if not Path(place, name).is_symlink()]
            parts = Path(place).relative_to(folder).parts
            images = (name for name in files if name.lower().endswith(SUFFIXES) and name[0] != ".")
            found += [(*parts, name) for name in images]
    return sorted(found)


SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
"""Of the files in a folder that are images."""
_SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I")


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
