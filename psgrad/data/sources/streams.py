"""Datasets that can only be read from the beginning: their first rows, copied to the disk. No torch.

Copies are in the temporary folder and go with the objects that read them. A later process, one that goes on
with a run included, reads the stream again, and knows it by the content of its rows.
"""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from psgrad.data.sources.arrow_columns import errors_of_damage
from psgrad.data.sources.file_checks import require_columns
from psgrad.data.sources.library_datasets import class_names_of
from psgrad.data.sources.objects import table_of
from psgrad.data.sources.source_rows import JoinedRows, TableRows, TemporaryFolder, temporary_file
from psgrad.errors import DataError
from psgrad.user_code import describe_failure

_ROWS_PER_PART = 4096
_ROWS_LOOKED_AT = 100


class StreamedRows(JoinedRows):
    """The named columns of the first rows of a `datasets.IterableDataset`.

    Args:
        most: how many rows are copied at most.
        named: the dataset in words.

    Raises ConfigError for a column that is not there, DataError where the stream can't be read.
    """

    def __init__(self, stream: Any, columns: Sequence[str], most: int, named: str) -> None:
        if stream.column_names is not None:
            require_columns(columns, stream.column_names, named)
        self._folder = TemporaryFolder()
        parts, left = [], most
        with errors_of_damage(Path(named), "a stream of rows"):
            for number, table in enumerate(_tables(stream, min(most + 1, _ROWS_PER_PART), named)):
                require_columns(columns, table.column_names, named)
                file = Path(self._folder.name) / f"{number:06d}.arrow"
                kept = table.select(list(columns)).slice(0, left)
                with pa.ipc.new_file(str(file), kept.schema) as writer:
                    writer.write_table(kept)
                parts.append(TableRows(pa.ipc.open_file(pa.memory_map(str(file))).read_all(), []))
                left -= len(kept)
                if len(kept) < len(table):
                    self.notes = stream_notes(most)
                    break
        first = 0
        for part in parts:  # for messages of columns of mixed types
            part.source, first = f"{named}, from row {first} on", first + part.count
        super().__init__(parts)
        self.source = named
        self.class_names = class_names_of(stream.features or {}, columns)

    def place(self, row: int) -> str:
        return f"{self.source}, row {row}"


class StreamedItems:
    """The first items of an iterable dataset, by number.

    Each is kept as Python's pickle has it, in a temporary file without a name, which nobody else can write.

    Args:
        stream: the dataset.
        most: how many items are copied at most.
        named: the dataset in words.

    Attributes:
        stream: the dataset.

    Raises DataError where an item can't be made, or can't be kept.
    """

    def __init__(self, stream: Iterable[Any], most: int, named: str) -> None:
        self.stream = stream
        self._file = temporary_file(self)
        self._ends = [0]
        self._more = False
        for row, item in enumerate(_with_data_errors(islice(iter(stream), most + 1), named)):
            if row == most:
                self._more = True
                break
            try:
                self._file.write(content := pickle.dumps(item, pickle.HIGHEST_PROTOCOL))
            except (pickle.PicklingError, TypeError, AttributeError, OSError) as error:
                raise DataError(
                    f"row {row} of {named} can't be kept: {error}",
                    expected="tensors, arrays, numbers and texts, in tuples or dicts",
                    next_step="return a map-style Dataset, whose items are made by number",
                ) from error
            self._ends.append(self._ends[-1] + len(content))
        self._file.flush()

    @property
    def notes(self) -> tuple[str, ...]:
        """The manifest's note about rows that were left out."""
        return stream_notes(len(self)) if self._more else ()

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, row: int) -> Any:
        if not 0 <= row < len(self):
            raise IndexError(row)
        # At a place: workers are processes that share the file's own position.
        start, stop = self._ends[row], self._ends[row + 1]
        return pickle.loads(os.pread(self._file.fileno(), stop - start, start))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "stream":
            raise AttributeError(name)
        return getattr(self.stream, name)


def stream_notes(count: int) -> tuple[str, ...]:
    """The manifest's note about a stream of which `count` rows were copied, and that has more."""
    return (f"data.stream_rows: the first {count:,} rows of a stream that has more",)


def stream_schema(stream: Any, named: str) -> pa.Schema:
    """The columns of a `datasets.IterableDataset`, by its first rows. Raises DataError."""
    if stream.features is not None:
        return stream.features.arrow_schema
    with errors_of_damage(Path(named), "a stream of rows"):
        return next((table.schema for table in _tables(stream, _ROWS_LOOKED_AT, named)), pa.schema([]))


def is_library_stream(value: object) -> bool:
    """Whether an object is a `datasets.IterableDataset`."""
    library_there = sys.modules.get("datasets")
    return library_there is not None and isinstance(value, library_there.IterableDataset)


def _tables(stream: Any, rows: int, named: str) -> Iterator[pa.Table]:
    """The rows of a `datasets.IterableDataset`, in tables of `rows` rows.

    The library makes tables of rows whose types it knows, or which it reads from files. Of others each table
    has the types of its own rows.
    """
    if stream.features is not None or stream.column_names is not None:
        yield from _with_data_errors(stream.with_format("arrow").iter(batch_size=rows), named)
        return
    left, first = iter(_with_data_errors(stream, named)), 0
    while part := list(islice(left, rows)):
        yield table_of(part, first, named)
        first += len(part)


def _with_data_errors(items: Iterable[Any], named: str) -> Iterable[Any]:
    """The items; an exception from making one becomes a DataError."""
    try:
        yield from items
    except Exception as error:
        raise DataError(f"reading {named} raised {describe_failure(error)}") from error
