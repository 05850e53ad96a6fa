"""What all figures share: their form as a file, colours, axes, legends, and sheets of pictures with words.

Matplotlib's objects are used directly: no pyplot, no global state, no window system. A sheet has one pair of
axes with places in inches, as axes for each picture take ten times as long to draw.
"""

from __future__ import annotations

import io
import re
import textwrap
import warnings
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.transforms import Bbox

from psgrad.reports.ticks import plain_ticks
from psgrad.reports.words import shorten_middle

Array = np.ndarray[Any, Any]

# Blue and orange stay apart for every kind of colour vision, and in grey.
REST, DARK, REVIEW, INK, QUIET, GRID = "#5b7fa6", "#1d3a5c", "#d9640f", "#1f2933", "#6b7785", "#e6e9ed"

# The colours on a light and a dark page: (name of the page's colour, on white, on near black).
SHADES = (
    ("rest", REST, "#83abd6"),
    ("dark", DARK, "#d3e3f5"),
    ("review", REVIEW, "#f2954d"),
    ("ink", INK, "#e4e8ec"),
    ("quiet", QUIET, "#a7b1bc"),
    ("grid", GRID, "#303841"),
)

WIDTH_IN = 8.0
DASHES = (0, (4, 3))
TITLE_IN, TITLE_LETTERS = 0.2, 96  # a line of a title: its height, and what fits into it


@dataclass(frozen=True)
class Plot:
    """A figure with its words. `vector`: few enough marks to be small as SVG. `alt`: what it shows, for
    readers who can't see it.
    """

    name: str
    title: str
    caption: str
    figure: Figure
    vector: bool = True
    alt: str = ""

    def png(self, dpi: int = 150, titled: bool = True) -> bytes:
        """As PNG, below its title: a file is looked at without the page, which has the title as text."""
        self._arrange()
        if not titled:
            return self._render("png", dpi=dpi)
        width, height = self.figure.get_size_inches()
        lines = textwrap.wrap(self.title, TITLE_LETTERS) or [""]
        strip = TITLE_IN * len(lines) + 0.1
        title = self.figure.text(
            0.012,
            1 + strip / 2 / height,
            "\n".join(lines),
            va="center",
            size=11,
            weight="bold",
            color=INK,
            parse_math=False,
        )
        try:
            return self._render("png", dpi=dpi, bbox_inches=Bbox.from_bounds(0, 0, width, height + strip))
        finally:
            title.remove()

    def svg(self, **options: Any) -> bytes:
        # Without a date and with fixed ids the same run gives the same bytes.
        self._arrange()
        with matplotlib.rc_context({"svg.hashsalt": "psgrad"}):
            return self._render("svg", metadata={"Date": None}, **options)

    def adaptive_svg(self) -> bytes:
        """As SVG without a ground, whose colours follow the light or dark of the page that it stands on."""
        drawn = self.svg(transparent=True, dpi=130)
        rules = "".join(
            f'[style*="{what}: {light}"]{{{what}:{dark}!important}}'
            for _, light, dark in SHADES
            for what in ("fill", "stroke")
        )
        # A hundredth of a point is less than a screen shows: half of the bytes are digits beyond it, comments
        # and the metadata.
        drawn = re.sub(rb"<!--.*?-->\s*|<metadata>.*?</metadata>\s*", b"", drawn, flags=re.DOTALL)
        drawn = re.sub(rb' (?:d|x|y)="[^"]*"', lambda found: re.sub(rb"(\.\d\d)\d+", rb"\1", found[0]), drawn)
        drawn = re.sub(rb"\n\s*", b"\n", drawn)
        return drawn.replace(
            b"<defs>", b"<style>@media (prefers-color-scheme:dark){" + rules.encode() + b"}</style><defs>", 1
        )

    def _arrange(self) -> None:
        """Lay the figure out once: what is drawn in two formats keeps the first one's places."""
        engine = self.figure.get_layout_engine()
        if engine is not None:
            _name_scales(self.figure)
            plain_ticks(self.figure)
            with _silent_fonts():
                if len(self.figure.axes) == 1 and not self.figure.get_suptitle():
                    _fill(self.figure, self.figure.axes[0])
                else:
                    engine.execute(self.figure)
            self.figure.set_layout_engine(None)

    def _render(self, kind: str, **options: Any) -> bytes:
        buffer = io.BytesIO()
        with _silent_fonts():
            self.figure.savefig(buffer, format=kind, **options)
        return buffer.getvalue()


