"""Datasets that pyarrow writes: in Arrow's own format, which is feather's, too, files or streams, mapped into
memory; and parquet, read by row groups, of which one at a time is in memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import pyarrow as pa
import pyarrow.parquet as pq

from psgrad.data.sources.arrow_columns import errors_of_damage
from psgrad.data.sources.file_checks import Wanted, require_columns
from psgrad.data.sources.source import BatchSource, DataHeader, column_of
from psgrad.data.sources.source_rows import GroupedRows, SourceRows, TableRows

_MAGIC = b"ARROW1"
_SMALL = 1 << 20


class Arrow(BatchSource):
    """A table of Arrow, as pyarrow, pandas' to_feather and datasets write it."""

    name: ClassVar[str] = "arrow"
    read_again: ClassVar[bool] = True

    def header(self, path: Path) -> DataHeader:
        with errors_of_damage(path, "arrow"):
            found = _opened(path)
            schema = found.schema
            small = path.stat().st_size < _SMALL  # what is compressed is decompressed to be counted
            rows = found.read_all().num_rows if small else None
        columns = {field.name: column_of(field.type) for field in schema}
        return DataHeader(path, list(schema.names), columns, rows)

    def rows(self, path: Path, wanted: Wanted) -> SourceRows:
        with errors_of_damage(path, "arrow"):
            found = _opened(path)
            require_columns(wanted.columns, found.schema.names, str(path))
            if isinstance(found, pa.ipc.RecordBatchFileReader):
                return _batches(found, wanted.columns, path)
            return TableRows(found.read_all().select(wanted.columns), [path])

    @contextmanager
    def batches(self, path: Path) -> Iterator[tuple[pa.Schema, Iterable[pa.RecordBatch]]]:
        with _opened(path) as found:
            if isinstance(found, pa.ipc.RecordBatchFileReader):
                yield found.schema, map(found.get_batch, range(found.num_record_batches))
            else:
                yield found.schema, found


class Feather(Arrow):
    """A table of Arrow, as pandas' to_feather writes it."""

    name: ClassVar[str] = "feather"


def _batches(file: pa.ipc.RecordBatchFileReader, columns: list[str], path: Path) -> SourceRows:
    """The batches of a file: those that are compressed are in memory one at a time."""

    def read(group: int, names: list[str]) -> pa.Table:
        return pa.Table.from_batches([file.get_batch(group)]).select(names)

    schema = pa.schema([file.schema.field(name) for name in columns])
    sizes = (file.get_batch(place).num_rows for place in range(file.num_record_batches))
    return GroupedRows(schema, sizes, path, "arrow", read)


def _opened(path: Path) -> pa.ipc.RecordBatchFileReader | pa.ipc.RecordBatchStreamReader:
    with path.open("rb") as file:
        is_file = file.read(len(_MAGIC)) == _MAGIC
    mapped = pa.memory_map(str(path))
    return pa.ipc.open_file(mapped) if is_file else pa.ipc.open_stream(mapped)


class Parquet(BatchSource):
    """A table by columns, as pyarrow and pandas write it."""

    name: ClassVar[str] = "parquet"
    read_again: ClassVar[bool] = True

    def header(self, path: Path) -> DataHeader:
        with errors_of_damage(path, "parquet"):
            file = pq.ParquetFile(path)
            names, rows = file.schema_arrow.names, file.metadata.num_rows
        columns = {name: column_of(file.schema_arrow.types[place]) for place, name in enumerate(names)}
        return DataHeader(path, list(names), columns, rows)

    def rows(self, path: Path, wanted: Wanted) -> SourceRows:
        with errors_of_damage(path, "parquet"):
            file = pq.ParquetFile(path)
            require_columns(wanted.columns, file.schema_arrow.names, str(path))
        schema = pa.schema([file.schema_arrow.field(name) for name in wanted.columns])
        sizes = (file.metadata.row_group(group).num_rows for group in range(file.num_row_groups))

        def read(group: int, names: list[str]) -> pa.Table:
            return file.read_row_group(group, columns=names).select(names)

        return GroupedRows(schema, sizes, path, self.name, read)

    @contextmanager
    def batches(self, path: Path) -> Iterator[tuple[pa.Schema, Iterable[pa.RecordBatch]]]:
        with pq.ParquetFile(path) as file:
            yield file.schema_arrow, file.iter_batches()
