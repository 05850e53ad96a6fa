"""Datasets in csv and parquet: columns of numbers or of lists of numbers, larger than memory if need be."""

from __future__ import annotations

import tempfile
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

from psgrad.config import DataConfig
from psgrad.errors import DataError
from psgrad.inputs.rows import Array, Block, Samples, row_numbers, runs, to_tensor, unique_ids, unit_ids
from psgrad.inputs.sources.files import (
    input_names,
    named_columns,
    not_numbers,
    require_columns,
    require_rows,
    require_single_names,
    sha256_of,
)
from psgrad.inputs.sources.headers import csv_header, cut_row, damage_told, is_list, require_numbers

_CSV_BLOCK_BYTES = 8 << 20


class Rows(Protocol):
    """The named columns of a table on the disk."""

    schema: pa.Schema
    count: int

    def read(self, start: int, stop: int) -> pa.Table:
        """The rows start, ..., stop - 1."""

    def take(self, rows: Array) -> pa.Table:
        """Rows from anywhere, in rising order, each once. What else was read to get at them does not stay in
        memory.
        """

    def column(self, name: str) -> pa.ChunkedArray:
        """A whole column."""


class TableSamples(Samples):
    """Rows of a table as tensors. A list of scalar columns is one feature vector; any other column is a
    tensor of its own.
    """

    def __init__(self, rows: Rows, config: DataConfig, path: Path, unit: str | None = None) -> None:
        require_rows(rows.count, str(path))
        self._rows = rows
        self._inputs = input_names(config)
        self._target = config.target
        self._shapes: dict[str, tuple[int, ...]] = {}
        kinds = {name: rows.schema.field(name).type for name in named_columns(config)}
        for name in (*self._inputs, *([config.target] if config.target is not None else ())):
            require_numbers(name, kinds[name])
        self._one_vector = isinstance(config.inputs, list) and not any(
            is_list(kinds[name]) for name in self._inputs
        )
        ids = (
            row_numbers(rows.count)
            if config.id is None
            else unique_ids(_plain(rows.column(config.id)).to_pandas(), config.id)
        )
        units = None if unit is None else unit_ids(_plain(rows.column(unit)).to_pandas(), unit)
        targets = None
        if config.target is not None and not is_list(kinds[config.target]):
            targets = to_tensor(_numbers(rows.column(config.target), config.target, 0), config.target).numpy()
        super().__init__(ids, targets, sha256_of(path), units)
        self.read(0, 1)  # the first row's shapes are what every other row must have

    def read(self, start: int, stop: int) -> Block:
        return self._block(self._rows.read(start, stop), start)

    def input_names(self) -> list[str]:
        return list(self._inputs)

    def take(self, rows: Array) -> Block:
        distinct, places = np.unique(self._existing(rows), return_inverse=True)
        table = self._rows.take(distinct)
        try:
            return self._block(table, 0).at(places)
        except DataError:
            for row in distinct.tolist():  # one of them is at fault, and is told with its own number
                self.read(row, row + 1)
            raise

    def _block(self, table: pa.Table, start: int) -> Block:
        arrays = [self._array(table, name, start) for name in self._inputs]
        if self._one_vector:
            inputs = [to_tensor(np.stack(arrays, axis=1), ", ".join(self._inputs))]
        else:
            inputs = [to_tensor(array, name) for name, array in zip(self._inputs, arrays, strict=True)]
        return Block(
            tuple(inputs),
            (
                None
                if self._target is None
                else to_tensor(self._array(table, self._target, start), self._target)
            ),
        )

    def _array(self, table: pa.Table, name: str, start: int) -> Array:
        array = _numbers(table.column(name), name, start, self._shapes.get(name))
        self._shapes.setdefault(name, array.shape[1:])
        return array


class _MappedTable:
    """Parts of a table, written one after another into a file in the temporary folder, which the system pages
    in and out.
    """

    def __init__(self, schema: pa.Schema, parts: Iterable[pa.Table]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="psgrad-")  # removed with this object
        file = Path(self._folder.name) / "table.arrow"
        with pa.ipc.new_file(str(file), schema) as writer:
            for part in parts:
                writer.write_table(part)
        self.table = pa.ipc.open_file(pa.memory_map(str(file))).read_all()

    def read(self, start: int, stop: int) -> pa.Table:
        return self.table.slice(start, stop - start)

    def take(self, rows: Array) -> pa.Table:
        return pa.concat_tables([self.read(start, stop) for start, stop in runs(rows)])


# -- Arrow to numpy ------------------------------------------------------------------------------------------


