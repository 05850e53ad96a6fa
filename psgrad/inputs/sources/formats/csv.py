"""Datasets in csv: a header, comma-separated, in UTF-8.

A file is read twice, block by block: to find the type of every column, then to convert it into a
memory-mapped table in the temporary folder, which the system pages in and out.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from psgrad.errors import DataError
from psgrad.inputs.sources.arrow import damage_told
from psgrad.inputs.sources.files import Wanted, not_numbers, require_columns, require_single_names
from psgrad.inputs.sources.source import Column, DataHeader, TableSource
from psgrad.inputs.sources.tables import MappedRows, Rows

_CSV_ROWS = 1000  # that the header looks at
_CSV_BLOCK_BYTES = 8 << 20
_NUMBER = r"(?i)^[-+]?((\d+\.?\d*|\.\d+)(e[-+]?\d+)?|inf|infinity|nan)$"


class CSV(TableSource):
    """A table of text with the names of the columns in its first line."""

    name: ClassVar[str] = "csv"

    def header(self, path: Path) -> DataHeader:
        names = _names_in(path)
        if not names:
            raise DataError(f"{path} has no header", expected="a first line with the names of the columns")
        texts: dict[str, tuple[int, str]] = {}
        rows = None
        try:
            with path.open(encoding="utf-8-sig", newline="") as file:
                lines = itertools.islice(csv.reader(file), 1, None)
                row = -1
                for row, cells in enumerate(line for line in itertools.islice(lines, _CSV_ROWS) if line):
                    if len(cells) != len(names):
                        raise _cut_row(path, row, len(cells), len(names))
                    for name, cell in zip(names, cells, strict=True):
                        if name not in texts and not _is_number(cell):
                            texts[name] = row, cell
                if row + 1 < _CSV_ROWS:
                    rows = row + 1
        except (UnicodeDecodeError, csv.Error) as error:
            raise DataError(
                f"{path} can't be read as csv: {error}",
                cause="an interrupted copy or download, or another format",
            ) from error
        columns = {name: Column(None, "text" if name in texts else "numbers") for name in names}
        return DataHeader(path, names, columns, rows, texts)

    def rows(self, path: Path, wanted: Wanted) -> Rows:
        """The wanted columns, converted into a memory-mapped table in the temporary folder.

        The file is read twice, block by block: to find the type of every column, then to convert it.
        """
        with damage_told(path, self.name):
            header = _names_in(path)
            require_columns(wanted.columns, header, str(path))
            require_single_names(header, wanted.columns, path)
            schema = _schema(path, header, wanted)
            blocks = _text_blocks(path, header, wanted.columns)
            return MappedRows(schema, (_converted(block, schema, wanted) for block in blocks), [path])


def _cut_row(path: Path, row: int, cells: int, names: int) -> DataError:
    """The error for a row of a csv file with another number of cells than the header has."""
    return DataError(
        f"row {row} of {path} has {cells} cells, the header {names}",
        cause="a comma inside a text that is not quoted, or a line that was cut",
    )


def _is_number(cell: str) -> bool:
    try:
        float(cell.strip() or "nan")
    except ValueError:
        return False
    return True


def _names_in(path: Path) -> list[str]:
    """The names in the first line. Raises DataError."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return next(csv.reader(file), [])
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(
            f"the header of {path} can't be read: {error}", expected="comma-separated names in UTF-8"
        ) from error


def _converted(block: pa.RecordBatch, schema: pa.Schema, wanted: Wanted) -> pa.Table:
    texts = {*wanted.texts}
    cells = {name: block.column(name) for name in schema.names}
    arrays = [
        cells[field.name] if field.name in texts else _trimmed(cells[field.name]).cast(field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


def _text_blocks(path: Path, header: list[str], columns: list[str]) -> Iterator[pa.RecordBatch]:
    """The named columns as text; a row with too few or too many cells is an error that names it."""
    ragged: list[Any] = []

    def remember(row: Any) -> str:
        ragged.append(row)
        return "error"

    try:
        yield from pyarrow.csv.open_csv(
            path,
            # One thread, as only then Arrow knows the number of a row.
            read_options=pyarrow.csv.ReadOptions(use_threads=False, block_size=_CSV_BLOCK_BYTES),
            parse_options=pyarrow.csv.ParseOptions(invalid_row_handler=remember, newlines_in_values=True),
            convert_options=pyarrow.csv.ConvertOptions(
                include_columns=columns, column_types=dict.fromkeys(header, pa.string())
            ),
        )
    except pa.ArrowInvalid as error:
        if not ragged:
            raise
        row = ragged[0]  # Arrow counts the header too, and from 1
        raise _cut_row(path, row.number - 2, row.actual_columns, row.expected_columns) from error


def _schema(path: Path, header: list[str], wanted: Wanted) -> pa.Schema:
    """The type of each wanted column: the first of its kind's types to which all cells can be converted."""
    types = {
        **dict.fromkeys(wanted.numbers, (pa.int64(), pa.float64(), pa.bool_())),
        **dict.fromkeys(wanted.labels, (pa.int64(), pa.float64(), pa.bool_(), pa.string())),
        **dict.fromkeys(wanted.texts, (pa.string(),)),
        **dict.fromkeys(wanted.ids, (pa.int64(), pa.string())),
    }
    left = {name: list(kinds) for name, kinds in types.items()}
    words: dict[tuple[str, bool], str] = {}
    first_row = 0
    for block in _text_blocks(path, header, wanted.columns):
        for name, kinds in left.items():
            cells = _trimmed(block.column(name))
            holds = _keeps_spelling if name in wanted.ids else _casts
            kept = [kind for kind in kinds if kind == pa.string() or holds(cells, kind)]
            if not kept:
                row = _first_text(cells)
                raise not_numbers(name, "text", f"row {first_row + row} holds {cells[row].as_py()!r}")
            left[name] = kept
            if name in wanted.labels:
                _note_words(name, cells, first_row, words)
        first_row += block.num_rows
    return pa.schema([(name, kinds[0]) for name, kinds in left.items()])


def _note_words(name: str, cells: pa.Array, first_row: int, words: dict[tuple[str, bool], str]) -> None:
    """Notes the first cell that is a number and the first that is none. Raises DataError where a column has
    both.
    """
    numeric = pc.match_substring_regex(cells, _NUMBER)
    for kind in (True, False):
        row = pc.index(numeric, pa.scalar(kind)).as_py()
        if row >= 0:
            words.setdefault((name, kind), f"row {first_row + row} holds {cells[row].as_py()!r}")
    if (name, True) in words and (name, False) in words:
        raise DataError(
            f"the column {name!r} has mixed types: {words[name, True]}, {words[name, False]}",
            expected="numbers in all rows, or names of classes in all rows",
        )


def _first_text(cells: pa.Array) -> int:
    """The first cell that is no number."""
    return next(row for row in range(len(cells)) if not _casts(cells.slice(row, 1), pa.float64()))


def _trimmed(cells: pa.Array) -> pa.Array:
    """Cells without the blanks around them; nothing but blanks is null."""
    trimmed = pc.utf8_trim_whitespace(cells)
    return pc.if_else(pc.equal(trimmed, ""), pa.scalar(None, pa.string()), trimmed)


def _casts(cells: pa.Array, kind: pa.DataType) -> bool:
    try:
        cells.cast(kind)
    except pa.ArrowInvalid:
        return False
    return True


def _keeps_spelling(cells: pa.Array, kind: pa.DataType) -> bool:
    return _casts(cells, kind) and bool(cells.cast(kind).cast(pa.string()).equals(cells))
