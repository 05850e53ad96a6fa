"""Tables of words, the same on a page and on a terminal: columns that say how a cell is written, and rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from psgrad.reports.words import number

Pairs = Sequence[tuple[str, str]]
Writer = Callable[[Any], str]


@dataclass(frozen=True)
class TableColumn:
    """A column of a table: its heading, and how a row's cell is written.

    key: by which the filter knows it; meaning: what it says, with its unit.
    """

    words: str
    write: Writer = str
    numeric: bool = False
    key: str = ""
    meaning: str = ""


@dataclass(frozen=True)
class Row:
    """Cells in words, one a column. differs: keys of cells that are set off."""

    cells: Sequence[str]
    differs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Table:
    """A table. name: unlike those of all others on the page; caption: what it holds, for readers who can't
    see it; note: what is left out.
    """

    name: str
    caption: str
    columns: Sequence[TableColumn]
    rows: Sequence[Row]
    note: str = ""


def table(
    name: str,
    caption: str,
    columns: Sequence[TableColumn],
    things: Iterable[Any],
    differs: Callable[[Any], tuple[str, ...]] = lambda _: (),
    note: str = "",
) -> Table:
    """A row a thing, with the cells that the columns write. differs: the keys of the cells that are set
    off.
    """
    rows = [Row([column.write(thing) for column in columns], differs(thing)) for thing in things]
    return Table(name, caption, columns, rows, note)


def column(key: str, words: str, write: Writer = str, **options: Any) -> TableColumn:
    """A column of rows that are mappings: the value of a key. options: further fields of `TableColumn`."""
    return TableColumn(words, lambda row: write(row[key]), key=key, **options)


def number_column(key: str, words: str, meaning: str = "", write: Writer = number) -> TableColumn:
    """A column of numbers, of rows that are mappings."""
    return column(key, words, write, numeric=True, meaning=meaning)
