"""Rows of data files as Arrow tables: larger than memory if need be, of one file or of many; and the
temporary folders and files that go with the object that reads from them. No torch.
"""

from __future__ import annotations

import hashlib
import io
import shutil
import tempfile
import weakref
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, chain
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from psgrad.data.sources.arrow_columns import common_schema, errors_of_damage, plain
from psgrad.data.sources.file_checks import named_files
from psgrad.run.host_files import pieces_wanted
from psgrad.run.identity import files_sha256


class TemporaryFolder:
    """A folder that is removed with this object, or at the end of the process. Unlike that of
    `tempfile.TemporaryDirectory`, its removal is no warning, which would come up wherever memory is tidied.

    Attributes:
        name: its path.
    """

    def __init__(self) -> None:
        self.name = tempfile.mkdtemp(prefix="psgrad-")
        weakref.finalize(self, shutil.rmtree, self.name, ignore_errors=True)


def temporary_file(owner: object) -> IO[bytes]:
    """A file without a name, which is closed with its owner, or at the end of the process: without a warning,
    too.
    """
    file: IO[bytes] = tempfile.TemporaryFile(prefix="psgrad-")  # noqa: SIM115 - closed with its owner
    weakref.finalize(owner, file.close)
    return file


Array = npt.NDArray[Any]

_ROWS_PER_PART = 4096
_MOST_IN_PIECE = 1 << 17  # rows: a value in the store of torch.distributed has at most 8 MiB
_UNIT, _NUMBER = b"psgrad.unit", "psgrad.number"  # of saved rows


class SourceRows(ABC):
    """The named columns of a dataset. Rows are counted from 0.

    Attributes:
        schema: a field for each column; of any type: text, lists, structs, bytes.
        count: how many rows there are.
        files: what they were read from, in order.
        source: the same for messages.
        class_names: column -> names of its labels 0, 1, 2, ..., where the data tell them.
        notes: sentences for the manifest.
        numbers: of the rows in their file, where they are not 0, 1, 2, ...
        groups: the first row of each group that is read as a whole; none where any rows are read alone.
    """

    notes: tuple[str, ...] = ()
    groups: Sequence[int] = ()
    numbers: RowNumbers | None = None

    def __init__(self, schema: pa.Schema, count: int, files: Sequence[Path]) -> None:
        self.schema = schema
        self.count = count
        self.files = tuple(files)
        self.source = named_files(self.files) if files else ""
        self.class_names: Mapping[str, tuple[str, ...]] = {}

    @cached_property
    def fingerprint(self) -> str:
        """A SHA-256 over the files, in order; over the rows where they are of no file."""
        return files_sha256(self.files) if self.files else _content_sha256(self)

    @abstractmethod
    def read(self, start: int, stop: int) -> pa.Table:
        """The rows start, ..., stop - 1, of which there is at least one."""

    def take(self, rows: Array) -> pa.Table:
        """Rows from anywhere, in the given order; a row may occur more than once.

        What else was read to get at them does not stay in memory.
        """
        distinct, places = np.unique(rows, return_inverse=True)
        table = self._take_rising(distinct)
        return table if np.array_equal(distinct, rows) else table.take(pa.array(places))

    def column(self, name: str) -> pa.ChunkedArray:
        """A whole column."""
        return self.read(0, self.count).column(name)

    def place(self, row: int) -> str:
        """Where a row is, for messages: its file and its number there."""
        return f"{self.source}, row {row}" if self.numbers is None else self.numbers.place(row)

    def line(self, row: int) -> str:
        """The place of a row by its line, even where the file has to be read for it."""
        return self.place(row)

    def row_name(self, row: int, *, line: bool = False) -> str:
        """A row in messages: its number, and its place, or its line, where that says more."""
        place = self.line(row) if line else self.place(row)
        return f"row {row}" if place == f"{self.source}, row {row}" else f"row {row} ({place})"

    def _take_rising(self, rows: Array) -> pa.Table:
        return pa.concat_tables([self.read(start, stop) for start, stop in runs(rows)])


class TableRows(SourceRows):
    """Rows of a table that is in memory, or mapped."""

    def __init__(self, table: pa.Table, files: Sequence[Path], numbers: RowNumbers | None = None) -> None:
        super().__init__(table.schema, table.num_rows, files)
        self._table, self.numbers = table, numbers

    def read(self, start: int, stop: int) -> pa.Table:
        return self._table.slice(start, stop - start)

    def column(self, name: str) -> pa.ChunkedArray:
        return self._table.column(name)


