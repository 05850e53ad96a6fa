"""JSON objects as Arrow tables: the types of the columns are found in the rows. No torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa

from psgrad.data.sources.arrow_columns import merged_type, mixed_types
from psgrad.data.sources.file_checks import Wanted, require_columns
from psgrad.data.sources.source import Column, DataHeader, column_of
from psgrad.data.sources.source_rows import MappedRows, RowNumbers
from psgrad.errors import DataError

Object = dict[str, Any]
_ROWS_PER_PART = 4096


def object_rows(
    path: Path, objects: Callable[[], Iterable[tuple[int, Object]]], wanted: Wanted, unit: str
) -> MappedRows:
    """The wanted columns of a file of objects, in a memory-mapped table in the temporary folder.

    A key that an object lacks is an empty cell. The types are those of the first part; where a later one
    holds more (fractions after whole numbers), the objects are read anew.

    Args:
        objects: reads the file from its beginning: (the number for messages, an object) of each row.
        unit: what that number counts, such as line.

    Raises ConfigError for a column that no object has, DataError for a column of mixed types.
    """
    known: dict[str, int] = {}
    schema = pa.schema([(name, pa.null()) for name in wanted.columns])
    while True:
        numbers = RowNumbers(path, unit)
        try:
            parts = _parts(objects(), schema, numbers, known)
            rows = MappedRows(schema, parts, [path], numbers)
        except _OtherSchema as found:
            schema = found.schema
            continue
        if rows.count:
            require_columns(wanted.columns, list(known), str(path))
        return rows


class _OtherSchema(Exception):
    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema


_Place = Callable[[int], str]
"""Where a row is, for messages."""


def table_of(objects: Sequence[Object], first: int, named: str) -> pa.Table:
    """Some objects as a table of their own types. first: the number of the first one in what is `named`.
    Raises DataError for a column of mixed types.
    """
    names = list(dict.fromkeys(name for each in objects for name in each))
    place = f"{named}, row {{}}".format
    return pa.table(
        {name: _column([each.get(name) for each in objects], name, first, place) for name in names}
    )


def _parts(
    objects: Iterable[tuple[int, Object]], schema: pa.Schema, numbers: RowNumbers, known: dict[str, int]
) -> Iterator[pa.Table]:
    """Tables of this schema. `known` gets the first row that has each key. Raises _OtherSchema."""
    left = iter(objects)
    first = 0
    while part := list(islice(left, _ROWS_PER_PART)):
        numbers.add([number for number, _ in part])
        for row, (_, each) in enumerate(part, first):
            for name in each.keys() - known:
                known[name] = row
        columns = [
            _column([each.get(name) for _, each in part], name, first, numbers.place) for name in schema.names
        ]
        kinds = [
            (field.name, _merged(field, array, known, first, numbers))
            for field, array in zip(schema, columns, strict=True)
        ]
        if (needed := pa.schema(kinds)) != schema:
            raise _OtherSchema(needed)
        arrays = [array.cast(kind) for array, (_, kind) in zip(columns, kinds, strict=True)]
        yield pa.Table.from_arrays(arrays, schema=schema)
        first += len(part)


def _merged(
    field: pa.Field, array: pa.Array, known: dict[str, int], first: int, numbers: RowNumbers
) -> pa.DataType:
    """The type of this part of a column and of the parts before. Raises DataError where there is none."""
    merged = merged_type(field.type, array.type)
    if merged is None:
        row = next(row for row in range(len(array)) if array[row].is_valid)
        raise mixed_types(
            field.name,
            (numbers.place(known[field.name]), field.type),
            (numbers.place(first + row), array.type),
        )
    return merged


def _column(values: list[Any], name: str, first: int, place: _Place) -> pa.Array:
    try:
        return pa.array(values)
    except OverflowError as error:
        row = next(row for row, value in enumerate(values) if _raises(value, OverflowError))
        raise DataError(
            f"{name!r} holds {values[row]} in {place(first + row)}, more than a 64-bit signed integer can"
        ) from error
    except UnicodeEncodeError as error:
        raise _half_character(values, name, first, place) from error
    except pa.ArrowException as error:
        raise _mixed_rows(values, name, first, place) from error


def _raises(value: Any, kind: type[Exception]) -> bool:
    """Whether Arrow has this kind of error for a value by itself."""
    try:
        pa.array([value])
    except (OverflowError, UnicodeEncodeError, pa.ArrowException) as error:
        return isinstance(error, kind)
    return False


def _half_character(values: list[Any], name: str, first: int, place: _Place) -> DataError:
    """The error for a column with a text that no file in UTF-8 can hold, with its row."""
    row = next(row for row, value in enumerate(values) if _raises(value, UnicodeEncodeError))
    return DataError(
        f"{name!r} holds half of a character in {place(first + row)}: an escape from \\ud800 to"
        " \\udfff without its other half",
        expected="texts of whole Unicode characters",
        cause="a text that was cut in the middle of a character, such as an emoji",
        next_step="correct the text, or remove the row",
    )


def _mixed_rows(values: list[Any], name: str, first: int, place: _Place) -> DataError:
    """The error for a part of a column that has no one type, with the first two rows that differ."""
    seen: list[tuple[int, pa.DataType]] = []
    for row, value in enumerate(values):
        try:
            kind = pa.array([value]).type
        except UnicodeEncodeError:
            return _half_character(values, name, first, place)
        except pa.ArrowException as error:  # a list of different things
            return DataError(
                f"{name!r} holds a list of mixed types in {place(first + row)}: {error}",
                expected="one type in all lists",
            )
        for other, before in seen:
            if merged_type(before, kind) is None:
                return mixed_types(name, (place(first + other), before), (place(first + row), kind))
        if all(kind != before for _, before in seen):
            seen.append((row, kind))
    raise AssertionError("a column that Arrow refuses has two rows that differ")


def header_of(path: Path, objects: Sequence[Object], rows: int | None) -> DataHeader:
    """The facts about a file from its first objects; `rows` is None where there are more."""
    names = list(dict.fromkeys(name for each in objects for name in each))
    place = f"{path}, row {{}}".format
    columns, unusable = {}, {}
    for name in names:
        try:
            columns[name] = column_of(_column([each.get(name) for each in objects], name, 0, place).type)
        except DataError as error:
            columns[name], unusable[name] = Column(None, "mixed"), error
    return DataHeader(path, names, columns, rows, unusable=unusable)


def distinct_keys(pairs: list[tuple[str, Any]]) -> Object:
    """The object of these keys and values, for `object_pairs_hook`. Raises ValueError for a key that comes
    twice, of which json would take the last.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} comes twice")
    return found


def json_value(text: str | bytes) -> Any:
    """The value of a text in JSON. Raises ValueError for another text, for a key that comes twice in an
    object, and for values that are nested too deeply.
    """
    try:
        return json.loads(text, object_pairs_hook=distinct_keys)
    except RecursionError as error:
        raise ValueError("lists or objects are nested too deeply, hundreds in each other") from error


def word_for(value: object) -> str:
    """What a JSON value is, in words."""
    words = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return words.get(type(value), "a number")
