"""Datasets in csv and tsv: a header, separated by commas or tabs, in UTF-8.

A file is read twice, block by block: to find the type of every column, then to convert it into a
memory-mapped table in the temporary folder, which the system pages in and out.

The lines in which rows begin, for `psgrad check`: quoted cells may hold line ends, blank lines are not rows.
"""

from __future__ import annotations

import csv
import itertools
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from psgrad.data.sources.arrow_columns import errors_of_damage
from psgrad.data.sources.file_checks import (
    Wanted,
    lines_of,
    not_numbers,
    not_utf8,
    open_text,
    require_columns,
)
from psgrad.data.sources.source import Column, DataHeader, TableSource
from psgrad.data.sources.source_rows import MappedRows, SourceRows
from psgrad.errors import DataError

_CSV_ROWS = 1000  # that the header looks at
_CSV_BLOCK_BYTES = 8 << 20
_NUMERIC = r"(?i)^\[|^[-+]?((\d+\.?\d*|\.\d+)(e[-+]?\d+)?|inf|infinity|nan)([\s,]|$)"


class CSV(TableSource):
    """A table of text, comma-separated, with the names of the columns in its first line."""

    name: ClassVar[str] = "csv"
    compressed: ClassVar[bool] = True
    delimiter: ClassVar[str] = ","

    def header(self, path: Path) -> DataHeader:
        cells = _Cells(path, self.name, self.delimiter)
        if not cells.names:
            raise DataError(f"{path} has no header", expected="a first line with the names of the columns")
        texts: dict[str, tuple[int, str]] = {}
        row = -1
        for row, found in enumerate(itertools.islice(cells.lines(), _CSV_ROWS)):
            for name, cell in zip(cells.names, found, strict=True):
                if name not in texts and not _is_number(cell):
                    texts[name] = row, cell
        rows = row + 1 if row + 1 < _CSV_ROWS else None
        columns = {name: Column(None, "text" if name in texts else "numbers") for name in cells.names}
        return DataHeader(path, cells.names, columns, rows, texts)

    def rows(self, path: Path, wanted: Wanted) -> SourceRows:
        with errors_of_damage(path, self.name):
            cells = _Cells(path, self.name, self.delimiter)
            require_columns(wanted.columns, cells.names, str(path))
            schema = _schema(cells, wanted)
            blocks = cells.blocks(wanted.columns)
            return _CSVRows(schema, (_converted(block, schema, wanted) for block in blocks), [path])


class TSV(CSV):
    """A table of text, separated by tabs, with the names of the columns in its first line."""

    name: ClassVar[str] = "tsv"
    delimiter: ClassVar[str] = "\t"


class _CSVRows(MappedRows):
    """Rows whose lines can be found. A compressed file has none that an editor would show."""

    def line(self, row: int) -> str:
        (path,) = self.files
        found = None
        with suppress(OSError):
            found = csv_lines(path, [row]).get(row) if path.suffix.lower() in (".csv", ".tsv") else None
        return super().line(row) if found is None else f"{path}, line {found}"