def _fill(figure: Figure, axes: Axes) -> None:
    """Let the axes fill the figure as far as their labels leave room: measured once, where matplotlib's own
    layout measures four times.
    """
    axes.set_position((0.1, 0.15, 0.85, 0.75))
    canvas = FigureCanvasAgg(figure)
    inner, outer = axes.get_window_extent(), axes.get_tightbbox(canvas.get_renderer(), for_layout_only=True)  # type: ignore[no-untyped-call]
    assert outer is not None
    width, height = figure.bbox.size
    pad = 0.04 * figure.dpi
    left, low = inner.x0 - outer.x0 + pad, inner.y0 - outer.y0 + pad
    right, high = width - (outer.x1 - inner.x1) - pad, height - (outer.y1 - inner.y1) - pad
    axes.set_position((left / width, low / height, (right - left) / width, (high - low) / height))


def _name_scales(figure: Figure) -> None:
    """Have the label of every logarithmic axis say that it is one."""
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            words, label = _SCALES.get(axis.get_scale()), axis.get_label_text()
            if words and "log" not in label:
                axis.set_label_text(
                    f"{label[:-1]}, {words})"
                    if label.endswith(")")
                    else f"{label} ({words})"
                    if label
                    else words
                )


_SCALES = {"log": "log scale", "symlog": "signed log scale: linear about zero"}


def _silent_fonts() -> warnings.catch_warnings[None]:
    """Class names may be in scripts that the font lacks; a box in the figure is enough said."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)


def legend_above(axes: Axes, columns: int = 4) -> None:
    """The legend between title and axes, where nothing is drawn under it."""
    axes.legend(
        frameon=False,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=columns,
        labelcolor=INK,
        fontsize=9,
        borderaxespad=0.2,
        columnspacing=1.5,
    )


def figure_with_axes(height: float) -> tuple[Figure, Axes]:
    """A figure of a height in inches, with one pair of axes."""
    figure, (axes,) = figure_with_panels(height, 1)
    return figure, axes


def figure_with_panels(
    height: float, across: int, down: int = 1, **options: Any
) -> tuple[Figure, list[Axes]]:
    """A figure of a height in inches, with several pairs of axes, row by row. options: of matplotlib's
    `subplots`.
    """
    figure = Figure(figsize=(WIDTH_IN, height), layout="constrained")
    panels: list[Axes] = figure.subplots(down, across, squeeze=False, **options).ravel().tolist()
    for axes in panels:
        _style(axes)
    return figure, panels


def _style(axes: Axes) -> None:
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


def scatter(axes: Axes, rows: pd.DataFrame, across: str, look: tuple[str, str], words: str | None) -> None:
    """A point a row, its loss against a column, `across`; look: (colour, marker 'o' or 'x'); words: for the
    legend.
    """
    if len(rows):
        axes.scatter(
            rows[across],
            rows["loss"],
            s=16,
            color=look[0],
            marker=look[1],
            linewidths=1.1 if look[1] == "x" else 0,
            alpha=0.7,
            label=words,
        )


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


def write(axes: Axes, place: tuple[float, float], words: str, size: float = 8, **style: Any) -> None:
    """Words at a place, whatever dollar signs they have."""
    axes.text(*place, words, size=size, parse_math=False, **{"va": "center", "color": INK, **style})


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


def place_picture(
    axes: Axes, pixels: Array, left: float, top: float, side: float, frame: str | None = None
) -> None:
    """A picture [H, W, 3] in the middle of a square of this side (inches), as large as its form allows."""
    height, width = pixels.shape[:2]
    scale = side / max(height, width)
    x, y = left + (side - width * scale) / 2, top + (side - height * scale) / 2
    axes.imshow(
        pixels, extent=(x, x + width * scale, y + height * scale, y), aspect="auto", interpolation="nearest"
    )
    if frame:
        axes.add_patch(
            Rectangle((x, y), width * scale, height * scale, fill=False, edgecolor=frame, linewidth=0.8)
        )


def place_words(axes: Axes, lines: list[str], left: float, top: float, width: float, **style: Any) -> float:
    """Lines of text, centred below each other from `top` on, each cut in its middle to the width (inches);
    returns where they end.
    """
    size = style.pop("size", 7.5)
    for line in lines:
        top += line_height(size)
        words = shorten_middle(line, letters_in(width, size, bold=style.get("weight") == "bold"))
        place = (left + width / 2, top - 0.25 * size / 72)
        write(axes, place, words, size, ha="center", va="baseline", **style)
    return top


def line_height(size: float) -> float:
    """Inches from one line to the next."""
    return _LINE * size / 72


def letters_in(width: float, size: float, bold: bool = False) -> int:
    """How many letters of a font's size fit into a width in inches."""
    return max(4, int(width * 72 / (size * _LETTER * (1.12 if bold else 1))))
