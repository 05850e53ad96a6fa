"""Sheets of pictures with words: places in inches on one pair of axes, as axes for each picture take ten times as long to draw."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from psgrad.reports.drawing import INK, WIDTH_IN, Array
from psgrad.reports.words import shorten_middle

_LETTER = 0.6  # of the font's size: what a letter takes on average, and a little more
_LINE = 1.3


def sheet(height: float) -> tuple[Figure, Axes]:
    """An empty sheet, WIDTH_IN wide; its axes count inches from the left and from the top."""
    figure = Figure(figsize=(WIDTH_IN, height))
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set(xlim=(0, WIDTH_IN), ylim=(height, 0))
    axes.axis("off")
    axes.autoscale(False)
    return figure, axes


def place_picture(axes: Axes, pixels: Array, left: float, top: float, side: float, frame: str | None = None) -> None:
    """A picture [H, W, 3] in the middle of a square of this side (inches), as large as its form allows."""
    height, width = pixels.shape[:2]
    scale = side / max(height, width)
    x, y = left + (side - width * scale) / 2, top + (side - height * scale) / 2
    axes.imshow(pixels, extent=(x, x + width * scale, y + height * scale, y), aspect="auto", interpolation="nearest")
    if frame:
        axes.add_patch(Rectangle((x, y), width * scale, height * scale, fill=False, edgecolor=frame, linewidth=0.8))


def place_words(axes: Axes, lines: list[str], left: float, top: float, width: float, **style: Any) -> float:
    """Lines of text, centred below each other from `top` on, each cut in its middle to the width (inches); returns where they end."""
    size = style.pop("size", 7.5)
    for line in lines:
        top += line_height(size)
        words = shorten_middle(line, letters_in(width, size, bold=style.get("weight") == "bold"))
        axes.text(left + width / 2, top - 0.25 * size / 72, words, ha="center", size=size, parse_math=False, **{"color": INK, **style})
    return top


def line_height(size: float) -> float:
    """Inches from one line to the next."""
    return _LINE * size / 72


def letters_in(width: float, size: float, bold: bool = False) -> int:
    """How many letters of a font's size fit into a width in inches."""
    return max(4, int(width * 72 / (size * _LETTER * (1.12 if bold else 1))))
