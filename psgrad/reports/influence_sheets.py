"""A sheet a query: its input, and its strongest proponents and opponents as pictures, or as rows of a table."""

from __future__ import annotations

import textwrap

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from psgrad.reports.drawing import GRID, INK, QUIET, REST, REVIEW, WIDTH_IN, Plot
from psgrad.reports.influence_words import Example, examples, query_example, query_title, reported_queries, unit_words
from psgrad.reports.pictures import to_rgb
from psgrad.reports.plots import PICTURE_NOTE
from psgrad.reports.words import MISSING, brief, shorten
from psgrad.results import ALL_INDEX, SIGN, InfluenceResult

MAX_SHEETS = 6
PER_SIDE = 6

DIFFERS_NOTE = "Bold: the model's prediction is another class than the label."
HELPS, HURTS = "helps most", "hurts most"

_TEXT_LINES = 3
_TEXT_WIDTH = 60
_LINE_IN = 0.17


def draw_sheets(result: InfluenceResult) -> list[Plot]:
    """One sheet for all queries together, and one for each of the first few."""
    queries = reported_queries(result, MAX_SHEETS)
    first = 0 if queries[:1] == [ALL_INDEX] else 1
    names = ["all_queries_sheet" if query == ALL_INDEX else f"query_{place}_sheet" for place, query in enumerate(queries, start=first)]
    return [query_sheet(result, query, name) for query, name in zip(queries, names, strict=True)]


def query_sheet(result: InfluenceResult, query_index: int, name: str) -> Plot:
    """A query with its strongest proponents and opponents."""
    sides = examples(result, query_index, PER_SIDE)
    query = None if query_index == ALL_INDEX else query_example(result, query_index)
    title = query_title(result, query_index)
    shown = [each for side in sides for each in side] + ([query] if query else [])
    pictures = any(each.input is not None and each.input.image is not None for each in shown)
    figure = _pictures(query, sides) if pictures else _table(query, sides)
    figure.suptitle(shorten(title, 110), x=0.01, ha="left", fontsize=11, fontweight="bold", color=INK, parse_math=False)
    words = textwrap.fill(f"Score: {unit_words(result)}; {SIGN}", 140)
    figure.supxlabel(words, x=0.01, ha="left", fontsize=7.5, color=QUIET, parse_math=False)
    caption = f"The training examples that help and hurt most, strongest first. {DIFFERS_NOTE} " + (PICTURE_NOTE if pictures else "")
    return Plot(name, title, caption, figure, vector=False)


# -- pictures --------------------------------------------------------------------------------------------------------------------------


def _pictures(query: Example | None, sides: tuple[list[Example], list[Example]]) -> Figure:
    first = 2 if query else 0
    figure = Figure(figsize=(WIDTH_IN, 3.7 if query else 4.1), layout="constrained")
    grid = figure.add_gridspec(2, first + PER_SIDE, hspace=0.04, wspace=0.03)
    if query:
        axes = figure.add_subplot(grid[:, :first])
        _picture(axes, query)
        axes.set_title("the query", fontsize=9, color=QUIET)
    for line, (side, words, colour) in enumerate(zip(sides, (HELPS, HURTS), (REST, REVIEW), strict=True)):
        for column in range(PER_SIDE):
            axes = figure.add_subplot(grid[line, first + column])
            if column < len(side):
                _picture(axes, side[column])
                _title(axes, side[column], colour)
            else:
                axes.axis("off")
            if column == 0:
                none = "" if side else f"nothing {words.split()[0]}"
                axes.text(
                    -0.06, 0.5, none or words, transform=axes.transAxes, rotation=90, ha="right", va="center", fontsize=9, color=colour
                )
    return figure


def _picture(axes: Axes, example: Example) -> None:
    axes.set(xticks=[], yticks=[])
    for spine in axes.spines.values():
        spine.set_color(GRID)
    if example.input is not None and example.input.image is not None:
        axes.imshow(to_rgb(example.input.image), interpolation="nearest")
    else:
        axes.set_aspect("equal")
        axes.text(0.5, 0.5, "no picture", transform=axes.transAxes, ha="center", va="center", fontsize=7, color=QUIET)


def _title(axes: Axes, example: Example, colour: str) -> None:
    axes.set_title(example.score, fontsize=8.5, fontweight="bold", color=colour, parse_math=False, pad=3)
    axes.set_xlabel(
        "\n".join(filter(None, (shorten(example.id, 16), _classes(example, 10), example.spread))),
        fontsize=7,
        color=INK,
        fontweight="bold" if example.differs else "normal",
        parse_math=False,
    )


def _classes(example: Example, limit: int) -> str:
    truth, guess = shorten(example.label, limit), shorten(example.prediction, limit)
    if example.label == MISSING:
        return ""
    return f"label {truth}" if example.prediction == MISSING else f"label {truth}, model {guess}"


# -- rows ------------------------------------------------------------------------------------------------------------------------------


def _table(query: Example | None, sides: tuple[list[Example], list[Example]]) -> Figure:
    """Text and table rows: a line an example, its text wrapped beside it."""
    lines: list[tuple[tuple[str, ...], str, bool, list[str]]] = []  # cells, their colour, whether they are bold, the text beside them
    if query and query.input is not None and query.input.text is not None:
        lines.append((("the query",), INK, True, _wrapped(query)))
    for side, words, colour in zip(sides, (HELPS, HURTS), (REST, REVIEW), strict=True):
        lines.append(((words if side else f"nothing {words.split()[0]}",), colour, True, []))
        for each in side:
            cells: tuple[str, ...] = (
                f"{each.score} {each.spread}",
                shorten(each.id, 18),
                shorten(each.label, 10),
                shorten(each.prediction, 10),
            )
            lines.append((cells, INK, each.differs, _wrapped(each)))
    texts = any(wrapped for *_, wrapped in lines)
    heights = [max(1, len(wrapped)) + 0.35 for *_, wrapped in lines]
    total = sum(heights) + 1.4
    figure = Figure(figsize=(WIDTH_IN, 0.75 + _LINE_IN * total), layout="constrained")
    axes = figure.subplots()
    axes.set(xlim=(0, 1), ylim=(total, 0))
    axes.axis("off")
    places = (0.0, 0.19, 0.35, 0.43, 0.52) if texts else (0.0, 0.24, 0.54, 0.76, 1.0)
    for place, words in zip(places, ("score", "id", "label", "model", "input" if texts else ""), strict=True):
        axes.text(place, 0.6, words, fontsize=8, color=QUIET, va="center")
    top = 1.3
    for (cells, colour, bold, wrapped), height in zip(lines, heights, strict=True):
        axes.axhline(top - 0.1, color=GRID, linewidth=0.7)
        weight = "bold" if bold else "normal"
        for place, cell in zip(places, cells, strict=False):
            axes.text(place, top + 0.55, cell, fontsize=8, color=colour, fontweight=weight, va="center", parse_math=False)
        for number, words in enumerate(wrapped):
            axes.text(places[-1], top + 0.55 + number, words, fontsize=6.8, family="monospace", color=INK, va="center", parse_math=False)
        top += height
    return figure


def _wrapped(example: Example) -> list[str]:
    if example.input is None or example.input.text is None:
        return []
    start = brief(example.input.text, _TEXT_LINES * _TEXT_WIDTH, keep="\n\t").expandtabs(4)
    lines = [part for line in start.split("\n") for part in textwrap.wrap(line, _TEXT_WIDTH, drop_whitespace=False) or [""]]
    lines = [line for line in lines if line.strip()]
    return lines if len(lines) <= _TEXT_LINES else [*lines[: _TEXT_LINES - 1], "…"]
