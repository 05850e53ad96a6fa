"""Types of Arrow columns, in words and joined, and errors of damaged files. No torch."""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa

from psgrad.data.columns import not_numbers
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
                hint="set TMPDIR to a folder with room for the file, or save the data as parquet",
            ) from error
        raise DataError(
            f"{path} can't be read as {kind}: {first_line(error)}",
            hint="an interrupted copy or download, or another format",
        ) from error


def is_text(kind: pa.DataType) -> bool:
    """Whether a column holds text."""
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def is_bytes(kind: pa.DataType) -> bool:
    """Whether a column holds bytes."""
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def common_schema(schemas: Sequence[tuple[object, pa.Schema]], texts: Iterable[str] = ()) -> pa.Schema:
    """The schema to which tables can be converted without loss: whole numbers and fractions are fractions,
    an empty column is of the type of the others.

    Args:
        schemas: (where, schema) of each table; `where` is for messages.
        texts: columns that are text in all tables where they are text in one.

    Raises DataError where a column holds different things in two tables.
    """
    found: dict[str, tuple[object, pa.DataType]] = {}
    for where, schema in schemas:
        for field in schema:
            first, before = found.setdefault(field.name, (where, field.type))
            merged = merged_type(before, field.type)
            if merged is None and field.name in texts and (is_text(before) or is_text(field.type)):
                merged = pa.string()
            if merged is None:
                raise DataError(
                    f"the column {field.name!r} has mixed types: {before} in {first}, {field.type} in"
                    f" {where}",
                    hint="convert the column to one type before it is saved",
                )
            found[field.name] = (where if pa.types.is_null(before) else first), merged
    return pa.schema([(name, kind) for name, (_, kind) in found.items()])


def merged_type(one: pa.DataType, other: pa.DataType) -> pa.DataType | None:
    """The type that holds what either of two holds; None where there is none."""
    if one == other:
        return one
    if is_text(one) and is_text(other):
        return pa.string()
    if is_bytes(one) != is_bytes(other) and pa.null() not in (one, other):
        return None  # Arrow makes bytes of text
    if pa.types.is_fixed_size_list(one) and pa.types.is_fixed_size_list(other):
        inner = merged_type(one.value_type, other.value_type)
        return None if inner is None or one.list_size != other.list_size else pa.list_(inner, one.list_size)
    if pa.uint64() in (one, other) and pa.null() not in (one, other):
        return None  # Arrow makes fractions of them, or numbers of fewer bits
    try:
        schemas = [pa.schema([("x", kind)]) for kind in (one, other)]
        return pa.unify_schemas(schemas, promote_options="permissive").field("x").type
    except pa.ArrowException:
        return None