def _plain(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def _numbers(
    column: pa.ChunkedArray | pa.Array,
    name: str,
    first_row: int,
    shape: tuple[int, ...] | None = None,
    values_per_row: int = 1,
) -> Array:
    """[n, *shape] of a column of numbers or of (lists of) lists of them; its first value belongs to
    `first_row`.

    Without a `shape` the first row's is taken. An empty cell is NaN among fractions, so that its row is
    reported as nonfinite, and an error among whole numbers and lists, which have no NaN. `values_per_row` is
    more than one inside a list.
    """
    array = _plain(column)
    if array.null_count and not pa.types.is_floating(array.type):
        row = first_row + _first(array.is_null().to_numpy(zero_copy_only=False)) // values_per_row
        raise DataError(
            f"row {row} of the column {name!r} is empty", expected=f"a value of type {array.type}"
        )
    if not is_list(array.type):
        return np.asarray(array.to_numpy(zero_copy_only=False))
    lengths = pc.list_value_length(array).to_numpy(zero_copy_only=False)
    width = int(lengths[0]) if shape is None else shape[0]
    if (lengths != width).any():
        index = _first(lengths != width)
        raise DataError(
            f"row {first_row + index // values_per_row} of the column {name!r} has a list of {lengths[index]}"
            f" values, row 0 of {width}",
            expected="one length in all rows",
            next_step="pad or cut the rows to one length before they are saved",
        )
    if width == 0:
        return np.empty((len(array), 0), dtype=np.float32)
    values = _numbers(
        array.flatten(), name, first_row, None if shape is None else shape[1:], values_per_row * width
    )
    return values.reshape(len(array), width, *values.shape[1:])


def _first(mask: Array) -> int:
    return int(np.argmax(mask))


# -- Parquet -------------------------------------------------------------------------------------------------


def load_parquet(path: Path, config: DataConfig, unit: str | None = None) -> Samples:
    """A parquet file, read by row groups, of which one at a time is in memory."""
    with damage_told(path, "parquet"):
        file = pq.ParquetFile(path)
        columns = named_columns(config, unit)
        require_columns(columns, file.schema_arrow.names, str(path))
        require_single_names(file.schema_arrow.names, columns, path)
    return TableSamples(_ParquetRows(file, columns, path), config, path, unit)


class _ParquetRows:
    def __init__(self, file: pq.ParquetFile, columns: list[str], path: Path) -> None:
        self.schema = file.schema_arrow
        self.count = file.metadata.num_rows
        self._file = file
        self._columns = columns
        self._path = path
        sizes = (file.metadata.row_group(group).num_rows for group in range(file.num_row_groups))
        self._starts = [0, *accumulate(sizes)]
        self._held: tuple[int, pa.Table] | None = None
        self._mapped: _MappedTable | None = None

    def read(self, start: int, stop: int) -> pa.Table:
        first, last = bisect_right(self._starts, start) - 1, bisect_right(self._starts, stop - 1) - 1
        parts = []
        for group in range(first, last + 1):
            begin, end = max(start, self._starts[group]), min(stop, self._starts[group + 1])
            parts.append(self._group(group).slice(begin - self._starts[group], end - begin))
        return pa.concat_tables(parts)

    def take(self, rows: Array) -> pa.Table:
        """Rows from all over the file would have each row group read anew every time: the first time makes a
        mapped table of them.
        """
        if self._file.num_row_groups == 1:
            return self._group(0).take(pa.array(rows))
        if self._mapped is None:
            with damage_told(self._path, "parquet"):
                groups = map(_without_categories, map(self._group, range(self._file.num_row_groups)))
                first = next(groups)
                self._mapped = _MappedTable(first.schema, chain([first], groups))
        return self._mapped.take(rows)

    def column(self, name: str) -> pa.ChunkedArray:
        with damage_told(self._path, "parquet"):
            return self._file.read(columns=[name]).column(name)

    def _group(self, group: int) -> pa.Table:
        if self._held is None or self._held[0] != group:
            self._held = None  # before the next one is read: one group in memory, not two
            with damage_told(self._path, "parquet"):
                self._held = group, self._file.read_row_group(group, columns=self._columns)
        return self._held[1]


def _without_categories(table: pa.Table) -> pa.Table:
    """Row groups have dictionaries of their own, of which a file of one table takes only one."""
    return pa.table({name: _plain(table.column(name)) for name in table.column_names})


# -- CSV -----------------------------------------------------------------------------------------------------


def load_csv(path: Path, config: DataConfig, unit: str | None = None) -> Samples:
    """A csv file with a header, comma-separated, in UTF-8.

    It is read twice, block by block: to find the type of every column, then to convert it into a
    memory-mapped table in the temporary folder, which the system pages in and out.
    """
    with damage_told(path, "csv"):
        header = csv_header(path)
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


class _CsvRows:
    def __init__(self, path: Path, header: list[str], kinds: dict[str, pa.DataType]) -> None:
        self.schema = pa.schema(list(kinds.items()))
        self._mapped = _MappedTable(
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
        raise cut_row(path, row.number - 2, row.actual_columns, row.expected_columns) from error


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
