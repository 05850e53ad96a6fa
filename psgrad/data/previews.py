"""What a report shows of a sample's input: a text, a picture, or the values of a table's row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from psgrad.data.rows import Samples
from psgrad.run.results import MeasureResult, TopSample

MAX_VALUES = 200  # of a row, and of ids in one of them
_SIDE = 192  # pixels of an image as it is in the dataset


def input_of(samples: Samples, row: int) -> TopSample:
    """A row's input, as far as a person can look at it: a text, a picture, or the values of a table's row."""
    text = samples.describe(row)
    inputs = samples.take([row]).inputs_alone(samples.weighted).inputs if text is None else ()
    image = as_image(inputs) if inputs else None
    values = values_of(inputs, samples.input_names) if image is None else ()
    return TopSample(
        samples.ids[row], image, text, values, None if image is None else _original(samples, row)
    )


def _original(samples: Samples, row: int) -> np.ndarray[Any, Any] | None:
    """A row's image as it is in the dataset, made small; None where the dataset has none."""
    picture = samples.picture(row)
    if picture is None:
        return None
    picture = picture.convert("RGB")
    picture.thumbnail((_SIDE, _SIDE))
    return np.asarray(picture)


def as_image(inputs: tuple[torch.Tensor, ...]) -> np.ndarray[Any, Any] | None:
    """The first input as [H, W] or [C, H, W], if that is its shape: one, three or four channels, or none."""
    image = inputs[0][0]
    if (
        image.is_floating_point()
        and (image.dim() == 2 or (image.dim() == 3 and image.shape[0] in (1, 3, 4)))
        and min(image.shape[-2:]) > 1
    ):
        array: np.ndarray[Any, Any] = image.numpy()
        return array
    return None


def values_of(
    inputs: tuple[torch.Tensor, ...], names: Sequence[str]
) -> tuple[tuple[str, float | int | str | None], ...]:
    """(column, value) of one row, inputs [1] or [1, k] each; a list of whole numbers, such as ids, is one
    text. Empty for other inputs.
    """
    rows = [x[0] for x in inputs]
    if any(x.dim() > 1 for x in rows):
        return ()
    found: list[tuple[str, float | int | str | None]] = []
    one_vector = len(rows) == 1 and rows[0].dim() == 1 and len(names) == len(rows[0]) > 1
    for place, x in enumerate(rows):
        name = names[place] if place < len(names) and not one_vector else f"input {place}"
        if one_vector:
            found += zip(names, x.tolist(), strict=True)
        elif not x.dim():
            found.append((name, x.item()))
        elif not x.is_floating_point():
            more = f" and {len(x) - MAX_VALUES:,} more" if len(x) > MAX_VALUES else ""
            found.append((name, " ".join(map(str, x[:MAX_VALUES].tolist())) + more))
        else:
            found += [(f"{name}[{number}]", value) for number, value in enumerate(x[:MAX_VALUES].tolist())]
    return tuple(found[:MAX_VALUES])


def vocabulary_of(samples: Samples, measures: Iterable[MeasureResult]) -> dict[int, str]:
    """The text of each id in the maps of attribution, of the first input of ids; empty for none known."""
    kept = [
        measure.arrays[name]
        for measure in measures
        for name in sorted(measure.arrays)
        if name.startswith("ids_")
    ][:1]
    ids = np.unique(kept[0]).tolist() if kept else []
    if not ids or samples.tokenizer is None:
        return {}
    return dict(zip(ids, samples.tokenizer.pieces(ids), strict=True))
