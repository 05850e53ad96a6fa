"""The section of each measure: what it is, its numbers, its figures and its tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from psgrad.reports.figures import Plot
from psgrad.reports.page import data_uri
from psgrad.reports.tables import Pairs, Table, TableColumn, Writer, table
from psgrad.reports.words import brief, cell, flat_words, key_of, label, words_of
from psgrad.run.results import AnalyzeResult

MAX_MEASURES = 40
MAX_TABLES = 4
MAX_ROWS = 100
MAX_COLUMNS = 16
MAX_NUMBERS = 40
ABOUT_LIMIT = 600  # letters: a source has several papers, a warning two paths
CLASS_COLUMNS = ("class", "other_class")  # of measures' tables: classes by their numbers


@dataclass(frozen=True)
class MeasureSection:
    """What the page says of a measure. about: its formula, unit and source. numbers: of the whole dataset.
    columns: the meanings of those that it brought. figures: each with its data URI. left_out: figures
    that would make the page too large.
    """

    anchor: str
    title: str
    about: Pairs
    numbers: Pairs
    columns: Pairs
    figures: Sequence[tuple[Plot, str]]
    left_out: Sequence[Plot]
    tables: Sequence[Table]


def measure_sections(
    result: AnalyzeResult, plots: Mapping[str, Sequence[Plot]], room: int
) -> Iterator[MeasureSection]:
    """A section for each of the first MAX_MEASURES measures; figures are left out once all together take more
    than `room` characters.
    """
    for place, measure in enumerate(list(result.measures.values())[:MAX_MEASURES]):
        figures, left_out = [], []
        for plot in plots.get(measure.name, ()):
            source = data_uri("image/svg+xml", plot.svg())
            if len(source) <= room:
                figures.append((plot, source))
                room -= len(source)
            else:
                left_out.append(plot)
        about = [("Formula", measure.formula), ("Unit", measure.unit), ("Source", measure.source)]
        meanings = measure.meanings.items()
        tables = [
            frame_table(
                f"measure-{place}-{number}", f"{measure.title}: {words_of(name)}", frame, result.class_names
            )
            for number, (name, frame) in enumerate(list(measure.tables.items())[:MAX_TABLES])
            if len(frame)
        ]
        yield MeasureSection(
            anchor=f"measure-{place}",
            title=brief(measure.title or measure.name, 100),
            about=[(name, brief(str(value), ABOUT_LIMIT)) for name, value in about if value],
            numbers=flat_words(measure.numbers, ABOUT_LIMIT)[:MAX_NUMBERS],
            columns=[(words_of(column), brief(meaning, ABOUT_LIMIT)) for column, meaning in meanings],
            figures=figures,
            left_out=left_out,
            tables=tables,
        )


def frame_table(name: str, caption: str, frame: pd.DataFrame, class_names: Sequence[str] | None) -> Table:
    """Any frame as a table: its first rows and columns, and how many there are. Classes have their names,
    where these are known.
    """
    shown = frame.iloc[:MAX_ROWS, :MAX_COLUMNS]
    columns = []
    for place, heading in enumerate(shown.columns):
        named = class_names is not None and heading in CLASS_COLUMNS
        write = _at(place, (lambda value: label(value, class_names)) if named else cell)
        numeric = pd.api.types.is_numeric_dtype(shown.dtypes.iloc[place]) and not named
        columns.append(TableColumn(words_of(heading), write, numeric, key_of(heading)))
    rows = zip(*(shown.iloc[:, place].tolist() for place in range(shown.shape[1])), strict=True)
    sizes = ((len(frame), MAX_ROWS, "rows"), (frame.shape[1], MAX_COLUMNS, "columns"))
    left_out = " and ".join(f"{there:,} {what}" for there, most, what in sizes if there > most)
    note = f"The first {min(len(frame), MAX_ROWS):,} rows of {left_out} are shown." if left_out else ""
    return table(name, caption, columns, rows, note=note)


def _at(place: int, write: Writer) -> Writer:
    return lambda row: write(row[place])
