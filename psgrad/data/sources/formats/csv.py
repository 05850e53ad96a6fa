"""Datasets in csv and tsv: a header, separated by commas or tabs, in UTF-8, read by pyarrow.csv; and the
lines in which rows begin, for `psgrad check`.
"""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from psgrad.data.columns import ColumnRoles, not_numbers, require_columns
from psgrad.data.sources.arrow_types import errors_of_damage
from psgrad.data.sources.source import Source
from psgrad.data.sources.table_rows import mapped
from psgrad.data.sources.text_files import lines_of, not_utf8, open_text
from psgrad.errors import DataError

_BLOCK_BYTES = 8 << 20
_WIDER = {pa.int64(): pa.float64()}
_NOT_CONVERTED = re.compile(
    r"In CSV column #(\d+): (?:Row #(\d+): )?CSV conversion error .*invalid value (.*)"
)

_LIST = re.compile(r"""['"]?(\s*\[.*|[-+.\deE]+([\s,;]+[-+.\deE]+)+\s*)['"]?""", re.DOTALL)


class CSV(Source):
    """A table of text, comma-separated, with the names of the columns in its first line."""

    name: ClassVar[str] = "csv"
    compressed: ClassVar[bool] = True
    ids_are_spelled: ClassVar[bool] = True
    delimiter: ClassVar[str] = ","

    def table(self, path: Path, roles: ColumnRoles) -> pa.Table:
        with errors_of_damage(path, self.name), _errors_of_text(path):
            guessed = self._reader(path, {}, []).schema
            require_columns(roles.columns, guessed.names, path)
            if not_text := [name for name in roles.columns if guessed.field(name).type == pa.binary()]:
                raise not_utf8(path, ValueError(f"bytes of another encoding in the column {not_text[0]!r}"))
            kinds = {
                **{name: _number_type(guessed.field(name).type) for name in roles.numbers},
                **{name: _label_type(guessed.field(name).type) for name in roles.labels},
                **dict.fromkeys((*roles.texts, *roles.ids), pa.string()),
            }
            while True:
                try:
                    found = mapped(pa.schema(kinds), self._batches(path, kinds, roles))
                    break
                except pa.ArrowInvalid as error:
                    name, kind = _wider(error, guessed.names, kinds, roles, path)
                    kinds[name] = kind  # and the file is read again
        for name in roles.labels:
            _require_one_kind(name, found.column(name), path)
        return found

    def _reader(
        self, path: Path, kinds: Mapping[str, pa.DataType], columns: Sequence[str]
    ) -> pyarrow.csv.CSVStreamingReader:
        return pyarrow.csv.open_csv(
            path,
            # One thread, as only then Arrow knows the number of a row.
            read_options=pyarrow.csv.ReadOptions(use_threads=False, block_size=_BLOCK_BYTES),
            parse_options=pyarrow.csv.ParseOptions(delimiter=self.delimiter, newlines_in_values=True),
            convert_options=pyarrow.csv.ConvertOptions(
                include_columns=columns, column_types=kinds, null_values=[""], strings_can_be_null=True
            ),
        )

    def _batches(
        self, path: Path, kinds: Mapping[str, pa.DataType], roles: ColumnRoles
    ) -> Iterator[pa.RecordBatch]:
        for batch in self._reader(path, kinds, list(kinds)):
            columns = dict(zip(kinds, batch.columns, strict=True))
            for name in roles.texts:
                columns[name] = columns[name].fill_null("")
            for name in roles.labels:
                if kinds[name] == pa.string():
                    columns[name] = _trimmed(columns[name])
            yield pa.record_batch(columns)


class TSV(CSV):
    """A table of text, separated by tabs, with the names of the columns in its first line."""

    name: ClassVar[str] = "tsv"
    delimiter: ClassVar[str] = "\t"


def _number_type(guessed: pa.DataType) -> pa.DataType:
    if pa.types.is_null(guessed):
        return pa.int64()
    return guessed if guessed in (pa.int64(), pa.bool_()) else pa.float64()  # of text, the first cell is said


def _label_type(guessed: pa.DataType) -> pa.DataType:
    return guessed if guessed in (pa.int64(), pa.bool_(), pa.float64()) else pa.string()


def _wider(
    error: pa.ArrowInvalid,
    names: Sequence[str],
    kinds: Mapping[str, pa.DataType],
    roles: ColumnRoles,
    path: Path,
) -> tuple[str, pa.DataType]:
    """(the column that is not of its type, the next type for it). Raises DataError for a column of numbers
    that holds text, and another error as it is.
    """
    found = _NOT_CONVERTED.search(str(error))
    if found is None:
        raise error
    name, row, value = names[int(found[1])], found[2], found[3]
    if kinds[name] in _WIDER:
        return name, _WIDER[kinds[name]]
    if name in roles.labels:
        return name, pa.string()
    where = "a row" if row is None else f"row {int(row) - 2}"  # Arrow counts the header too, and from 1
    example = f"{where} holds {value} in {path}"
    if _LIST.fullmatch(value):
        raise not_numbers(name, "text", example, "for lists write jsonl, parquet or arrow") from error
    raise not_numbers(name, "text", example) from error


def _trimmed(cells: pa.Array) -> pa.Array:
    """Cells without the blanks around them; nothing but blanks is null."""
    found = pc.utf8_trim_whitespace(cells)
    return pc.if_else(pc.equal(found, ""), pa.scalar(None, pa.string()), found)


def _require_one_kind(name: str, column: pa.ChunkedArray, path: Path) -> None:
    """Raises DataError for labels of which some are numbers and some are names."""
    if column.type != pa.string():
        return
    texts = [each for each in pc.unique(column).to_pylist() if each is not None]
    numbers = [each for each in texts if _is_number(each)]
    names = [each for each in texts if not _is_number(each)]
    if numbers and names:
        raise DataError(
            f"the column {name!r} of {path} has mixed types: {numbers[0]!r} and {names[0]!r}; expected"
            " numbers in all rows, or names of classes in all rows",
        )


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


@contextmanager
def _errors_of_text(path: Path) -> Iterator[None]:
    """Errors about bytes that are not UTF-8 become DataError."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise not_utf8(path, error) from error
    except pa.ArrowInvalid as error:
        if "UTF8" in str(error):
            raise not_utf8(path, error) from error
        raise


# -- lines ---------------------------------------------------------------------------------------------------


@contextmanager
def long_cells() -> Iterator[None]:
    """While the block runs, Python's reader takes cells of any length."""
    limit = csv.field_size_limit(sys.maxsize)
    try:
        yield
    finally:
        csv.field_size_limit(limit)


def csv_lines(path: Path, rows: Sequence[int]) -> dict[int, int]:
    """row -> the line in which it begins, for rows from 0 below the header and lines from 1: quoted cells may
    hold line ends, blank lines are not rows. Rows beyond the end are left out. Raises OSError and DataError.
    """
    found: dict[int, int] = {}
    wanted, last = set(rows), max(rows, default=-1)
    with open_text(path) as file, long_cells():
        reader = csv.reader(lines_of(path, file), delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
        row, begin = -1, 1
        for cells in reader:
            if row in wanted and cells:
                found[row] = begin
            if row >= last:
                break
            row, begin = row + bool(cells), reader.line_num + 1
    return found
