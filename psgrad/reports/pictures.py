"""Arrays -> small pictures."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from PIL import Image

Array = np.ndarray[Any, Any]

# Bad pixels get a colour that no scaling yields: a grey would pass for data.
NONFINITE_COLOUR = (255, 0, 200)


def to_rgb(image: Array) -> Array:
    """An image [H, W] or [C, H, W] of any value range as uint8 [H, W, 3].

    Bytes are taken as they are, floats within 0..1 as fractions of white; anything else is scaled to its own range. One channel is grey,
    three are RGB, the fourth of four (alpha) is dropped; of any other number the mean is shown.

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
    """The picture, no side longer than `side` pixels: large ones are averaged down, small ones are left for the viewer to enlarge."""
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
