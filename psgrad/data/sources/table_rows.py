"""Rows of a dataset as one Arrow table, in memory or mapped from a file, which the system pages in and out.
No torch.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from psgrad.run.input_files import Stamp

Array = npt.NDArray[Any]
_HASHED_ROWS = 4096


@dataclass(frozen=True)
class TableRows:
    """The named columns of a dataset. Rows are counted from 0.

    Attributes:
        table: of columns of any type: text, lists, structs, bytes.
        source: the dataset in words.
        fingerprint: a SHA-256 that changes when the rows do.
        files: what the rows were read from, in order; and `starts`, the first row of each.
        class_names: column -> names of its labels 0, 1, 2, ..., where the data tell them.
        notes: sentences for the manifest.
        stamps: of the files that the table is mapped from, which must not change.
        stacks: whether columns of one number a row, named in a list, are one vector where the config does not
            say.
    """

    table: pa.Table
    source: str
    fingerprint: str
    files: tuple[Path, ...] = ()
    starts: tuple[int, ...] = (0,)
    class_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    stamps: tuple[Stamp, ...] = ()
    stacks: bool = True

    @property
    def schema(self) -> pa.Schema:
        return self.table.schema

    @property
    def count(self) -> int:
        return int(self.table.num_rows)

    def take(self, rows: Sequence[int] | Array) -> pa.Table:
        """Rows from anywhere, in the given order; a row may occur more than once. Others are not touched."""
        if len(rows) and (np.diff(rows) == 1).all():
            return self.table.slice(int(rows[0]), len(rows))
        batches, ends = self._batches
        distinct, places = np.unique(rows, return_inverse=True)
        numbers = np.searchsorted(ends, distinct, side="right")
        parts = []
        for number in np.unique(numbers):
            own = distinct[numbers == number] - (ends[number] - len(batches[number]))
            parts.append(batches[number].take(pa.array(own)))
        found = pa.Table.from_batches(parts, self.schema)
        return found if np.array_equal(distinct, rows) else found.take(pa.array(places))

    def column(self, name: str) -> pa.Array:
        """A whole column."""
        return self.table.column(name).combine_chunks()

    def place(self, row: int) -> str:
        """Where a row is, for messages: its file and its number there."""
        if not self.files:
            return f"{self.source}, row {row}"
        part = int(np.searchsorted(self.starts, row, side="right")) - 1
        return f"{self.files[part]}, row {row - self.starts[part]}"

    def row_name(self, row: int) -> str:
        """A row in messages: its number, and of several files its place, too."""
        return f"row {row}" if len(self.files) < 2 else f"row {row} ({self.place(row)})"

    @cached_property
    def _batches(self) -> tuple[list[pa.RecordBatch], Array]:
        """(the parts of the table, the row after each)."""
        batches = self.table.to_batches()
        return batches, np.cumsum([len(each) for each in batches])


def mapped(schema: pa.Schema, batches: Iterable[pa.RecordBatch]) -> pa.Table:
    """Batches of this schema as a table in a file of the temporary folder, which goes with the table."""
    schema = pa.schema([(each.name, _without_categories(each.type)) for each in schema])
    with tempfile.TemporaryDirectory(prefix="psgrad-", ignore_cleanup_errors=True) as folder:
        file = f"{folder}/rows.arrow"
        with pa.ipc.new_file(file, schema) as writer:
            for batch in batches:
                writer.write_table(pa.Table.from_batches([batch]).cast(schema))
        return pa.ipc.open_file(pa.memory_map(file)).read_all()


def _without_categories(kind: pa.DataType) -> pa.DataType:
    """Parts have dictionaries of their own, of which a table on the disk takes only one."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def content_sha256(table: pa.Table) -> str:
    """A SHA-256 of what the rows hold."""
    found = hashlib.sha256(table.schema.serialize())
    for start in range(0, table.num_rows, _HASHED_ROWS):
        for batch in table.slice(start, _HASHED_ROWS).combine_chunks().to_batches():
            found.update(batch.serialize())
    return found.hexdigest()
