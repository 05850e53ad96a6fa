"""Tables of words, the same on a page and on a terminal: columns that say how a cell is written, and rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

Pairs = Sequence[tuple[str, str]]
Writer = Callable[[Any], str]


@dataclass(frozen=True)
class TableColumn:
    """A column of a table: its heading, and how a row's cell is written.

    key: by which the filter knows it; meaning: what it says, with its unit; sorted: whether the rows are in
    its order.
    """

    words: str
    write: Writer = str
    numeric: bool = False
    key: str = ""
    meaning: str = ""
    sorted: bool = False


@dataclass(frozen=True)
class Mark:
    """The link of a row. sample: the row of the dataset that it is about. only: (key, words), what of the
    table of samples belongs to it. differs: keys of cells that are set off.
    """

    sample: int | None = None
    only: tuple[str, str] | None = None
    differs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Row:
    """Cells in words, one a column."""

    cells: Sequence[str]
    mark: Mark = Mark()


@dataclass(frozen=True)
class Table:
    """A table. name: unlike those of all others on the page; caption: what it holds, for readers who can't
    see it; note: what is left out. tall: it scrolls within a box. explained: the columns' meanings stand
    below it.
    """

    name: str
    caption: str
    columns: Sequence[TableColumn]
    rows: Sequence[Row]
    note: str = ""
    tall: bool = True
    explained: bool = False


def table(
    name: str,
    caption: str,
    columns: Sequence[TableColumn],
    things: Iterable[Any],
    mark: Callable[[Any], Mark] | None = None,
    **options: Any,
) -> Table:
    """A row a thing, with the cells that the columns write. options: further fields of `Table`."""
    rows = [
        Row([column.write(thing) for column in columns], mark(thing) if mark else Mark()) for thing in things
    ]
    return Table(name, caption, columns, rows, **options)