class _Cells:
    """The cells of a file as text.

    Attributes:
        names: those in the first line.
    """

    def __init__(self, path: Path, kind: str, delimiter: str) -> None:
        self.path, self._kind, self._delimiter = path, kind, delimiter
        try:
            with open_text(path) as file:
                self.names = next(csv.reader(lines_of(path, file), delimiter=delimiter), [])
        except UnicodeDecodeError as error:
            raise not_utf8(path, error) from error
        except csv.Error as error:
            separated = "comma-separated" if delimiter == "," else "tab-separated"
            raise DataError(
                f"the header of {path} can't be read: {error}", expected=f"{separated} names in UTF-8"
            ) from error

    def lines(self) -> Iterator[list[str]]:
        """The rows one by one, without blank lines. Raises DataError for one with too few or many cells."""
        try:
            with open_text(self.path) as file:
                reader = csv.reader(lines_of(self.path, file), delimiter=self._delimiter)
                lines = itertools.islice(reader, 1, None)
                for row, cells in enumerate(line for line in lines if line):
                    if len(cells) != len(self.names):
                        raise self._cut_row(row, len(cells), len(self.names))
                    yield cells
        except UnicodeDecodeError as error:
            raise not_utf8(self.path, error) from error
        except csv.Error as error:
            raise DataError(
                f"{self.path} can't be read as {self._kind}: {error}",
                cause="an interrupted copy or download, or another format",
            ) from error

    def blocks(self, columns: list[str]) -> Iterator[pa.RecordBatch]:
        """The named columns, block by block. Raises DataError for a row with too few or too many cells."""
        ragged: list[Any] = []

        def remember(row: Any) -> str:
            ragged.append(row)
            return "error"

        try:
            yield from pyarrow.csv.open_csv(
                self.path,
                # One thread, as only then Arrow knows the number of a row.
                read_options=pyarrow.csv.ReadOptions(use_threads=False, block_size=_CSV_BLOCK_BYTES),
                parse_options=pyarrow.csv.ParseOptions(
                    delimiter=self._delimiter, invalid_row_handler=remember, newlines_in_values=True
                ),
                convert_options=pyarrow.csv.ConvertOptions(
                    include_columns=columns, column_types=dict.fromkeys(self.names, pa.string())
                ),
            )
        except pa.ArrowInvalid as error:
            if "UTF8" in str(error):
                raise not_utf8(self.path, error) from error
            if not ragged:
                raise
            row = ragged[0]  # Arrow counts the header too, and from 1
            raise self._cut_row(row.number - 2, row.actual_columns, row.expected_columns) from error

    def _cut_row(self, row: int, cells: int, names: int) -> DataError:
        what = "comma" if self._delimiter == "," else "tab"
        return DataError(
            f"row {row} of {self.path} has {cells} cells, the header {names}",
            cause=f"a {what} inside a text that is not quoted, or a line that was cut",
        )


