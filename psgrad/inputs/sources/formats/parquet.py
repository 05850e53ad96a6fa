"""Datasets in parquet, read by row groups, of which one at a time is in memory."""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate, chain
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq

from psgrad.config import DataConfig
from psgrad.errors import DataError
from psgrad.inputs.sources.arrow import damage_told, plain, require_numbers
from psgrad.inputs.sources.files import named_columns, require_columns, require_single_names
from psgrad.inputs.sources.source import Column, DataHeader, Source

if TYPE_CHECKING:
    from psgrad.inputs.rows import Array, Samples
    from psgrad.inputs.sources.tables import MappedTable


class Parquet(Source):
    """Columns of numbers, or of lists of numbers."""

    name: ClassVar[str] = "parquet"

    def header(self, path: Path) -> DataHeader:
        with damage_told(path, "parquet"):
            file = pq.ParquetFile(path)
            names, rows = file.schema_arrow.names, file.metadata.num_rows
        columns = {
            name: _arrow_column(name, file.schema_arrow.types[place]) for place, name in enumerate(names)
        }
        return DataHeader(path, list(names), columns, rows)

    def load(self, path: Path, config: DataConfig, unit: str | None = None) -> Samples:
        """A parquet file, read by row groups, of which one at a time is in memory."""
        from psgrad.inputs.sources.tables import TableSamples

        with damage_told(path, "parquet"):
            file = pq.ParquetFile(path)
            columns = named_columns(config, unit)
            require_columns(columns, file.schema_arrow.names, str(path))
            require_single_names(file.schema_arrow.names, columns, path)
        return TableSamples(_ParquetRows(file, columns, path), config, path, unit)


def _arrow_column(name: str, kind: pa.DataType) -> Column:
    try:
        value = require_numbers(name, kind)
    except DataError:
        return Column("text", str(kind))
    return Column(
        "fraction" if pa.types.is_floating(value) else "boolean" if pa.types.is_boolean(value) else "integer",
        str(kind),
    )


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
        self._mapped: MappedTable | None = None

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
        from psgrad.inputs.sources.tables import MappedTable

        if self._mapped is None:
            with damage_told(self._path, "parquet"):
                groups = map(_without_categories, map(self._group, range(self._file.num_row_groups)))
                first = next(groups)
                self._mapped = MappedTable(first.schema, chain([first], groups))
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
    return pa.table({name: plain(table.column(name)) for name in table.column_names})
