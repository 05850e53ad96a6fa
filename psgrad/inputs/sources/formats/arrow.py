"""Datasets in Arrow's own format, as files or streams, mapped into memory."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pyarrow as pa

from psgrad.inputs.sources.arrow import errors_of_damage
from psgrad.inputs.sources.files import Wanted, require_columns, require_single_names
from psgrad.inputs.sources.source import DataHeader, TableSource, column_of
from psgrad.inputs.sources.tables import GroupedRows, Rows, TableRows

_MAGIC = b"ARROW1"
_SMALL = 1 << 20


class Arrow(TableSource):
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

    def rows(self, path: Path, wanted: Wanted) -> Rows:
        with errors_of_damage(path, "arrow"):
            found = _opened(path)
            require_columns(wanted.columns, found.schema.names, str(path))
            require_single_names(found.schema.names, wanted.columns, path)
            if isinstance(found, pa.ipc.RecordBatchFileReader):
                return _Batches(found, wanted.columns, path)
            return TableRows(found.read_all().select(wanted.columns), [path])


class _Batches(GroupedRows):
    """The batches of a file: those that are compressed are in memory one at a time."""

    def __init__(self, file: pa.ipc.RecordBatchFileReader, columns: list[str], path: Path) -> None:
        schema = pa.schema([file.schema.field(name) for name in columns])
        sizes = (file.get_batch(place).num_rows for place in range(file.num_record_batches))
        super().__init__(schema, sizes, path)
        self._file = file

    def read_group(self, group: int) -> pa.Table:
        with errors_of_damage(self.files[0], "arrow"):
            batch = self._file.get_batch(group)
            return pa.Table.from_batches([batch]).select(self.schema.names)


def _opened(path: Path) -> pa.ipc.RecordBatchFileReader | pa.ipc.RecordBatchStreamReader:
    with path.open("rb") as file:
        is_file = file.read(len(_MAGIC)) == _MAGIC
    mapped = pa.memory_map(str(path))
    return pa.ipc.open_file(mapped) if is_file else pa.ipc.open_stream(mapped)
