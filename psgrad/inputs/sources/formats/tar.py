"""Datasets in tar, as WebDataset writes them: the files of a name are a row, their extensions the columns."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from psgrad.errors import DataError
from psgrad.inputs.sources.arrow import merged_type, mixed_types
from psgrad.inputs.sources.files import Wanted, require_columns
from psgrad.inputs.sources.source import DataHeader, TableSource, column_of
from psgrad.inputs.sources.tables import Rows

KEY = "__key__"
_ROWS = 100  # that the header looks at
_ROWS_PER_PART = 1024


class Tar(TableSource):
    """Files of one name in a row, such as 000017.jpg and 000017.cls; `__key__` is the name."""

    name: ClassVar[str] = "tar"

    def header(self, path: Path) -> DataHeader:
        members = _members(path, _ROWS)
        rows = _TarRows(path, members, [KEY, *_extensions(members)])
        columns = {field.name: column_of(field.type) for field in rows.schema}
        return DataHeader(path, list(columns), columns, None)

    def rows(self, path: Path, wanted: Wanted) -> Rows:
        members = _members(path)
        require_columns(wanted.columns, [KEY, *_extensions(members)], str(path))
        return _TarRows(path, members, wanted.columns)


class _TarRows(Rows):
    """Rows whose files are read from the archive when they are asked for.

    `members`: key -> extension -> (where its bytes begin, how many there are).
    """

    def __init__(
        self, path: Path, members: Mapping[str, Mapping[str, tuple[int, int]]], columns: list[str]
    ) -> None:
        self._path, self._keys, self._members = path, list(members), list(members.values())
        super().__init__(pa.schema([]), len(self._keys), [path])
        self._columns = columns
        self.schema = pa.schema([(name, self._type_of(name)) for name in columns])

    def read(self, start: int, stop: int) -> pa.Table:
        return pa.table(
            {
                field.name: pa.array(self._values(field.name, start, stop), field.type)
                for field in self.schema
            },
            schema=self.schema,
        )

    def place(self, row: int) -> str:
        return f"{self._path}, {self._keys[row]}"

    def _values(self, name: str, start: int, stop: int) -> list[Any]:
        if name == KEY:
            return self._keys[start:stop]
        decode = _decoder_of(name)
        found: list[Any] = []
        with self._path.open("rb") as file:
            for row in range(start, stop):
                if name not in self._members[row]:
                    found.append(None)
                    continue
                place, size = self._members[row][name]
                file.seek(place)
                try:
                    found.append(decode(file.read(size)))
                except (ValueError, EOFError) as error:
                    raise DataError(
                        f"the file {self._keys[row]}.{name} in {self._path} can't be read: {error}",
                        expected=_EXPECTED.get(name.rpartition(".")[2], "another content"),
                    ) from error
        return found

    def _type_of(self, name: str) -> pa.DataType:
        """The type of a column: that of its extension, or the one that all its files have."""
        if name == KEY or _decoder_of(name) is bytes:
            return pa.string() if name == KEY else pa.binary()
        kind, first = pa.null(), 0
        for start in range(0, self.count, _ROWS_PER_PART):
            for row, value in enumerate(
                self._values(name, start, min(start + _ROWS_PER_PART, self.count)), start
            ):
                found = pa.array([value]).type
                merged = kind if found == kind else merged_type(kind, found)
                if merged is None:
                    raise mixed_types(name, (self.place(first), kind), (self.place(row), found))
                first = row if pa.types.is_null(kind) else first
                kind = merged
        return kind


def _text(content: bytes) -> str:
    return content.decode("utf-8")


def _array(content: bytes) -> Any:
    return np.load(io.BytesIO(content), allow_pickle=False).tolist()


_DECODERS: Mapping[str, Callable[[bytes], Any]] = {
    **dict.fromkeys(("txt", "text", "caption"), _text),
    **dict.fromkeys(("cls", "cls2", "index", "id"), int),
    "json": json.loads,
    "npy": _array,
}
_EXPECTED = {"cls": "a whole number", "json": "one JSON value", "npy": "an array of numbers", "txt": "UTF-8"}


def _decoder_of(extension: str) -> Callable[[bytes], Any]:
    """What makes a value of a file's bytes; those of other extensions, such as images, stay bytes."""
    return _DECODERS.get(extension.rpartition(".")[2], bytes)


def _members(path: Path, rows: int | None = None) -> dict[str, dict[str, tuple[int, int]]]:
    """key -> extension -> (place, size) of the files of an archive, of the first `rows` keys. Raises
    DataError.
    """
    found: dict[str, dict[str, tuple[int, int]]] = {}
    try:
        for member in _files(path):
            folder, _, file = member.name.rpartition("/")
            name, _, extension = file.partition(".")
            key = f"{folder}/{name}".removeprefix("./").lstrip("/")
            if key not in found and rows is not None and len(found) == rows:
                break
            if extension.lower() in found.setdefault(key, {}):
                raise DataError(
                    f"{path} has two files {member.name}", expected="a name of its own for each file"
                )
            found[key][extension.lower()] = member.offset_data, member.size
    except (tarfile.TarError, EOFError, OSError) as error:
        raise DataError(
            f"{path} can't be read as tar: {error}",
            cause="an interrupted copy or download, or another format",
        ) from error
    return found


def _files(path: Path) -> Iterator[tarfile.TarInfo]:
    """The files of an archive that have an extension."""
    with tarfile.open(path, "r:") as archive:
        for member in archive:
            base = member.name.rpartition("/")[2]
            if member.isfile() and "." in base and not base.startswith("."):
                yield member


def _extensions(members: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return sorted({extension for each in members.values() for extension in each})
