"""What all figures share: their form as a file, colours, axes.

Matplotlib's objects are used directly: no pyplot, no global state, no window system.
"""

from __future__ import annotations

import io
import re
import warnings
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Array = np.ndarray[Any, Any]

# Blue and orange stay apart for every kind of colour vision, and in grey.
REST, DARK, REVIEW, INK, QUIET, GRID = "#5b7fa6", "#1d3a5c", "#d9640f", "#1f2933", "#6b7785", "#e6e9ed"

# The same on a dark page: (name of the page's colour, on white, on near black).
SHADES = (
    ("rest", REST, "#83abd6"),
    ("dark", DARK, "#d3e3f5"),
    ("review", REVIEW, "#f2954d"),
    ("ink", INK, "#e4e8ec"),
    ("quiet", QUIET, "#a7b1bc"),
    ("grid", GRID, "#303841"),
)

WIDTH_IN = 8.0


@dataclass(frozen=True)
class Plot:
    """A figure with its words. `vector`: few enough marks to be small as SVG. `alt`: what it shows, for who can't see it."""

    name: str
    title: str
    caption: str
    figure: Figure
    vector: bool = True
    alt: str = ""

    def png(self, dpi: int = 150) -> bytes:
        return self._render("png", dpi=dpi)

    def svg(self) -> bytes:
        # Without a date and with fixed ids the same run gives the same bytes.
        with matplotlib.rc_context({"svg.hashsalt": "psgrad"}):
            return self._render("svg", metadata={"Date": None})

    def adaptive_svg(self) -> bytes:
        """As SVG without a ground, whose colours follow the light or dark of the page that it stands on."""
        with matplotlib.rc_context({"svg.hashsalt": "psgrad"}):
            drawn = self._render("svg", metadata={"Date": None}, transparent=True, dpi=130)
        rules = "".join(
            f'[style*="{what}: {light}"]{{{what}:{dark}!important}}' for _, light, dark in SHADES for what in ("fill", "stroke")
        )
        # A hundredth of a point is less than a screen shows: half of the bytes are digits beyond it, comments and the metadata.
        drawn = re.sub(rb"<!--.*?-->\s*|<metadata>.*?</metadata>\s*", b"", drawn, flags=re.DOTALL)
        drawn = re.sub(rb' (?:d|x|y)="[^"]*"', lambda found: re.sub(rb"(\.\d\d)\d+", rb"\1", found[0]), drawn)
        drawn = re.sub(rb"\n\s*", b"\n", drawn)
        return drawn.replace(b"<defs>", b"<style>@media (prefers-color-scheme:dark){" + rules.encode() + b"}</style><defs>", 1)

    def _render(self, kind: str, **options: Any) -> bytes:
        buffer = io.BytesIO()
        with warnings.catch_warnings():
            # Class names may be in scripts that the font lacks; a box in the figure is enough said.
            warnings.filterwarnings("ignore", message="Glyph .* missing")
            self.figure.savefig(buffer, format=kind, **options)
        return buffer.getvalue()


def figure_with_axes(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH_IN, height), layout="constrained")
    axes = figure.subplots()
    style(axes)
    return figure, axes


def style(axes: Axes) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(QUIET)
    axes.tick_params(colors=QUIET, labelcolor=INK, labelsize=9, length=3)
    axes.tick_params(which="minor", colors=QUIET, labelcolor=INK, labelsize=9)
    axes.tick_params(axis="y", which="both", length=0)
    axes.tick_params(axis="x", which="minor", length=1.5, color=QUIET)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for axis in (axes.xaxis, axes.yaxis):
        axis.label.set(color=QUIET, size=9)


def rows_height(rows: int) -> float:
    return 1.0 + 0.27 * max(rows, 3)


def name_rows(axes: Axes, names: list[str]) -> None:
    # A name is text, whatever dollar signs it has.
    axes.set_yticks(np.arange(len(names)), names, parse_math=False)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)


def say_empty(axes: Axes, words: str = "no finite, positive gradient norm to draw") -> None:
    axes.text(0.5, 0.5, words, transform=axes.transAxes, ha="center", va="center", color=QUIET)
    axes.set(xticks=[], yticks=[])


def log_bins(values: Array, count: int) -> Array:
    low, high = float(values.min()), float(values.max())
    if high <= low * 1.001:
        low, high = low / 2, high * 2
    return np.geomspace(low, high * (1 + 1e-9), min(count, 10 + len(values) // 4) + 1)
