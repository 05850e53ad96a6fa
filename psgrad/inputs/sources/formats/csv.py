"""Datasets in csv: a header, comma-separated, in UTF-8.

A file is read twice, block by block: to find the type of every column, then to convert it into a
memory-mapped table in the temporary folder, which the system pages in and out.
"""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from psgrad.config import DataConfig
from psgrad.errors import DataError
from psgrad.inputs.sources.arrow import damage_told
from psgrad.inputs.sources.files import named_columns, not_numbers, require_columns, require_single_names
from psgrad.inputs.sources.source import Column, DataHeader, Source

if TYPE_CHECKING:
    from psgrad.inputs.rows import Array, Samples

_CSV_ROWS = 1000  # that the header looks at
_CSV_BLOCK_BYTES = 8 << 20


class CSV(Source):
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

    def load(self, path: Path, config: DataConfig, unit: str | None = None) -> Samples:
        """A csv file with a header, comma-separated, in UTF-8.

        It is read twice, block by block: to find the type of every column, then to convert it into a
        memory-mapped table in the temporary folder, which the system pages in and out.
        """
        from psgrad.inputs.sources.tables import TableSamples

        with damage_told(path, "csv"):
            header = _names_in(path)
            columns, bare = named_columns(config, unit), config.model_copy(update={"id": None})
            require_columns(columns, header, str(path))
            require_single_names(header, columns, path)
            # What the model or the loss reads is a number, also where samples are grouped by it.
            kinds = _column_types(
                path,
                header,
                columns,
                {name for name in (config.id, unit) if name is not None} - {*named_columns(bare)},
            )
            return TableSamples(_CsvRows(path, header, kinds), config, path, unit)


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


class _CsvRows:
    def __init__(self, path: Path, header: list[str], kinds: dict[str, pa.DataType]) -> None:
        from psgrad.inputs.sources.tables import MappedTable

        self.schema = pa.schema(list(kinds.items()))
        self._mapped = MappedTable(
            self.schema, (self._converted(block, kinds) for block in _text_blocks(path, header, list(kinds)))
        )
        self.count = self._mapped.table.num_rows

    def _converted(self, block: pa.RecordBatch, kinds: dict[str, pa.DataType]) -> pa.Table:
        arrays = [_trimmed(block.column(name)).cast(kind) for name, kind in kinds.items()]
        return pa.Table.from_arrays(arrays, schema=self.schema)

    def read(self, start: int, stop: int) -> pa.Table:
        return self._mapped.read(start, stop)

    def take(self, rows: Array) -> pa.Table:
        return self._mapped.take(rows)

    def column(self, name: str) -> pa.ChunkedArray:
        return self._mapped.table.column(name)


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


def _column_types(
    path: Path, header: list[str], columns: list[str], id_columns: set[str]
) -> dict[str, pa.DataType]:
    """int64 or float64 for numbers, text for ids where their numbers would not keep their spelling (007)."""
    kinds = dict.fromkeys(columns, pa.int64())
    first_row = 0
    for block in _text_blocks(path, header, columns):
        for name in columns:
            cells = _trimmed(block.column(name))
            if name in id_columns:
                kinds[name] = (
                    kinds[name] if kinds[name] == pa.string() or _keeps_spelling(cells) else pa.string()
                )
            elif kinds[name] == pa.int64() and not _casts(cells, pa.int64()):
                kinds[name] = pa.float64()
            if kinds[name] == pa.float64() and not _casts(cells, pa.float64()):
                row = next(row for row in range(len(cells)) if not _casts(cells.slice(row, 1), pa.float64()))
                raise not_numbers(name, "text", f"row {first_row + row} holds {cells[row].as_py()!r}")
        first_row += block.num_rows
    return kinds


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


def _keeps_spelling(cells: pa.Array) -> bool:
    return _casts(cells, pa.int64()) and bool(cells.cast(pa.int64()).cast(pa.string()).equals(cells))
