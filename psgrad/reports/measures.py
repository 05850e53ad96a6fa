"""The section of each measure: its figures and its tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import pandas as pd

from psgrad.reports.figures import Plot
from psgrad.reports.page import data_uri
from psgrad.reports.tables import Table, TableColumn, Writer, table
from psgrad.reports.words import cell, key_of, label, words_of
from psgrad.run.results import AnalyzeResult, MeasureResult

MAX_MEASURES = 40
MAX_TABLES = 4
MAX_ROWS = 100
MAX_COLUMNS = 16
CLASS_COLUMNS = ("class", "other_class")  # of measures' tables: classes by their numbers


@dataclass(frozen=True)
class MeasureSection:
    """A measure on the page. figures: each with its data URI. left_out: those that would make the page too
    large.
    """

    measure: MeasureResult
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
        tables = [
            frame_table(
                f"measure-{place}-{number}", f"{measure.title}: {words_of(name)}", frame, result.class_names
            )
            for number, (name, frame) in enumerate(list(measure.tables.items())[:MAX_TABLES])
            if len(frame)
        ]
        yield MeasureSection(measure, figures, left_out, tables)


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
