"""The section of each measure: what it is, its numbers, its figures and its tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from psgrad.reports.drawing import Plot
from psgrad.reports.measure_words import flat_words
from psgrad.reports.page import FACT_LIMIT, plot_uri
from psgrad.reports.tables import DataTable, Heading, table_of, words_of
from psgrad.reports.words import brief
from psgrad.results import AnalyzeResult, MeasureResult

MAX_MEASURES = 40
MAX_TABLES = 4
MAX_ROWS = 100
MAX_COLUMNS = 16
MAX_NUMBERS = 40
ABOUT_LIMIT = 600  # letters: a source has several papers, a warning two paths


@dataclass(frozen=True)
class MeasureSection:
    """A measure in the words of the page. figures: (figure, its picture as data URI)."""

    anchor: str
    title: str
    about: Sequence[tuple[str, str]]
    numbers: Sequence[tuple[str, str]]
    meanings: Sequence[Heading]
    figures: Sequence[tuple[Plot, str]]
    left_out: Sequence[str]
    tables: Sequence[DataTable]


def measure_sections(result: AnalyzeResult, plots: Mapping[str, Sequence[Plot]], room: int) -> list[MeasureSection]:
    """A section for each of the first MAX_MEASURES measures; figures are left out once all together take more than `room` characters."""
    sections = []
    for place, measure in enumerate(list(result.measures.values())[:MAX_MEASURES]):
        figures, left_out = [], []
        for plot in plots.get(measure.name, ()):
            picture = plot_uri(plot)
            if len(picture) <= room:
                figures.append((plot, picture))
                room -= len(picture)
            else:
                left_out.append(f"plots/{plot.name}.png")
        sections.append(_section(place, measure, figures, left_out, result.class_names))
    return sections


def _section(
    place: int, measure: MeasureResult, figures: Sequence[tuple[Plot, str]], left_out: Sequence[str], class_names: Sequence[str] | None
) -> MeasureSection:
    about = [("Formula", measure.formula), ("Unit", measure.unit), ("Source", measure.source)]
    tables = [
        table_of(f"measure-{place}-{number}", f"{measure.title}: {words_of(name)}", frame, (MAX_ROWS, MAX_COLUMNS), class_names)
        for number, (name, frame) in enumerate(list(measure.tables.items())[:MAX_TABLES])
        if len(frame)
    ]
    return MeasureSection(
        f"measure-{place}",
        brief(measure.title or measure.name, 100),
        [(name, brief(str(value), ABOUT_LIMIT)) for name, value in about if value],
        flat_words(measure.numbers, ABOUT_LIMIT)[:MAX_NUMBERS],
        [Heading(column, words_of(column), True, brief(meaning, FACT_LIMIT)) for column, meaning in measure.meanings.items()],
        figures,
        left_out,
        tables,
    )
