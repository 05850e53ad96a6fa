"""Datasets in tar, as WebDataset writes them: the files of a name are a row, their extensions the columns.

Of an archive only where each file begins is in memory. The columns that are wanted of a compressed one are
copied into a file in the temporary folder, where rows can be read in any order.
"""

from __future__ import annotations

import io
import json
import shutil
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import numpy as np
import pyarrow as pa

from psgrad.config.data import COMPRESSIONS
from psgrad.data.sources.arrow_columns import errors_of_damage, merged_type, mixed_types
from psgrad.data.sources.file_checks import Wanted, require_columns
from psgrad.data.sources.objects import json_value
from psgrad.data.sources.source import DataHeader, TableSource, column_of
from psgrad.data.sources.source_rows import SourceRows, TemporaryFolder
from psgrad.errors import DataError
from psgrad.run.host_files import made_once
from psgrad.run.input_files import Stamp

KEY = "__key__"
_ROWS = 100  # that the header looks at
_ROWS_PER_PART = 1024
_FILES, _MEMBERS = "files", "members.json"  # of the copy of a compressed archive


class Tar(TableSource):
    """Files of one name in a row, such as 000017.jpg and 000017.cls; `__key__` is the name."""

    name: ClassVar[str] = "tar"
    compressed: ClassVar[bool] = True
    read_again: ClassVar[bool] = True

    def header(self, path: Path) -> DataHeader:
        archive = _opened(path, rows=_ROWS)
        rows = _TarRows(path, archive, [KEY, *archive.extensions])
        columns = {field.name: column_of(field.type) for field in rows.schema}
        return DataHeader(path, list(columns), columns, None)

    def rows(self, path: Path, wanted: Wanted) -> SourceRows:
        archive = _opened(path, wanted.columns)
        require_columns(wanted.columns, [KEY, *archive.extensions], str(path))
        return _TarRows(path, archive, wanted.columns)


@dataclass(frozen=True)
class _Archive:
    """data: the file that holds the bytes. members: key -> extension -> (where its bytes begin in it, and how
    many there are). folder: in which a copy is, where there is one; it goes with this object.
    """

    data: Path
    members: Mapping[str, Mapping[str, tuple[int, int]]]
    folder: Any = None

    @property
    def extensions(self) -> list[str]:
        """The extensions of all files, in sorted order."""
        return sorted({extension for each in self.members.values() for extension in each})


class _TarRows(SourceRows):
    """Rows whose files are read from the archive when they are asked for."""

    def __init__(self, path: Path, archive: _Archive, columns: list[str]) -> None:
        self._path, self._archive = path, archive
        self._keys, self._members = list(archive.members), list(archive.members.values())
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

    def column(self, name: str) -> pa.ChunkedArray:
        return pa.chunked_array([self._values(name, 0, self.count)], self.schema.field(name).type)

    def place(self, row: int) -> str:
        return f"{self._path}, {self._keys[row]}"

    def _values(self, name: str, start: int, stop: int) -> list[Any]:
        if name == KEY:
            return self._keys[start:stop]
        decode = _decoder_of(name)
        found: list[Any] = []
        with self._archive.data.open("rb") as file:
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
        of = f"the type of {name} in {self.count} rows of {Stamp.of(self._path)}"
        file = made_once(of, lambda target: _save_type(self._type_of_files(name), target))
        return self._type_of_files(name) if file is None else _saved_type(file)

    def _type_of_files(self, name: str) -> pa.DataType:
        """By a look at all of them."""
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


def _save_type(kind: pa.DataType, target: Path) -> None:
    target.write_bytes(pa.schema([("x", kind)]).serialize())


def _saved_type(file: Path) -> pa.DataType:
    return pa.ipc.read_schema(pa.py_buffer(file.read_bytes())).field("x").type


def _text(content: bytes) -> str:
    return content.decode("utf-8")


def _array(content: bytes) -> Any:
    return np.load(io.BytesIO(content), allow_pickle=False).tolist()