def _converted(block: pa.RecordBatch, schema: pa.Schema, wanted: Wanted) -> pa.Table:
    cells = {name: block.column(name) for name in schema.names}
    arrays = [
        cells[field.name]
        if field.name in wanted.texts
        else _with_blanks_null(cells[field.name])
        if field.name in wanted.ids and field.type == pa.string()
        else _cast(_trimmed(cells[field.name]), field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(arrays, schema=schema)


_NUMBERS = (pa.int64(), pa.float64(), pa.bool_(), pa.list_(pa.int64()), pa.list_(pa.float64()))


def _schema(cells: _Cells, wanted: Wanted) -> pa.Schema:
    """The type of each wanted column: the first of its kind's types to which all cells can be converted."""
    types = {
        **dict.fromkeys(wanted.numbers, _NUMBERS),
        **dict.fromkeys(wanted.labels, (*_NUMBERS, pa.string())),
        **dict.fromkeys(wanted.texts, (pa.string(),)),
        **dict.fromkeys(wanted.ids, (pa.int64(), pa.string())),
    }
    left = {name: list(kinds) for name, kinds in types.items()}
    words: dict[tuple[str, bool], str] = {}
    first_row = 0
    for block in cells.blocks(wanted.columns):
        for name, kinds in left.items():
            is_id = name in wanted.ids
            column = (_with_blanks_null if is_id else _trimmed)(block.column(name))
            holds = _keeps_spelling if is_id else _casts
            left[name] = [kind for kind in kinds if kind == pa.string() or holds(column, kind)]
            if not left[name]:
                row = next(row for row in range(len(column)) if not _any_casts(column.slice(row, 1), kinds))
                raise not_numbers(name, "text", f"row {first_row + row} holds {column[row].as_py()!r}")
            if name in wanted.labels:
                _note_words(name, column, first_row, words)
        first_row += block.num_rows
    return pa.schema([(name, kinds[0]) for name, kinds in left.items()])


def _note_words(name: str, cells: pa.Array, first_row: int, words: dict[tuple[str, bool], str]) -> None:
    """Notes the first cell that is a number and the first that is none. Raises DataError for both."""
    numeric = pc.match_substring_regex(cells, _NUMERIC)
    for kind in (True, False):
        row = pc.index(numeric, pa.scalar(kind)).as_py()
        if row >= 0:
            words.setdefault((name, kind), f"row {first_row + row} holds {cells[row].as_py()!r}")
    if (name, True) in words and (name, False) in words:
        raise DataError(
            f"the column {name!r} has mixed types: {words[name, True]}, {words[name, False]}",
            expected="numbers in all rows, or names of classes in all rows",
        )


def _is_number(cell: str) -> bool:
    return not cell.strip() or _any_casts(pa.array([cell.strip()]), _NUMBERS)


def _trimmed(cells: pa.Array) -> pa.Array:
    """Cells without the blanks around them; nothing but blanks is null."""
    return _with_blanks_null(pc.utf8_trim_whitespace(cells))


def _with_blanks_null(cells: pa.Array) -> pa.Array:
    """Cells as they are spelled; nothing but blanks is null."""
    blank = pc.equal(pc.utf8_trim_whitespace(cells), "")
    return pc.if_else(blank, pa.scalar(None, pa.string()), cells)


def _cast(cells: pa.Array, kind: pa.DataType) -> pa.Array:
    """Cells as numbers, or as lists of them: "[1, 2, 3]" or "1 2 3". Raises ArrowInvalid."""
    if not pa.types.is_list(kind):
        return cells.cast(kind)
    inside = pc.utf8_trim(cells, "[] ")
    parts = pc.split_pattern_regex(inside, r"[,\s]+")
    lengths = pc.if_else(pc.equal(inside, ""), 0, pc.list_value_length(parts))  # the text "" has one part
    values = pc.list_flatten(parts)
    values = values.filter(pc.not_equal(values, "")).cast(kind.value_type)
    offsets = np.concatenate([[0], np.cumsum(lengths.fill_null(0).to_numpy())])
    if offsets[-1] != len(values):
        raise pa.ArrowInvalid("a comma without a number")
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values, mask=cells.is_null())


def _casts(cells: pa.Array, kind: pa.DataType) -> bool:
    try:
        _cast(cells, kind)
    except pa.ArrowInvalid:
        return False
    return True


def _any_casts(cells: pa.Array, kinds: Iterable[pa.DataType]) -> bool:
    return any(kind == pa.string() or _casts(cells, kind) for kind in kinds)


def _keeps_spelling(cells: pa.Array, kind: pa.DataType) -> bool:
    return _casts(cells, kind) and bool(cells.cast(kind).cast(pa.string()).equals(cells))


_BLOCK = 8 << 20


def csv_lines(path: Path, rows: Iterable[int]) -> dict[int, int]:
    """row -> the line in which it begins, for rows from 0 below the header and lines from 1. Rows beyond the
    end are left out.

    Raises OSError.
    """
    wanted = sorted(set(rows))
    if not wanted:
        return {}
    return _by_line_ends(path, wanted) if _is_plain(path) else _by_cells(path, wanted)


def _is_plain(path: Path) -> bool:
    """Whether every line end ends a row: no quotes, and no carriage return by itself."""
    with path.open("rb") as file:
        last = b""
        while block := file.read(_BLOCK):
            text = last + block
            if b'"' in block or text.count(b"\r", 0, len(text) - 1) != text.count(b"\r\n"):
                return False
            last = b"\r" if block.endswith(b"\r") else b""
    return last == b""


def _by_line_ends(path: Path, wanted: list[int]) -> dict[int, int]:
    starts = []  # of each block: the numbers of its lines that are not blank
    line, length = 1, 0  # of the line that goes on from the block before
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            ends = np.flatnonzero(np.frombuffer(block.replace(b"\r", b""), np.uint8) == ord("\n"))
            lengths = np.diff(ends, prepend=-1 - length) - 1
            starts.append(line + np.flatnonzero(lengths > 0))
            line += len(ends)
            size = len(block) - block.count(b"\r")
            length = size - 1 - int(ends[-1]) if len(ends) else length + size
    starts.append(np.array([line] if length else [], dtype=int))
    lines = np.concatenate(starts)[1:]  # without the header
    return {row: int(lines[row]) for row in wanted if row < len(lines)}


@contextmanager
def long_cells() -> Iterator[None]:
    """While the block runs, Python's reader takes cells of any length."""
    limit = csv.field_size_limit(sys.maxsize)
    try:
        yield
    finally:
        csv.field_size_limit(limit)


def _by_cells(path: Path, wanted: list[int]) -> dict[int, int]:
    result: dict[int, int] = {}
    with (
        suppress(csv.Error),  # the lines so far are right
        long_cells(),
        path.open(encoding="utf-8-sig", errors="replace", newline="") as file,
    ):
        reader = csv.reader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
        row, begin, remaining = -1, 1, iter(wanted)
        next_row = next(remaining, None)
        for cells in reader:
            if cells:  # a blank line is no row
                if row == next_row:
                    result[row] = begin
                    next_row = next(remaining, None)
                    if next_row is None:
                        break
                row += 1
            begin = reader.line_num + 1
    return result
