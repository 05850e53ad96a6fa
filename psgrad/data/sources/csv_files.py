"""Datasets in csv and tsv: a header, separated by commas or tabs, in UTF-8, read by pyarrow.csv; and the
lines in which rows begin, for `psgrad check`.
"""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from psgrad.config.data import data_format
from psgrad.data.columns import ColumnRoles, not_numbers, require_columns
from psgrad.data.sources.arrow_types import errors_of_damage
from psgrad.data.sources.json_files import lines_of, not_utf8, open_text
from psgrad.data.sources.table_rows import mapped
from psgrad.errors import DataError

_BLOCK_BYTES = 8 << 20
_NUMBERS = (pa.int64(), pa.float64(), pa.bool_())  # in the order in which a column is tried as
_LIST = re.compile(r"""['"]?(\s*\[.*|[-+.\deE]+([\s,;]+[-+.\deE]+)+\s*)['"]?""", re.DOTALL)


def read_csv(path: Path, roles: ColumnRoles) -> pa.Table:
    """The columns of `roles`, by the type that all cells of a column have: whole numbers, fractions, or truth
    values, labels also text. Raises ConfigError for a column that is not there, DataError for cells that
    can't be used.
    """
    with errors_of_damage(path, data_format(path)), _errors_of_text(path):
        require_columns(roles.columns, _reader(path, [], []).schema.names, path)
        texts = mapped(_texts(roles.columns), _reader(path, roles.columns, roles.columns))
        schema = _texts(roles.columns)
        for place, name in enumerate((*roles.numbers, *roles.labels)):
            kind = _type_of(texts.column(name))
            if kind is None and name in roles.numbers:
                raise _not_a_number(texts.column(name), name, path)
            if kind is None:
                _require_names(texts.column(name), name, path)
            schema = schema.set(place, pa.field(name, kind or pa.string()))
        return mapped(schema, map(partial(_converted, schema, roles), texts.to_batches()))


def _texts(names: Sequence[str]) -> pa.Schema:
    return pa.schema([(name, pa.string()) for name in names])


def _reader(path: Path, columns: Sequence[str], texts: Sequence[str]) -> pyarrow.csv.CSVStreamingReader:
    """The cells of some columns as text, an empty one null; all columns without any."""
    mark = "\t" if data_format(path) == "tsv" else ","
    return pyarrow.csv.open_csv(
        path,
        read_options=pyarrow.csv.ReadOptions(block_size=_BLOCK_BYTES),
        parse_options=pyarrow.csv.ParseOptions(delimiter=mark, newlines_in_values=True),
        convert_options=pyarrow.csv.ConvertOptions(
            include_columns=columns, column_types=_texts(texts), null_values=[""], strings_can_be_null=True
        ),
    )


def _type_of(texts: pa.ChunkedArray) -> pa.DataType | None:
    """The first type that all cells have; None where there is none."""
    for kind in _NUMBERS:
        try:
            for chunk in texts.chunks:
                _trimmed(chunk).cast(kind)
            return kind
        except pa.ArrowInvalid:
            continue
    return None


def _converted(schema: pa.Schema, roles: ColumnRoles, batch: pa.RecordBatch) -> pa.RecordBatch:
    """Cells in the types of a schema: an empty text is one, ids stay as they are spelled."""
    found = []
    for field in schema:
        cells = batch.column(field.name)
        if field.name in roles.texts:
            cells = cells.fill_null("")
        elif field.name not in roles.ids:
            cells = _trimmed(cells).cast(field.type)
        found.append(cells)
    return pa.record_batch(found, schema=schema)


def _trimmed(cells: pa.Array) -> pa.Array:
    """Cells without the blanks around them; nothing but blanks is null."""
    found = pc.utf8_trim_whitespace(cells)
    return pc.if_else(pc.equal(found, ""), pa.scalar(None, pa.string()), found)


def _not_a_number(texts: pa.ChunkedArray, name: str, path: Path) -> DataError:
    """The error for the first cell that is no number."""
    cells = texts.to_pylist()
    row = next((row for row, each in enumerate(cells) if each is not None and not _is_number(each)), 0)
    example = f"row {row} holds {cells[row]!r} in {path}"
    if _LIST.fullmatch(cells[row] or ""):
        return not_numbers(name, "text", example, "for lists write jsonl, parquet or arrow")
    return not_numbers(name, "text", example)


def _require_names(texts: pa.ChunkedArray, name: str, path: Path) -> None:
    """Raises DataError for labels of which some are numbers and some are names."""
    cells = [each for each in pc.unique(texts).to_pylist() if each is not None and each.strip()]
    numbers = [each for each in cells if _is_number(each)]
    names = [each for each in cells if not _is_number(each)]
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
        reader = csv.reader(lines_of(path, file), delimiter="\t" if data_format(path) == "tsv" else ",")
        row, begin = -1, 1
        for cells in reader:
            if row in wanted and cells:
                found[row] = begin
            if row >= last:
                break
            row, begin = row + bool(cells), reader.line_num + 1
    return found