class RowNumbers:
    """The number in its file of each row.

    Args:
        unit: what is counted, such as line.
    """

    def __init__(self, path: Path, unit: str, numbers: Iterable[Array] = ()) -> None:
        self.unit, self._path, self._parts = unit, path, list(numbers)
        self._starts = [0, *accumulate(map(len, self._parts))]

    def add(self, numbers: Sequence[int]) -> None:
        self._parts.append(np.array(numbers, dtype=np.int64))
        self._starts.append(self._starts[-1] + len(numbers))

    def place(self, row: int) -> str:
        part = bisect_right(self._starts, row) - 1
        return f"{self._path}, {self.unit} {self._parts[part][row - self._starts[part]]}"

    def all(self) -> Array:
        """[n] int64."""
        return np.concatenate([np.empty(0, np.int64), *self._parts])


class MappedRows(TableRows):
    """Parts of a table, written one after another into a file in the temporary folder, which the system pages
    in and out.

    Args:
        parts: tables of this schema; anything that they raise is raised.
        numbers: of the rows; they may be added while the parts are made.
    """

    def __init__(
        self,
        schema: pa.Schema,
        parts: Iterable[pa.Table],
        files: Sequence[Path],
        numbers: RowNumbers | None = None,
    ) -> None:
        self._folder = TemporaryFolder()
        file = Path(self._folder.name) / "table.arrow"
        with pa.ipc.new_file(str(file), schema) as writer:
            for part in parts:
                writer.write_table(part)
        super().__init__(pa.ipc.open_file(pa.memory_map(str(file))).read_all(), files, numbers)


def save_rows(rows: SourceRows, target: Path) -> None:
    """Write rows, with their numbers, into a file that `saved_rows` opens."""
    table = rows.read(0, rows.count) if rows.count else rows.schema.empty_table()
    if rows.numbers is not None:
        about = {_UNIT: rows.numbers.unit.encode()}
        table = table.append_column(_NUMBER, pa.array(rows.numbers.all())).replace_schema_metadata(about)
    with pa.ipc.new_file(str(target), table.schema) as writer:
        writer.write_table(table.unify_dictionaries())


def saved_rows(file: Path, path: Path) -> SourceRows:
    """The rows that `save_rows` wrote, mapped into memory; path: of the file that they are from."""
    table = pa.ipc.open_file(pa.memory_map(str(file))).read_all()
    about = table.schema.metadata or {}
    if _UNIT not in about:
        return TableRows(table, [path])
    numbers = RowNumbers(path, about[_UNIT].decode(), [table.column(_NUMBER).to_numpy()])
    return TableRows(table.drop_columns([_NUMBER]).replace_schema_metadata(None), [path], numbers)


class GroupedRows(SourceRows):
    """Rows of a file that is read by groups of rows, of which one at a time is in memory.

    Args:
        sizes: how many rows each group has.
        kind: of the file, for messages.
        read_group: the named columns of a group, by its number.
    """

    def __init__(
        self,
        schema: pa.Schema,
        sizes: Iterable[int],
        path: Path,
        kind: str,
        read_group: Callable[[int, list[str]], pa.Table],
    ) -> None:
        self._starts = [0, *accumulate(sizes)]
        super().__init__(schema, self._starts[-1], [path])
        self.groups = self._starts[:-1]
        self._kind, self._read_group = kind, read_group
        self._held: tuple[int, pa.Table] | None = None
        self._mapped: MappedRows | None = None
        self._visits = 0  # of groups, for rows from anywhere

    def column(self, name: str) -> pa.ChunkedArray:
        with errors_of_damage(self.files[0], self._kind):
            groups = range(len(self._starts) - 1)
            return pa.concat_tables([self._read_group(group, [name]) for group in groups]).column(name)

    def read(self, start: int, stop: int) -> pa.Table:
        first, last = bisect_right(self._starts, start) - 1, bisect_right(self._starts, stop - 1) - 1
        parts = []
        for group in range(first, last + 1):
            begin, end = max(start, self._starts[group]), min(stop, self._starts[group + 1])
            parts.append(self._group(group).slice(begin - self._starts[group], end - begin))
        return pa.concat_tables(parts)

    def _take_rising(self, rows: Array) -> pa.Table:
        """Once as many groups were read for such rows as there are, a mapped table of all groups is made:
        each would be read every time. A process that needs few rows does not read them all.
        """
        parts = np.split(rows, np.searchsorted(rows, self._starts[1:-1]))
        needed = [group for group, part in enumerate(parts) if len(part)]
        self._visits += len(needed)
        if len(parts) == 1 or self._visits <= len(parts):
            found = (
                self._group(group).take(pa.array(parts[group] - self._starts[group])) for group in needed
            )
            return pa.concat_tables([_without_categories(table) for table in found])
        if self._mapped is None:
            with errors_of_damage(self.files[0], "a table"):
                groups = (_without_categories(self._group(group)) for group in range(len(self._starts) - 1))
                first = next(groups)
                self._mapped = MappedRows(first.schema, chain([first], groups), self.files)
        return self._mapped._take_rising(rows)

    def _group(self, group: int) -> pa.Table:
        if self._held is None or self._held[0] != group:
            self._held = None  # before the next one is read: one group in memory, not two
            with errors_of_damage(self.files[0], self._kind):
                self._held = group, self._read_group(group, self.schema.names)
        return self._held[1]


