"""A sheet a query: its input, and its strongest proponents and opponents, as pictures or as rows."""

from __future__ import annotations

import itertools
import textwrap
from dataclasses import replace
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from psgrad.reports.drawing import (
    GRID,
    INK,
    QUIET,
    REST,
    REVIEW,
    WIDTH_IN,
    Plot,
    letters_in,
    line_height,
    place_picture,
    place_words,
    sheet,
    write,
)
from psgrad.reports.influence_words import (
    Example,
    examples,
    query_example,
    query_title,
    reported_queries,
    unit_words,
)
from psgrad.reports.pictures import PICTURE_NOTE, shown_text, to_rgb
from psgrad.reports.words import MISSING, brief, shorten_middle
from psgrad.results import ALL_INDEX, SIGN, InfluenceResult, has_classes
from psgrad.wording import shorten_apart

MAX_SHEETS = 6
PER_SIDE = 6

DIFFERS_NOTE = "Bold: the model's prediction is another class than the label."
HELPS, HURTS = "helps most", "hurts most"

_FEWEST = 4  # pictures in a row: fewer leave room empty, rather than be larger
_TEXT_LINES = 3
_TEXT_WIDTH = 66
# The left ends of a table's columns, as shares of its width: score, id, label, model, input.
_WITH_TEXTS, _WITHOUT = (0.01, 0.17, 0.3, 0.41, 0.52), (0.01, 0.24, 0.54, 0.76, 1.0)
_LINE_IN = 0.17
_CAPTION = 7  # the size of the words below a picture


def draw_sheets(result: InfluenceResult) -> list[Plot]:
    """One sheet for all queries together, and one for each of the first few."""
    queries = reported_queries(result, MAX_SHEETS)
    first = 0 if queries[:1] == [ALL_INDEX] else 1
    names = [
        "all_queries_sheet" if query == ALL_INDEX else f"query_{place}_sheet"
        for place, query in enumerate(queries, start=first)
    ]
    return [query_sheet(result, query, name) for query, name in zip(queries, names, strict=True)]


def differs_note(result: InfluenceResult) -> str:
    """What bold means; empty where there are no classes."""
    return DIFFERS_NOTE if has_classes(result.training) else ""


def query_sheet(result: InfluenceResult, query_index: int, name: str) -> Plot:
    """A query with its strongest proponents and opponents."""
    sides = examples(result, query_index, PER_SIDE)
    query = None if query_index == ALL_INDEX else query_example(result, query_index)
    title = query_title(result, query_index)
    shown = [each for side in sides for each in side] + ([query] if query else [])
    pictures = any(each.input is not None and each.input.image is not None for each in shown)
    words = textwrap.wrap(f"Score: {unit_words(result)}; {SIGN}", 130)
    figure = (_pictures if pictures else _table)(query, sides, words)
    notes = (differs_note(result), PICTURE_NOTE if pictures else "")
    caption = " ".join(
        filter(None, ("The training examples that help and hurt most, strongest first.", *notes))
    )
    return Plot(name, title, caption, figure, vector=False)


def _pictures(query: Example | None, sides: tuple[list[Example], list[Example]], footer: list[str]) -> Figure:
    left, first = 0.25, 2 if query else 0
    columns = first + max(_FEWEST, *map(len, sides))
    cell = (WIDTH_IN - left) / columns
    sides = _with_short_ids(sides, cell - 0.04)
    lines = max((len(_below(each)) for side in sides for each in side), default=1)
    row = line_height(8.5) + cell + lines * line_height(_CAPTION) + 0.08
    figure, axes = sheet(2 * row + 0.1 + len(footer) * line_height(7.5))
    if query:
        below = place_words(axes, ["the query"], 0, 0, 2 * cell, size=9, color=QUIET)
        _picture(axes, query, 0.05, below + 0.08, 2 * cell - 0.15)
        place_words(axes, _below(query), 0, below + 2 * cell, 2 * cell, **_style(query))
    for place, (side, words, colour) in enumerate(zip(sides, (HELPS, HURTS), (REST, REVIEW), strict=True)):
        top, start = place * row, left + first * cell
        said = words if side else f"nothing {words.split()[0]}"
        write(axes, (start - 0.1, top + row / 2), said, 9, rotation=90, ha="center", color=colour)
        for column, each in enumerate(side):
            below = place_words(
                axes, [each.score], start + column * cell, top, cell, size=8.5, weight="bold", color=colour
            )
            _picture(axes, each, start + column * cell + 0.06, below + 0.04, cell - 0.12)
            place_words(
                axes,
                _below(each),
                start + column * cell + 0.02,
                below + cell - 0.06,
                cell - 0.04,
                **_style(each),
            )
    _footer(axes, footer)
    return figure


