"""Objects, as JSON has them, as Arrow tables: the types of the columns are found in the rows. No torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from psgrad.config.data import data_format
from psgrad.data.columns import require_columns
from psgrad.data.sources.arrow_types import common_schema, errors_of_damage
from psgrad.data.sources.table_rows import mapped
from psgrad.errors import DataError
from psgrad.wording import first_line

Object = dict[str, Any]
_ROWS, _BYTES = 4096, 1 << 24  # of a part, at most


class _WiderTypes(Exception):
    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema


def table_of(objects: Callable[[], Iterator[Object]], columns: Sequence[str], path: Path) -> pa.Table:
    """Some columns of a file of objects. A key that an object lacks is an empty cell.

    The types are those of the first part; where a later one holds more (fractions after whole numbers), the
    objects are read anew. objects: reads the file from its beginning.

    Raises ConfigError for a column that no object has, DataError for a column of mixed types.
    """
    schema = pa.schema([(name, pa.null()) for name in columns])
    known: dict[str, None] = {}
    with errors_of_damage(path, data_format(path)):
        while True:
            try:
                found = mapped(schema, _batches(objects(), schema, known, path))
                break
            except _WiderTypes as wider:
                schema = wider.schema
    if found.num_rows:
        require_columns(columns, list(known), path)
    return found


def _batches(
    objects: Iterator[Object], schema: pa.Schema, known: dict[str, None], path: Path
) -> Iterator[pa.RecordBatch]:
    """The columns of a schema in parts. `known` gets the keys. Raises _WiderTypes for another schema."""
    first = 0
    for part in _parts(objects, schema.names):
        for each in part:
            if not known.keys() >= each.keys():
                known.update(dict.fromkeys(each))
        where = f"{path}, rows {first} to {first + len(part) - 1}"
        arrays = [_array([each.get(name) for each in part], name, where) for name in schema.names]
        own = pa.schema([(name, array.type) for name, array in zip(schema.names, arrays, strict=True)])
        before = f"{path}, rows 0 to {first - 1}"
        needed = own if first == 0 and _is_empty(schema) else common_schema([(before, schema), (where, own)])
        if needed != schema:
            raise _WiderTypes(needed)
        cast = [array.cast(field.type) for array, field in zip(arrays, schema, strict=True)]
        yield pa.record_batch(cast, schema=schema)
        first += len(part)


def _is_empty(schema: pa.Schema) -> bool:
    return all(pa.types.is_null(field.type) for field in schema)


def _parts(objects: Iterator[Object], columns: Sequence[str]) -> Iterator[list[Object]]:
    """The objects in lists that memory has room for."""
    part: list[Object] = []
    size = 0
    for each in objects:
        part.append(each)
        values = (each.get(name) for name in columns)
        size += sum(len(value) for value in values if isinstance(value, str | bytes))
        if len(part) == _ROWS or size > _BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


def _array(values: list[Any], name: str, where: str) -> pa.Array:
    try:
        return pa.array(values)
    except OverflowError as error:
        reason = "holds more than a 64-bit signed integer can"
        raise DataError(f"the column {name!r} {reason}: {where}") from error
    except UnicodeEncodeError as error:
        raise DataError(
            f"the column {name!r} holds half of a character (\\ud800 to \\udfff): {where}",
            hint="correct the text, which was cut inside of an emoji or the like, or remove the row",
        ) from error
    except pa.ArrowException as error:
        raise DataError(
            f"the column {name!r} has mixed types: {where}: {first_line(error)}",
            hint="convert the column to one type before it is saved",
        ) from error


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
