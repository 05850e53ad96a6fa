"""Datasets in JSON: a list of objects in a file, or an object in each line; and lines of plain text.

JSON is read by Python's own reader: pyarrow.json takes texts that look like dates for dates, whole numbers of
more than 64 bits for fractions, and several objects in a line for several rows, and it can't read lists that
begin after a block without any.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa

from psgrad.data.columns import ColumnRoles
from psgrad.data.sources.arrow_types import errors_of_damage
from psgrad.data.sources.objects import Object, json_value, table_of, word_for
from psgrad.data.sources.source import Source
from psgrad.data.sources.text_files import open_text, text_lines
from psgrad.errors import DataError


class JSON(Source):
    """A list of objects, whose keys are the columns, or an object whose `data` is such a list."""

    name: ClassVar[str] = "json"
    compressed: ClassVar[bool] = True

    def table(self, path: Path, roles: ColumnRoles) -> pa.Table:
        found = objects(path)
        return table_of(lambda: iter(found), roles.columns, path)


def objects(path: Path) -> list[Object]:
    """The rows of a json file. Raises DataError."""
    try:
        with errors_of_damage(path, "json"), open_text(path) as file:
            found = json_value(file.read())
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
            f'{path} holds {word_for(found)}; expected a list of objects, or {{"data": [...]}} with one',
        )
    for number, each in enumerate(found):
        if not isinstance(each, dict):
            raise DataError(f"{path}, entry {number} holds {word_for(each)}; expected a list of objects")
    return found


class JSONL(Source):
    """An object in each line; its keys are the columns. Blank lines are no rows."""

    name: ClassVar[str] = "jsonl"
    compressed: ClassVar[bool] = True

    def table(self, path: Path, roles: ColumnRoles) -> pa.Table:
        return table_of(lambda: _objects_by_line(path), roles.columns, path)


def _objects_by_line(path: Path) -> Iterator[Object]:
    for number, line in text_lines(path):
        try:
            found: Any = json_value(line)
        except ValueError as error:
            raise DataError(
                f"{path}, line {number} is no JSON: {error}; expected an object in each line",
                hint="name a file of one JSON value .json",
            ) from error
        if not isinstance(found, dict):
            raise DataError(
                f"{path}, line {number} holds {word_for(found)}; expected an object {{...}} in each line"
            )
        yield found


class TXT(Source):
    """Lines of text in UTF-8, the column `text`. Blank lines are no rows."""

    name: ClassVar[str] = "txt"
    compressed: ClassVar[bool] = True

    def table(self, path: Path, roles: ColumnRoles) -> pa.Table:
        return table_of(lambda: ({"text": line} for _, line in text_lines(path)), roles.columns, path)
