"""Datasets in parquet, read by row groups, of which one at a time is in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq

from psgrad.inputs.sources.arrow_columns import errors_of_damage
from psgrad.inputs.sources.file_checks import Wanted, require_columns
from psgrad.inputs.sources.source import BatchSource, DataHeader, column_of
from psgrad.inputs.sources.source_rows import GroupedRows, SourceRows


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

    def writer(self, target: BinaryIO, schema: pa.Schema) -> Any:
        return pq.ParquetWriter(target, schema)
