"""Inputs of the model on a page: small pictures, as data URIs, and the beginnings of texts."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image

from psgrad.reports.page import data_uri
from psgrad.reports.words import brief, identifier, values_line
from psgrad.run.results import TopSample

Array = np.ndarray[Any, Any]

TEXT_LIMIT, TEXT_LINES = 400, 8
# Bad pixels get a colour that no scaling yields: a grey would pass for data.
NONFINITE_COLOUR = (255, 0, 200)


def to_rgb(image: Array) -> Array:
    """An image [H, W] or [C, H, W] of any value range as uint8 [H, W, 3].

    Bytes are taken as they are, floats within 0..1 as fractions of white; anything else is scaled to its own
    range. One channel is grey, three are RGB, the fourth of four (alpha) is dropped; of any other number the
    mean is shown.

    Raises:
        ValueError: the array is no image.
    """
    array = np.asarray(image)
    if array.ndim == 2:
        array = array[None]
    if array.ndim != 3 or 0 in array.shape:
        raise ValueError(f"an image has shape [H, W] or [C, H, W], not {list(np.shape(image))}")
    channels = array[:3] if len(array) in (3, 4) else array
    values = channels.astype(np.float64)
    finite = np.isfinite(values)
    scaled = _scale(np.where(finite, values, 0.0), array.dtype, values[finite])
    if len(scaled) != 3:
        scaled = np.broadcast_to(scaled.mean(axis=0), (3, *scaled.shape[1:]))
    pixels = np.clip(np.round(scaled * 255), 0, 255).astype(np.uint8).transpose(1, 2, 0)
    pixels[~finite.all(axis=0)] = NONFINITE_COLOUR
    return pixels


def thumbnail(image: Array, side: int) -> Image.Image:
    """The picture, no side longer than `side` pixels: large ones are averaged down, small ones are left for
    the viewer to enlarge.
    """
    picture = Image.fromarray(to_rgb(image))
    if max(picture.size) > side:
        picture.thumbnail((side, side), Image.Resampling.BOX)
    return picture


def to_png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, format="png", optimize=True)
    return buffer.getvalue()


def _scale(values: Array, dtype: np.dtype[Any], finite: Array) -> Array:
    if dtype == np.uint8:
        return values / 255
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    if np.issubdtype(dtype, np.floating) and low >= 0 and high <= 1:
        return values
    return (values - low) / (high - low) if high > low else np.full_like(values, 0.5)


def picture_uri(sample: TopSample, side: int) -> str | None:
    """A sample's picture, no side longer than `side` pixels; None where it is none."""
    return None if sample.image is None else data_uri("image/png", to_png(thumbnail(sample.image, side)))


def original_uri(sample: TopSample, side: int) -> str | None:
    """A sample's image as it is in the dataset, no side longer than `side` pixels; None where the model sees
    the dataset's own numbers. A JPEG, as photographs are several times as large as PNG.
    """
    if sample.original is None:
        return None
    picture = Image.fromarray(sample.original)
    picture.thumbnail((side, side))
    buffer = io.BytesIO()
    picture.save(buffer, format="jpeg", quality=80)
    return data_uri("image/jpeg", buffer.getvalue())


def shown_input(sample: TopSample | None, side: int) -> dict[str, str | None]:
    """What a page shows of a sample's input: data URIs of its picture, as the model and as the dataset has
    it, or a text; and words for readers who can't see it. Nothing of an input that was not kept.
    """
    if sample is None:
        return dict.fromkeys(("alt", "picture", "original", "text"))
    return {
        "alt": f"Input of sample {identifier(sample.id)}",
        "picture": picture_uri(sample, side),
        "original": original_uri(sample, side),
        "text": None if sample.image is not None else excerpt(shown_text(sample)),
    }


def shown_text(sample: TopSample) -> str | None:
    """A sample's text, or the values of its row on a line; None for a picture."""
    return sample.text if sample.text is not None else values_line(sample.values)


def excerpt(text: str | None) -> str | None:
    """The beginning of a sample's text."""
    if text is None:
        return None
    start = brief(text, TEXT_LIMIT, keep="\n\t")
    lines = start.split("\n")
    return start if len(lines) <= TEXT_LINES else "\n".join([*lines[:TEXT_LINES], "…"])