class JoinedRows(SourceRows):
    """The rows of several files, one after another.

    Args:
        parts: of each file. The columns have one type each, to which those of the files are converted.
        texts: columns that are text in all files where they are text in one.

    Raises DataError where a column's types can't be joined.
    """

    def __init__(self, parts: Sequence[SourceRows], texts: Iterable[str] = ()) -> None:
        self._parts = parts
        self._starts = [0, *accumulate(part.count for part in parts)]
        schema = common_schema([(part.source, part.schema) for part in parts if part.count], texts)
        super().__init__(schema, self._starts[-1], [file for part in parts for file in part.files])
        if any(part.groups for part in parts):
            begun = zip(self._starts, parts, strict=False)
            self.groups = [start + first for start, part in begun for first in part.groups or (0,)]

    def read(self, start: int, stop: int) -> pa.Table:
        found = []
        for place in range(bisect_right(self._starts, start) - 1, len(self._parts)):
            begin, end = max(start, self._starts[place]), min(stop, self._starts[place + 1])
            if begin < end:
                part = self._parts[place].read(begin - self._starts[place], end - self._starts[place])
                found.append(self._converted(part))
        return pa.concat_tables(found)

    def column(self, name: str) -> pa.ChunkedArray:
        kind = self.schema.field(name).type
        columns = [plain(part.column(name)).cast(kind) for part in self._parts if part.count]
        return pa.chunked_array(columns, kind)

    def place(self, row: int) -> str:
        part = bisect_right(self._starts, row) - 1
        return self._parts[part].place(row - self._starts[part])

    def line(self, row: int) -> str:
        part = bisect_right(self._starts, row) - 1
        return self._parts[part].line(row - self._starts[part])

    def _take_rising(self, rows: Array) -> pa.Table:
        parts = np.split(rows, np.searchsorted(rows, self._starts[1:-1]))
        return pa.concat_tables(
            [
                self._converted(self._parts[place].take(part - self._starts[place]))
                for place, part in enumerate(parts)
                if len(part)
            ]
        )

    def _converted(self, table: pa.Table) -> pa.Table:
        return _without_categories(table.select(self.schema.names)).cast(self.schema)


def joined(parts: Sequence[SourceRows], texts: Iterable[str] = ()) -> SourceRows:
    """The rows of one file, or of several one after another."""
    return parts[0] if len(parts) == 1 else JoinedRows(parts, texts)


def pieces_of(rows: SourceRows, least: int) -> list[range]:
    """All rows in ranges for `in_pieces`, of `least` rows at least, that begin where groups do."""
    step = max(least, min(_MOST_IN_PIECE, -(-rows.count // pieces_wanted())))
    starts = np.arange(0, rows.count, step)
    if len(rows.groups):
        starts = np.unique(np.array(rows.groups)[np.searchsorted(rows.groups, starts, side="right") - 1])
    stops = [*starts[1:].tolist(), rows.count]
    return [range(start, stop) for start, stop in zip(starts.tolist(), stops, strict=True)]


def runs(rows: Array) -> list[tuple[int, int]]:
    """The (start, stop) of neighbouring rows, for rows in rising order."""
    breaks = np.flatnonzero(np.diff(rows) != 1) + 1
    return [(int(part[0]), int(part[-1]) + 1) for part in np.split(rows, breaks)]


def _content_sha256(rows: SourceRows) -> str:
    found = hashlib.sha256()
    with pa.ipc.new_stream(pa.PythonFile(_Hashing(found), mode="w"), rows.schema) as stream:
        for start in range(0, rows.count, _ROWS_PER_PART):
            part = rows.read(start, min(start + _ROWS_PER_PART, rows.count))
            stream.write_table(part.combine_chunks())
    return found.hexdigest()


class _Hashing(io.RawIOBase):
    """A file that keeps the hash of what is written into it."""

    def __init__(self, digest: Any) -> None:
        self._digest = digest

    def writable(self) -> bool:
        return True

    def write(self, content: Any) -> int:
        self._digest.update(content)
        return len(content)


def _without_categories(table: pa.Table) -> pa.Table:
    """Parts have dictionaries of their own, of which a table on the disk takes only one."""
    return pa.table({name: plain(table.column(name)) for name in table.column_names})
