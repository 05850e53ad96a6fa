"""What all figures share: their look (psgrad.mplstyle), their two forms as files, and a few helpers for axes.

Matplotlib's objects are used directly: no pyplot, no global state, no window system.
"""

from __future__ import annotations

import io
import re
import textwrap
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

Array = np.ndarray[Any, Any]

REST, DARK, REVIEW, INK, QUIET = "#5b7fa6", "#1d3a5c", "#d9640f", "#1f2933", "#6b7785"
DASHES = (0, (4, 3))
MAX_GROUPS = 30  # rows in one figure: more can't be read
# Of each colour its place on a dark page.
_ON_DARK = {
    REST: "#83abd6",
    DARK: "#d3e3f5",
    REVIEW: "#f2954d",
    INK: "#e4e8ec",
    QUIET: "#a7b1bc",
    "#e6e9ed": "#303841",
}
_TITLE_LETTERS = 90

styled = style.context(str(Path(__file__).with_name("psgrad.mplstyle")))
"""A decorator: a function that draws does so in the look of psgrad.mplstyle."""


class ShownFigure(Figure):
    """A figure that a notebook shows, also where pyplot was never imported."""

    @styled
    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=80)
        return buffer.getvalue()


@dataclass(frozen=True)
class Plot:
    """A figure with its words."""

    name: str
    title: str
    caption: str
    figure: Figure

    @property
    def alt(self) -> str:
        """What it shows, for readers who can't see it."""
        return f"{self.title}: {self.caption}"

    @styled
    def png(self, dpi: int = 150) -> bytes:
        """As PNG, below its title: a file is looked at without the page, which has the title as text."""
        title = "\n".join(textwrap.wrap(self.title, _TITLE_LETTERS))
        above = self.figure.suptitle(title, x=0.01, ha="left", parse_math=False)
        try:
            return self._saved("png", dpi=dpi)
        finally:
            above.set_in_layout(False)
            above.set_visible(False)

    def svg(self) -> bytes:
        """As SVG without a ground, whose colours follow the light or dark of the page that it stands on. The
        same figure gives the same bytes.
        """
        drawn = self._saved("svg", transparent=True, dpi=130, metadata={"Date": None})
        rules = "".join(
            f'[style*="{what}: {light}"]{{{what}:{dark}!important}}'
            for light, dark in _ON_DARK.items()
            for what in ("fill", "stroke")
        )
        # A hundredth of a point is less than a screen shows: half of the bytes are digits beyond it, comments
        # and the metadata.
        drawn = re.sub(rb"<!--.*?-->\s*|<metadata>.*?</metadata>\s*", b"", drawn, flags=re.DOTALL)
        drawn = re.sub(rb' (?:d|x|y)="[^"]*"', lambda found: re.sub(rb"(\.\d\d)\d+", rb"\1", found[0]), drawn)
        dark = f"<style>@media screen and (prefers-color-scheme:dark){{{rules}}}</style>"
        return re.sub(rb"\n\s*", b"\n", drawn).replace(b"<defs>", f"{dark}<defs>".encode(), 1)

    @styled
    def _saved(self, kind: str, **options: Any) -> bytes:
        buffer = io.BytesIO()
        # Class names may be in scripts that the font lacks; a box in the figure is enough said.
        with warnings.catch_warnings(action="ignore", category=UserWarning):
            self.figure.savefig(buffer, format=kind, **options)
        return buffer.getvalue()


def figure_with_axes(height: float) -> tuple[Figure, Axes]:
    """A figure of a height in inches, with one pair of axes."""
    figure, (axes,) = figure_with_panels(height, 1)
    return figure, axes


@styled
def figure_with_panels(
    height: float, across: int, down: int = 1, **options: Any
) -> tuple[Figure, list[Axes]]:
    """A figure of a height in inches, with several pairs of axes, row by row. options: of matplotlib's
    `subplots`.
    """
    figure = ShownFigure(figsize=(8.0, height))
    return figure, figure.subplots(down, across, squeeze=False, **options).ravel().tolist()


@styled
def legend_above(axes: Axes, columns: int = 4) -> None:
    """The legend between title and axes, where nothing is drawn under it."""
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=columns)


def count_axis(axes: Axes, which: str = "y") -> None:
    """Ticks at whole numbers alone, for what is counted."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1, steps=(1, 2, 5, 10)))
    axis.set_major_formatter("{x:,.0f}")


def plain_log_ticks(axis: Axis) -> None:
    """1, 2, 5, 10 in place of powers of ten, along a logarithmic axis of a decade or two."""
    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:,g}")
    axis.set_minor_formatter(NullFormatter())


def scatter(
    axes: Axes, rows: pd.DataFrame, columns: tuple[str, str], look: tuple[str, str], words: str | None
) -> None:
    """A point a row, one column across and one up, as pixels in an SVG; look: (colour, marker 'o' or 'x');
    words: for the legend.
    """
    if len(rows):
        (across, up), (colour, marker) = columns, look
        points = axes.scatter(rows[across], rows[up], s=16, color=colour, marker=marker, label=words)
        points.set(linewidths=1.1 if marker == "x" else 0, alpha=0.7, rasterized=True)


def rows_height(rows: int) -> float:
    """The height of a figure with a row a thing, in inches."""
    return 1.0 + 0.27 * max(rows, 3)


def name_rows(axes: Axes, names: list[str]) -> None:
    """Names beside rows 0, 1, ... from the top: text, whatever dollar signs it has."""
    axes.set_yticks(np.arange(len(names)), names, parse_math=False)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)


def say_empty(axes: Axes, words: str = "no finite, positive gradient norm to draw") -> None:
    """Words in place of what can't be drawn."""
    axes.text(0.5, 0.5, words, transform=axes.transAxes, ha="center", va="center", color=QUIET)
    axes.set(xticks=[], yticks=[])


def log_bins(values: Array, count: int) -> Array:
    """Edges of bins that are even on a logarithmic axis, fewer for few values."""
    low, high = float(values.min()), float(values.max())
    if high <= low * 1.001:
        low, high = low / 2, high * 2
    return np.geomspace(low, high * (1 + 1e-9), min(count, 10 + len(values) // 4) + 1)
