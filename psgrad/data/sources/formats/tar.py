"""Datasets in tar, as WebDataset writes them: the files of a name are a row, their extensions the columns.

The wanted columns are copied into a file in the temporary folder, where rows can be read in any order.
"""

from __future__ import annotations

import io
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from psgrad.data.columns import ColumnRoles
from psgrad.data.sources.objects import Object, json_value, table_of
from psgrad.data.sources.source import Source
from psgrad.errors import DataError, one_line

KEY = "__key__"


class Tar(Source):
    """Files of one name in a row, such as 000017.jpg and 000017.cls; `__key__` is the name."""

    name: ClassVar[str] = "tar"
    compressed: ClassVar[bool] = True

    def table(self, path: Path, roles: ColumnRoles) -> pa.Table:
        try:
            return table_of(lambda: _rows(path, roles.columns), roles.columns, path)
        except (tarfile.TarError, EOFError, zlib.error) as error:
            raise DataError(
                f"{path} can't be read as tar: {error}",
                hint="an interrupted copy or download, or another format",
            ) from error


def _rows(path: Path, columns: list[str]) -> Iterator[Object]:
    """The rows, with the values of these columns; others are there without a value. Raises DataError."""
    seen: set[str] = set()
    row: Object = {}
    with pa.input_stream(str(path)) as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            folder, _, file = member.name.rpartition("/")
            base, dot, extension = file.partition(".")
            if not member.isfile() or not dot or not base:
                continue
            key, extension = f"{folder}/{base}".removeprefix("./").lstrip("/"), extension.lower()
            if row.get(KEY) != key:
                if row:
                    yield row
                if key in seen:
                    raise DataError(
                        f"the files {key}.* in {path} are not next to each other",
                        hint="write the archive in the order of the names: tar --sort=name",
                    )
                seen.add(key)
                row = {KEY: key}
            if extension in row:
                raise DataError(
                    f"{path} has two files {member.name}; expected a name of its own for each file"
                )
            wanted = extension in columns
            row[extension] = _value(archive, member, extension, path) if wanted else None
    if row:
        yield row


def _value(archive: tarfile.TarFile, member: tarfile.TarInfo, extension: str, path: Path) -> Any:
    """The value of a file; of an extension that is not known, such as an image's, its bytes."""
    file = archive.extractfile(member)
    content = b"" if file is None else file.read()
    if len(content) < member.size:
        raise tarfile.ReadError("unexpected end of data")
    kind = extension.rpartition(".")[2]
    try:
        return _DECODERS[kind](content) if kind in _DECODERS else content
    except (ValueError, EOFError) as error:
        raise DataError(
            one_line(
                f"the file {member.name} in {path} can't be read: {error}",
                "expected " + (_EXPECTED.get(kind, "another content")),
            )
        ) from error


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
