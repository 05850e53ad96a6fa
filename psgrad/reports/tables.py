"""Tables of the page: headings that say what a column is, cells in words, and the sample that a row is about."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from psgrad.reports.words import MISSING, brief, label, number

CELL_LIMIT = 120
CLASS_COLUMNS = ("class", "other_class")  # of measures' tables: classes by their numbers


@dataclass(frozen=True)
class Heading:
    """A column's heading. key: by which the filter knows it; meaning: what it says, with its unit; sorted: whether the rows are in its
    order."""

    key: str
    words: str
    numeric: bool = False
    meaning: str = ""
    sorted: bool = False


@dataclass(frozen=True)
class TableRow:
    """Cells in words, one a heading. sample: the row of the dataset that it is about. only: (key, words), what of the table of samples
    belongs to it. differs: places of cells that are set off."""

    cells: Sequence[str]
    sample: int | None = None
    only: tuple[str, str] | None = None
    differs: frozenset[int] = frozenset()


@dataclass(frozen=True)
class DataTable:
    """A table. name: unlike those of all others on the page; caption: what it holds, for who can't see it; note: what is left out."""

    name: str
    caption: str
    headings: Sequence[Heading]
    rows: Sequence[TableRow]
    note: str = ""


def table_of(name: str, caption: str, frame: pd.DataFrame, limits: tuple[int, int], class_names: Sequence[str] | None = None) -> DataTable:
    """Any frame as a table: its first (rows, columns), and how many there are. Classes have their names, where these are known."""
    rows, columns = limits
    shown = frame.iloc[:rows, :columns]
    classes = [class_names is not None and each in CLASS_COLUMNS for each in shown.columns]
    numeric = [pd.api.types.is_numeric_dtype(shown.dtypes.iloc[place]) and not classes[place] for place in range(shown.shape[1])]
    headings = [Heading(key_of(each), words_of(each), is_number) for each, is_number in zip(shown.columns, numeric, strict=True)]
    cells = [
        [label(value, class_names) if classes[place] else cell(value) for value in shown.iloc[:, place].tolist()]
        for place in range(shown.shape[1])
    ]
    left_out = [
        f"{there:,} {what}" for there, most, what in ((len(frame), rows, "rows"), (frame.shape[1], columns, "columns")) if there > most
    ]
    note = f"The first {rows if len(frame) > rows else len(frame):,} rows of {' and '.join(left_out)} are shown." if left_out else ""
    return DataTable(name, caption, headings, [TableRow(list(each)) for each in zip(*cells, strict=True)], note)


def cell(value: Any) -> str:
    """A value in words."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float) or value is None or value is pd.NA or value is pd.NaT:
        return number(value)
    if isinstance(value, list | tuple | np.ndarray):
        return listed(value, cell)
    return brief(str(value), CELL_LIMIT) or MISSING


def listed(values: Any, words: Callable[[Any], str], most: int = 12) -> str:
    """The first of several values, and how many more there are."""
    items = list(values)
    shown = ", ".join(words(each) for each in items[:most])
    return shown if len(items) <= most else f"{shown} and {len(items) - most:,} more"


def key_of(name: Any) -> str:
    """A column's name as the filter takes it: without spaces."""
    return "_".join(brief(str(name), 60).split())


def words_of(name: Any) -> str:
    """A column's or key's name as words."""
    return brief(str(name).replace("_", " "), 60)
