"""Datasets that pyarrow writes: in Arrow's own format, which is feather's, too, files or streams; and
parquet.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from psgrad.data.columns import ColumnRoles, require_columns
from psgrad.data.sources.arrow_types import errors_of_damage
from psgrad.data.sources.table_rows import mapped

_MAGIC = b"ARROW1"


def read_arrow(path: Path, roles: ColumnRoles) -> pa.Table:
    """The columns of a table of Arrow, as pyarrow, pandas' to_feather and datasets write it: mapped as it is
    where it is not compressed, else decompressed into a file of the temporary folder.
    """
    with errors_of_damage(path, "arrow"):
        whole = pa.memory_map(str(path)).read_buffer()
        schema, batches = batches_of(whole)
        require_columns(roles.columns, schema.names, path)
        wanted = pa.schema([schema.field(name) for name in roles.columns])
        categories = any(pa.types.is_dictionary(field.type) for field in wanted)
        selected = (batch.select(roles.columns) for batch in batches)
        first = list(islice(selected, 1))
        if categories or not all(_is_inside(whole, batch) for batch in first):
            return mapped(wanted, chain(first, selected))
        return pa.Table.from_batches([*first, *selected], wanted)


def batches_of(whole: pa.Buffer) -> tuple[pa.Schema, Iterable[pa.RecordBatch]]:
    """The schema and the batches of the content of a file or stream of Arrow's."""
    if bytes(whole[: len(_MAGIC)]) != _MAGIC:
        stream = pa.ipc.open_stream(whole)
        return stream.schema, stream
    file = pa.ipc.open_file(whole)
    return file.schema, map(file.get_batch, range(file.num_record_batches))


def _is_inside(whole: pa.Buffer, batch: pa.RecordBatch) -> bool:
    """Whether the values of a batch are those of a file as they are in it, and no copies."""
    buffers = [
        each for column in batch.columns for each in column.buffers() if each is not None and each.size
    ]
    return all(whole.address <= each.address < whole.address + whole.size for each in buffers)


def read_parquet(path: Path, roles: ColumnRoles) -> pa.Table:
    """The columns of a parquet file, in a file of the temporary folder."""
    with errors_of_damage(path, "parquet"), pq.ParquetFile(path) as file:
        require_columns(roles.columns, file.schema_arrow.names, path)
        schema = pa.schema([file.schema_arrow.field(name) for name in roles.columns])
        batches = file.iter_batches(columns=roles.columns)
        return mapped(schema, (batch.select(roles.columns) for batch in batches))
