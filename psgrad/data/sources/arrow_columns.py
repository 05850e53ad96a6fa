"""Columns of Arrow tables: their types, and errors of damaged files. No torch."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from psgrad.data.sources.file_checks import not_numbers
from psgrad.errors import DataError
from psgrad.wording import first_line


def is_list(kind: pa.DataType) -> bool:
    """Whether a column holds lists."""
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def require_numbers(name: str, kind: pa.DataType) -> pa.DataType:
    """The type of the numbers in a column of numbers or of lists of them. Raises DataError for another."""
    value = kind
    while is_list(value):
        value = value.value_type
    value = plain_type(value)
    if not (pa.types.is_integer(value) or pa.types.is_floating(value) or pa.types.is_boolean(value)):
        raise not_numbers(name, kind)
    return value


@contextmanager
def errors_of_damage(path: Path, kind: str) -> Iterator[None]:
    """Arrow's errors about a damaged file become DataError."""
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
        raise DataError(
            f"{path} can't be read as {kind}: {first_line(error)}",
            cause="an interrupted copy or download, or another format",
        ) from error


def plain(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """A column as one array, without categories."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    return array.dictionary_decode() if pa.types.is_dictionary(array.type) else array


def plain_type(kind: pa.DataType) -> pa.DataType:
    """The type of a column's values, without categories."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def kind_of(kind: pa.DataType) -> str:
    """What a column holds, in a word."""
    if is_list(kind):
        return f"lists of {kind_of(kind.value_type)}"
    if pa.types.is_dictionary(kind):
        return kind_of(kind.value_type)
    words = {
        "nothing": pa.types.is_null,
        "true and false": pa.types.is_boolean,
        "whole numbers": pa.types.is_integer,
        "fractions": pa.types.is_floating,
        "text": is_text,
        "bytes": is_bytes,
        "objects": pa.types.is_struct,
    }
    return next((word for word, holds in words.items() if holds(kind)), str(kind))


def is_text(kind: pa.DataType) -> bool:
    """Whether a column holds text."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def is_bytes(kind: pa.DataType) -> bool:
    """Whether a column holds bytes."""
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def common_schema(schemas: Sequence[tuple[str, pa.Schema]], texts: Iterable[str] = ()) -> pa.Schema:
    """The schema to which tables can be converted without loss: whole numbers and fractions are fractions,
    an empty column is of the type of the others.

    Args:
        schemas: (where, schema) of each table; `where` is for messages.
        texts: columns that are text in all tables where they are text in one.

    Raises DataError where a column holds different things in two tables.
    """
    if not schemas:
        return pa.schema([])
    kinds = {
        name: [(where, schema.field(name).type) for where, schema in schemas] for name in schemas[0][1].names
    }
    return pa.schema([(name, _common_type(name, each, texts)) for name, each in kinds.items()])


def _common_type(
    name: str, kinds: Sequence[tuple[str, pa.DataType]], texts: Iterable[str] = ()
) -> pa.DataType:
    if name in texts and any(is_text(kind) for _, kind in kinds):
        return pa.string()
    found = pa.null()
    for where, kind in kinds:
        merged = merged_type(found, kind)
        if merged is None:
            before = next(other for other in kinds if merged_type(other[1], kind) is None)
            raise mixed_types(name, before, (where, kind))
        found = merged
    return found


def merged_type(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """The type that holds what either of two holds; None where there is none."""
    plain_types = [plain_type(one), plain_type(other)]
    if is_text(plain_types[0]) and is_text(plain_types[1]):
        return pa.string()
    if is_bytes(plain_types[0]) != is_bytes(plain_types[1]) and pa.null() not in plain_types:
        return None  # Arrow makes bytes of text
    try:
        schemas = [pa.schema([("x", kind)]) for kind in plain_types]
        return pa.unify_schemas(schemas, promote_options="permissive").field("x").type
    except pa.ArrowException:
        return None


def mixed_types(name: str, one: tuple[str, pa.DataType], other: tuple[str, pa.DataType]) -> DataError:
    """The error for a column that holds one thing in one place and another in another."""
    return DataError(
        f"the column {name!r} has mixed types: {kind_of(one[1])} in {one[0]}, {kind_of(other[1])} in"
        f" {other[0]}",
        expected="one type in all rows",
        next_step="convert the column to one type before it is saved",
    )
