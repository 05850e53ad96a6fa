"""Inputs of samples, as far as a person can look at them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from psgrad.inputs.samples import Samples
from psgrad.results import TopSample


def input_of(samples: Samples, row: int) -> TopSample:
    """A row's input, as far as a person can look at it."""
    text = samples.describe(row)
    image = as_image(samples.read(row, row + 1).inputs) if text is None else None
    return TopSample(samples.ids[row], image, text)


def as_image(inputs: tuple[torch.Tensor, ...]) -> np.ndarray[Any, Any] | None:
    """The first input as [H, W] or [C, H, W], if that is its shape: one, three or four channels, or none."""
    image = inputs[0][0]
    if image.is_floating_point() and (image.dim() == 2 or (image.dim() == 3 and image.shape[0] in (1, 3, 4))) and min(image.shape[-2:]) > 1:
        array: np.ndarray[Any, Any] = image.numpy()
        return array
    return None