def _with_short_ids(
    sides: tuple[list[Example], list[Example]], width: float
) -> tuple[list[Example], list[Example]]:
    """The examples with ids that fit into a width, in inches, and stay apart."""
    helps, hurts = sides
    ids = [each.id for each in helps + hurts]
    short = shorten_apart(ids, letters_in(width, _CAPTION, bold=True))
    renamed = [replace(each, id=name) for each, name in zip(helps + hurts, short, strict=True)]
    return renamed[: len(helps)], renamed[len(helps) :]


def _picture(axes: Axes, example: Example, left: float, top: float, side: float) -> None:
    if example.input is not None and example.input.image is not None:
        place_picture(axes, to_rgb(example.input.image), left, top, side, frame=GRID)
    else:
        write(axes, (left + side / 2, top + side / 2), "no picture", 7, ha="center", color=QUIET)


def _below(example: Example) -> list[str]:
    """What stands below a picture, line by line."""
    truth = "" if example.label == MISSING else f"label {example.label}"
    guess = "" if MISSING in (example.label, example.prediction) else f"model {example.prediction}"
    return [line for line in (example.id, truth, guess, example.spread) if line]


def _style(example: Example) -> dict[str, Any]:
    return {"size": _CAPTION, "weight": "bold" if example.differs else "normal"}


def _footer(axes: Axes, lines: list[str]) -> None:
    """Unit and sign, at the foot of a sheet."""
    low = axes.get_ylim()[0]
    write(axes, (0.08, low - 0.05), "\n".join(lines), 7.5, color=QUIET, va="bottom")


def _table(query: Example | None, sides: tuple[list[Example], list[Example]], footer: list[str]) -> Figure:
    """Text and table rows: a line an example, its text wrapped beside it. Labels and predictions have columns
    where there are any.
    """
    each_shown = [*sides[0], *sides[1]]
    has_label = any(each.label != MISSING for each in each_shown)
    has_prediction = any(each.prediction != MISSING for each in each_shown)
    texts = any(_wrapped(each) for side in sides for each in side) or bool(query and _wrapped(query))
    # Cells, their colour, whether they are bold, the text beside them.
    lines: list[tuple[tuple[str, ...], str, bool, list[str]]] = []
    if query and _wrapped(query):
        lines.append((("the query",), INK, True, _wrapped(query)))
    for side, words, colour in zip(sides, (HELPS, HURTS), (REST, REVIEW), strict=True):
        lines.append(((words if side else f"nothing {words.split()[0]}",), colour, True, []))
        for each in side:
            label = (each.label,) if has_label else ()
            prediction = (each.prediction,) if has_prediction else ()
            cells = (f"{each.score} {each.spread}", each.id, *label, *prediction)
            lines.append((cells, INK, each.differs, _wrapped(each)))
    heights = [max(1, len(wrapped)) + 0.35 for *_, wrapped in lines]
    figure, axes = sheet((sum(heights) + 1.6 + len(footer)) * _LINE_IN)
    names = ["score", "id", *["label"] * has_label, *["model"] * has_prediction]
    shares = _WITH_TEXTS if texts else _WITHOUT
    # An input begins where the columns that there are end, as wide as ever.
    places = [share * WIDTH_IN for share in shares[: len(names) + 1]]
    widths = [end - start - 0.05 for start, end in itertools.pairwise(places)]
    for place, words in zip(places, (*names, "input" if texts else ""), strict=True):
        write(axes, (place, 0.6 * _LINE_IN), words, color=QUIET)
    top = 1.3
    for (cells, colour, bold, wrapped), height in zip(lines, heights, strict=True):
        axes.axhline((top - 0.1) * _LINE_IN, color=GRID, linewidth=0.7)
        weight = "bold" if bold else "normal"
        for column, (place, width, cell) in enumerate(zip(places, widths, cells, strict=False)):
            # A score, in the first column, is never cut.
            words = shorten_middle(cell, letters_in(width, 8, bold)) if column else cell
            write(axes, (place, (top + 0.55) * _LINE_IN), words, color=colour, weight=weight)
        for number, words in enumerate(wrapped):
            write(axes, (places[-1], (top + 0.55 + number) * _LINE_IN), words, 6.8, family="monospace")
        top += height
    _footer(axes, footer)
    return figure


def _wrapped(example: Example) -> list[str]:
    text = None if example.input is None else shown_text(example.input)
    if text is None:
        return []
    start = brief(text, _TEXT_LINES * _TEXT_WIDTH, keep="\n\t").expandtabs(4)
    lines = [
        part
        for line in start.split("\n")
        for part in textwrap.wrap(line, _TEXT_WIDTH, drop_whitespace=False) or [""]
    ]
    lines = [line for line in lines if line.strip()]
    return (
        lines
        if len(lines) <= _TEXT_LINES
        else [*lines[: _TEXT_LINES - 1], f"{lines[_TEXT_LINES - 1].rstrip()[: _TEXT_WIDTH - 2]} …"]
    )
