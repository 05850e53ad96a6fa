"""Signed numbers as colours: orange raises, blue lowers. The two stay apart for every kind of colour vision,
and in grey they are dark.
"""

from __future__ import annotations

import numpy as np

from psgrad.reports.drawing import REVIEW, Array

LEVELS = 6  # shades on either side of nothing
RAISES, LOWERS = REVIEW, "#2b66b0"

# How much of the full colour lies over a picture, and behind dark letters, at the end of the scale.
_OVER_PICTURE = 0.9
_BEHIND_TEXT = {1: 0.7, -1: 0.6}


def scale_of(values: Array) -> float:
    """What full colour stands for: the largest magnitude; 0 where there is nothing but zeros."""
    return float(np.abs(values).max(initial=0.0))


def overlaid(grey: Array, values: Array) -> Array:
    """uint8 [H, W, 3]: a picture's greys [H, W], 0 to 255, under the colours of values [H, W], full at the
    largest magnitude.
    """
    scale = scale_of(values)
    share = (np.abs(values) / scale if scale else np.zeros(values.shape)) * _OVER_PICTURE
    colours = np.where((values >= 0)[..., None], _rgb(RAISES), _rgb(LOWERS))
    paper = np.repeat(
        (70 + grey * (170 / 255))[..., None], 3, axis=2
    )  # no black, no white: both colours are seen on all of it
    mixed = paper * (1 - share[..., None]) + colours * share[..., None]
    rounded: Array = np.round(mixed).astype(np.uint8)
    return rounded


def level_of(value: float, scale: float) -> int:
    """Which of the shades, -LEVELS to LEVELS."""
    return int(np.clip(round(LEVELS * value / scale), -LEVELS, LEVELS)) if scale else 0


def shade(level: int) -> str:
    """The background '#rrggbb' of a level on white paper: so light that INK is read on it."""
    mixed = 255 * (1 - _share(level)) + _rgb(_side(level)) * _share(level)
    return "#" + "".join(f"{round(part):02x}" for part in mixed)


def style_of(level: int) -> str:
    """CSS of a level: a background that lets light or dark paper through, so that the page's own ink is read
    on it; empty for nothing.
    """
    red, green, blue = _rgb(_side(level)).astype(int)
    return f"background:rgba({red},{green},{blue},{_share(level):.3g})" if level else ""


def _side(level: int) -> str:
    return RAISES if level >= 0 else LOWERS


def _share(level: int) -> float:
    return _BEHIND_TEXT[1 if level >= 0 else -1] * abs(level) / LEVELS


def _rgb(colour: str) -> Array:
    return np.array([int(colour[place : place + 2], 16) for place in (1, 3, 5)], dtype=np.float64)
