"""The figures of input attribution: a sheet of overlays, or of highlighted passages, for each measure."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from psgrad.reports.attribution_section import (
    ADDITIVE,
    LOWERS,
    RAISES,
    Passage,
    attribution_measures,
    input_of,
    maps_of,
    passages_of,
    picture_of,
    scale_of,
    shade,
    shown_rows,
    unit_of,
    unit_words,
)
from psgrad.reports.drawing import (
    GRID,
    INK,
    QUIET,
    WIDTH_IN,
    Plot,
    line_height,
    place_picture,
    place_words,
    sheet,
    write,
)
from psgrad.reports.pictures import to_rgb
from psgrad.reports.words import identifier, number, shorten_middle
from psgrad.run.results import AnalyzeResult, MeasureResult, TopSample

MAX_PICTURES = 12
MAX_PASSAGES = 6
_PER_LINE = 4  # samples, each as it is and under its colours
_COLUMNS, _LINE_IN, _CELL_IN = 96, 0.17, 0.0815  # letters on a line of text, and their places

_SIGNED = (
    "Orange raises the {of}, blue lowers it; full colour is the largest magnitude in the sample, which is"
    " said with it."
)
_UNSIGNED = (
    "The darker, the steeper the {of}, up or down; full colour is the largest slope in the sample, which is"
    " said with it."
)

_OF_TOKENS = {
    "token_loss": "The darker, the larger the {of} of the token itself.",
    "token_share": "Orange adds to the squared norm of the gradient, blue takes from it.",
}


def attribution_plots(result: AnalyzeResult) -> list[Plot]:
    """A sheet a measure that kept maps of pictures or of ids."""
    found = (attribution_plot(result, measure) for measure in attribution_measures(result))
    return [plot for plot in found if plot is not None]


def attribution_plot(result: AnalyzeResult, measure: MeasureResult) -> Plot | None:
    """The sheet of one measure, largest gradient norm first; None where there is nothing that can be looked
    at.
    """
    rows = shown_rows([measure])
    inputs = {row: input_of(result, row) for row in rows}
    pictures = [(row, inputs[row]) for row in rows if picture_of(measure, row, inputs[row]) is not None][
        :MAX_PICTURES
    ]
    name, title = (
        f"attribution_{measure.name}",
        measure.title
        if measure.name in _OF_TOKENS
        else f"{measure.title}: which parts of the input the samples depend on",
    )
    if pictures:
        caption = (
            "The largest gradient norms: each input as it is, and under its colours."
            f" {_SIGNED.format(of=unit_of(measure))}"
        )
        return Plot(
            name, title, caption, _sheet(measure, pictures, unit_words(result, measure)), vector=False
        )
    mapped = [(row, shown) for row, shown in inputs.items() if maps_of(measure, row)]
    passages = [
        (shown, passage) for row, shown in mapped for passage in passages_of(result, measure, row, shown)
    ]
    if passages:
        words = _OF_TOKENS.get(measure.name) or (_SIGNED if measure.name in ADDITIVE else _UNSIGNED)
        caption = f"The passages of the largest gradient norms. {words.format(of=unit_of(measure))}"
        return Plot(name, title, caption, _text(passages[:MAX_PASSAGES]), vector=False)
    return None


# -- pictures ------------------------------------------------------------------------------------------------


def _sheet(measure: MeasureResult, pictures: list[tuple[int, TopSample]], unit: str) -> Figure:
    cell = WIDTH_IN / (2 * _PER_LINE)
    row = cell + line_height(6.5) + 0.08
    lines = -(-len(pictures) // _PER_LINE)
    figure, axes = sheet(row * lines + 0.5)
    for place, (number_of_row, shown) in enumerate(pictures):
        line, column = divmod(place, _PER_LINE)
        found = picture_of(measure, number_of_row, shown)
        assert found is not None
        assert shown.image is not None
        words = (identifier(shown.id), INK), (f"\u00b1 {number(scale_of(found[1]))}", QUIET)
        for side, (pixels, (said, colour)) in enumerate(
            zip((to_rgb(shown.image), found[0]), words, strict=True)
        ):
            left = (2 * column + side) * cell
            place_picture(axes, pixels, left + 0.03, line * row + 0.03, cell - 0.06, frame=GRID)
            place_words(
                axes, [said], left + 0.02, line * row + cell - 0.02, cell - 0.04, size=6.5, color=colour
            )
    _legend(axes, row * lines + 0.06, unit)
    return figure


def _legend(axes: Axes, top: float, unit: str) -> None:
    shades = LinearSegmentedColormap.from_list("attribution", [LOWERS, "#d0d4d9", RAISES])
    axes.imshow(
        np.linspace(0, 1, 256)[None],
        cmap=shades,
        extent=(0.03, WIDTH_IN - 0.03, top + 0.1, top),
        aspect="auto",
    )
    for where, side, words in (
        (0.03, "left", "lowers"),
        (WIDTH_IN / 2, "center", "nothing"),
        (WIDTH_IN - 0.03, "right", "raises"),
    ):
        write(axes, (where, top + 0.22), words, 7.5, ha=side, va="baseline")
    below = f"full colour: the number below a picture, in {unit}"
    write(axes, (WIDTH_IN / 2, top + 0.36), below, 7.5, ha="center", va="baseline", color=QUIET)


# -- text ----------------------------------------------------------------------------------------------------


def _text(passages: list[tuple[TopSample, Passage]]) -> Figure:
    """Letter by letter in a grid of equal cells, so that backgrounds stand behind their letters."""
    wrapped = [_cells(passage) for _, passage in passages]
    total = sum(len(lines) + 2 for lines in wrapped)
    figure = Figure(figsize=(WIDTH_IN, _LINE_IN * (total + 1)))
    axes = figure.add_axes((0.01, 0.0, 0.98, 1.0))
    axes.set(xlim=(0, WIDTH_IN * 0.98 / _CELL_IN), ylim=(total + 0.5, -0.5))
    axes.axis("off")
    top = 0.5
    for (shown, passage), lines in zip(passages, wrapped, strict=True):
        note = f"; {passage.note}" if passage.note else ""
        words = f"{shorten_middle(identifier(shown.id), 50)}   {passage.scale}{note}"
        write(axes, (0, top), words, color=QUIET)
        for below, line in enumerate(lines, start=1):
            for column, (letter, level) in enumerate(line):
                if level:
                    axes.add_patch(
                        Rectangle((column, top + below - 0.5), 1, 1, color=shade(level), linewidth=0)
                    )
                write(axes, (column + 0.5, top + below), letter, 7.5, family="monospace", ha="center")
        top += len(lines) + 2
    return figure


def _cells(passage: Passage) -> list[list[tuple[str, int]]]:
    """(letter, level) by lines: the text's own, broken where they are too long."""
    lines: list[list[tuple[str, int]]] = [[]]
    for span in passage.spans:
        for letter in span.text.expandtabs(4):
            if letter == "\n":
                lines[-1].append(("\u00b6" if span.level else " ", span.level))
                lines.append([])
                continue
            if len(lines[-1]) >= _COLUMNS:
                lines.append([])
            lines[-1].append((letter, span.level))
    return lines
