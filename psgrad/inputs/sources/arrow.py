"""Columns of Arrow tables: their types, and errors of damaged files. No torch."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from psgrad.errors import DataError
from psgrad.inputs.sources.files import not_numbers


def is_list(kind: pa.DataType) -> bool:
    """Whether a column holds lists."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def require_numbers(name: str, kind: pa.DataType) -> pa.DataType:
    """The type of the numbers in a column of numbers or of lists of them. Raises DataError where it holds
    something else.
    """
    value = kind
    while is_list(value):
        value = value.value_type
    if pa.types.is_dictionary(value):
        value = value.value_type
    if not (pa.types.is_integer(value) or pa.types.is_floating(value) or pa.types.is_boolean(value)):
        raise not_numbers(name, kind)
    return value


@contextmanager
def damage_told(path: Path, kind: str) -> Iterator[None]:
    """What Arrow says of a damaged file is told as DataError."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DataError(
                f"the temporary folder {tempfile.gettempdir()} has no room for {path}, converted",
                next_step=(
                    "set TMPDIR to a folder with as much room as the file takes, or save the data as parquet"
                ),
            ) from error
        reason = next(iter(str(error).splitlines()), "")
        raise DataError(
            f"{path} can't be read as {kind}: {reason}",
            cause="an interrupted copy or download, or another format",
        ) from error


def plain(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """A column as one array, without categories."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array
