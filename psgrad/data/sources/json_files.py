"""Files of text in UTF-8, compressed or not: an object in each line, a list of objects, or lines of plain
text. The types of the columns are found in the rows. No torch.

JSON is read by Python's own reader: pyarrow.json takes texts that look like dates for dates, whole numbers of
more than 64 bits for fractions, and several objects in a line for several rows, and it can't read lists that
begin after a block without any.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import pyarrow as pa

from psgrad.config.data import COMPRESSIONS, data_format
from psgrad.data.columns import ColumnRoles, require_columns
from psgrad.data.sources.arrow_types import common_schema, errors_of_damage
from psgrad.data.sources.table_rows import mapped
from psgrad.errors import DataError
from psgrad.wording import first_line

Object = dict[str, Any]
LONGEST_LINE = 1 << 26
"""Characters of a line of text: an image of 48 MB in base64 fits."""
_ROWS, _BYTES = 4096, 1 << 24  # of a part, at most


def read_jsonl(path: Path, roles: ColumnRoles) -> pa.Table:
    """The columns of an object in each line. Raises ConfigError and DataError."""
    return _table_of(lambda: objects_by_line(path), roles.columns, path)


def read_json(path: Path, roles: ColumnRoles) -> pa.Table:
    """The columns of a list of objects. Raises ConfigError and DataError."""
    found = objects(path)
    return _table_of(lambda: iter(found), roles.columns, path)


def read_txt(path: Path, roles: ColumnRoles) -> pa.Table:
    """The lines of a file as the column `text`. Raises ConfigError and DataError."""
    return _table_of(lambda: ({"text": line} for _, line in text_lines(path)), roles.columns, path)


# -- lines and objects ---------------------------------------------------------------------------------------


def open_text(path: Path) -> TextIO:
    """A file of text in UTF-8, decompressed where its suffix says that it is compressed."""
    if path.suffix.lower() not in COMPRESSIONS:
        return path.open(encoding="utf-8-sig", newline="")
    return io.TextIOWrapper(pa.input_stream(str(path)), encoding="utf-8-sig", newline="")


def lines_of(path: Path, file: TextIO) -> Iterator[str]:
    """The lines of an open file of text, with their ends. Raises DataError for bytes that are not UTF-8 and
    for a line that is too long: a small compressed file may hold a line that no memory has room for.
    """
    number = 0
    try:
        while line := file.readline(LONGEST_LINE + 1):
            number += 1
            if len(line) > LONGEST_LINE:
                raise DataError(
                    f"line {number} of {path} has more than {LONGEST_LINE:,} characters",
                    hint="put a row in each line, or save larger values as parquet",
                )
            yield line
    except UnicodeDecodeError as error:
        raise not_utf8(path, error) from error


def text_lines(path: Path) -> Iterator[tuple[int, str]]:
    """(number from 1, text) of each line that is not blank. Raises DataError."""
    with open_text(path) as file:
        for number, line in enumerate(lines_of(path, file), 1):
            if not line.isspace():
                yield number, line.rstrip("\r\n")


def not_utf8(path: Path, error: Exception) -> DataError:
    """The error for a file of text that is not in UTF-8."""
    return DataError(
        f"{path} can't be read as text: {error}; expected text in UTF-8",
        hint="convert it, such as with: iconv -f LATIN1 -t UTF-8 (Excel's Unicode text is UTF-16)",
    )


def objects(path: Path) -> list[Object]:
    """The rows of a json file: a list of objects, or an object whose `data` is one. Raises DataError."""
    try:
        with errors_of_damage(path, "json"), open_text(path) as file:
            found = _value(file.read())
    except ValueError as error:
        several = "Extra data" in str(error)
        raise DataError(
            f"{path} is no JSON: {error}; expected a list of objects",
            hint="with an object in each line, name the file .jsonl" if several else None,
        ) from error
    if isinstance(found, dict):
        found = found.get("data", found)
    if not isinstance(found, list):
        raise DataError(
            f'{path} holds {_word_for(found)}; expected a list of objects, or {{"data": [...]}} with one',
        )
    for number, each in enumerate(found):
        if not isinstance(each, dict):
            raise DataError(f"{path}, entry {number} holds {_word_for(each)}; expected a list of objects")
    return found


def objects_by_line(path: Path) -> Iterator[Object]:
    """The rows of a jsonl file. Raises DataError."""
    for number, line in text_lines(path):
        try:
            found: Any = _value(line)
        except ValueError as error:
            raise DataError(
                f"{path}, line {number} is no JSON: {error}; expected an object in each line",
                hint="name a file of one JSON value .json",
            ) from error
        if not isinstance(found, dict):
            raise DataError(
                f"{path}, line {number} holds {_word_for(found)}; expected an object {{...}} in each line"
            )
        yield found


def _value(text: str) -> Any:
    """The value of a text in JSON. Raises ValueError for another text, for a key that comes twice in an
    object, and for values that are nested too deeply.
    """
    try:
        return json.loads(text, object_pairs_hook=_distinct_keys)
    except RecursionError as error:
        raise ValueError("lists or objects are nested too deeply, hundreds in each other") from error


def _distinct_keys(pairs: list[tuple[str, Any]]) -> Object:
    """The object of these keys and values. Raises ValueError for a key that comes twice, of which json would
    take the last.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} comes twice")
    return found


def _word_for(value: object) -> str:
    """What a JSON value is, in words."""
    words = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return words.get(type(value), "a number")


# -- tables --------------------------------------------------------------------------------------------------


class _WiderTypes(Exception):
    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema


def _table_of(objects: Callable[[], Iterator[Object]], columns: Sequence[str], path: Path) -> pa.Table:
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
        needed = common_schema([(f"{path}, rows 0 to {max(0, first - 1)}", schema), (where, own)])
        if needed != schema:
            raise _WiderTypes(needed)
        cast = [array.cast(field.type) for array, field in zip(arrays, schema, strict=True)]
        yield pa.record_batch(cast, schema=schema)
        first += len(part)


def _parts(objects: Iterator[Object], columns: Sequence[str]) -> Iterator[list[Object]]:
    """The objects in lists that memory has room for."""
    part: list[Object] = []
    size = 0
    for each in objects:
        part.append(each)
        values = (each.get(name) for name in columns)
        size += sum(len(value) for value in values if isinstance(value, str))
        if len(part) == _ROWS or size > _BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


def _array(values: list[Any], name: str, where: str) -> pa.Array:
    try:
        return pa.array(values)
    except (OverflowError, UnicodeEncodeError, pa.ArrowException) as error:
        wrong = "has mixed types"
        if isinstance(error, OverflowError):
            wrong = "holds more than a 64-bit signed integer can"
        elif isinstance(error, UnicodeEncodeError):
            wrong = "holds half of a character (\\ud800 to \\udfff), such as of an emoji that was cut"
        raise DataError(
            f"the column {name!r} {wrong}: {where}: {first_line(error)}",
            hint="convert the column to one type before it is saved" if "mixed" in wrong else None,
        ) from error