_DECODERS: Mapping[str, Callable[[bytes], Any]] = {
    **dict.fromkeys(("txt", "text", "caption"), _text),
    **dict.fromkeys(("cls", "cls2", "index", "id"), int),
    "json": json_value,
    "npy": _array,
}
_EXPECTED = {"cls": "a whole number", "json": "one JSON value", "npy": "an array of numbers", "txt": "UTF-8"}


def _decoder_of(extension: str) -> Callable[[bytes], Any]:
    """What makes a value of a file's bytes; those of other extensions, such as images, stay bytes."""
    return _DECODERS.get(extension.rpartition(".")[2], bytes)


def _opened(path: Path, columns: Sequence[str] | None = None, rows: int | None = None) -> _Archive:
    """An archive: of a compressed one these columns, of any the first `rows` keys. Raises DataError."""
    try:
        with errors_of_damage(path, "tar"):
            if path.suffix.lower() not in COMPRESSIONS:
                with tarfile.open(path, "r:") as archive:
                    return _Archive(path, _members(path, _places(archive), rows))
            of = f"the files {columns} of {rows} rows of {Stamp.of(path)}"
            made = made_once(of, lambda target: _copy(path, target, columns, rows))
            folder = TemporaryFolder()
            copy = Path(folder.name) / "copy"
            if made is None:
                _copy(path, copy, columns, rows)
            else:  # a name of its own, as the process that removes the other one may end before
                copy.mkdir()
                for name in (_FILES, _MEMBERS):
                    (copy / name).hardlink_to(made / name)
            return _Archive(copy / _FILES, json.loads((copy / _MEMBERS).read_text()), folder)
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise DataError(
            f"{path} can't be read as tar: {error}",
            cause="an interrupted copy or download, or another format",
        ) from error


def _copy(path: Path, folder: Path, columns: Sequence[str] | None, rows: int | None) -> None:
    """Copy what is wanted of a compressed archive into a new folder: the bytes, and where they are."""
    folder.mkdir()
    with (
        pa.input_stream(str(path)) as stream,
        tarfile.open(fileobj=stream, mode="r|") as archive,
        (folder / _FILES).open("wb") as file,
    ):
        members = _members(path, _copied(archive, file, columns), rows)
    (folder / _MEMBERS).write_text(json.dumps(members))


# The name of a file in an archive, where its bytes begin, and how many there are.
_Place = tuple[str, int, int]


def _members(path: Path, places: Iterable[_Place], rows: int | None) -> dict[str, dict[str, tuple[int, int]]]:
    """key -> extension -> (place, size), of the first `rows` keys. Raises DataError."""
    found: dict[str, dict[str, tuple[int, int]]] = {}
    for name, place, size in places:
        key, extension = _key_of(name)
        if key not in found and rows is not None and len(found) == rows:
            break
        if extension in found.setdefault(key, {}):
            raise DataError(f"{path} has two files {name}", expected="a name of its own for each file")
        found[key][extension] = place, size
    return found


def _key_of(name: str) -> tuple[str, str]:
    """(the key of the row, the extension in lower case) of a file in an archive."""
    folder, _, file = name.rpartition("/")
    base, _, extension = file.partition(".")
    return f"{folder}/{base}".removeprefix("./").lstrip("/"), extension.lower()


def _places(archive: tarfile.TarFile) -> Iterator[_Place]:
    """The places of the files in an archive that is not compressed."""
    for member in _files(archive):
        yield member.name, member.offset_data, member.size


def _copied(archive: tarfile.TarFile, file: BinaryIO, columns: Sequence[str] | None) -> Iterator[_Place]:
    """The places, in `file`, of the files of an archive that is read once. Files of these columns are copied
    into it; the others have no bytes there.
    """
    for member in _files(archive):
        place, extension = file.tell(), _key_of(member.name)[1]
        content = archive.extractfile(member)
        if content is not None and (columns is None or extension in columns):
            shutil.copyfileobj(content, file)
            if file.tell() - place != member.size:
                raise tarfile.ReadError("unexpected end of data")
        yield member.name, place, member.size


def _files(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """The files of an archive that have an extension."""
    for member in archive:
        base = member.name.rpartition("/")[2]
        if member.isfile() and "." in base and not base.startswith("."):
            yield member
