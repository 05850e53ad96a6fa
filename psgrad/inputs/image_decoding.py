"""Images out of files and bytes, by Pillow: their modes, and what is wrong with them. No torch."""

from __future__ import annotations

import io
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from psgrad.errors import DataError, UnreadableRow
from psgrad.inputs.models.hub import library
from psgrad.wording import first_line

if TYPE_CHECKING:
    from PIL.Image import Image

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
        raise BrokenImage(f"{where} has no image", expected="the path of an image, or its bytes")
    path = folder / value
    try:
        return path.read_bytes(), f"the image {path} in {where}"
    except OSError as error:
        raise BrokenImage(
            f"the image {path} in {where} can't be read: {error.strerror}",
            next_step=f"check the path; it is relative to {folder}",
        ) from error


def opened(content: bytes, named: str) -> Image:
    """An image of which only the header was read. Raises BrokenImage."""
    pillow = library("PIL.Image", "vision")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", pillow.DecompressionBombWarning)
            image: Image = pillow.open(io.BytesIO(content))
            return image
    except Exception as error:  # Pillow's readers have a dozen errors for what is no image
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
        raise DataError(
            f"{named} has the mode F, fractions without a range", expected="8 or 16 bits a channel"
        )
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
            f"{named} has values from {values.min()} to {values.max()}", expected="8 or 16 bits a channel"
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
        f"{named} can't be read: {reason}", cause="an interrupted copy or download, or a file of another kind"
    )
