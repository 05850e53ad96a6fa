"""Rows in text files that give them no types: json, a list of objects, read at once (larger ones are better
saved as jsonl); jsonl, an object a line; and txt, a row a line. All are in UTF-8.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from psgrad.data.sources.arrow_columns import errors_of_damage
from psgrad.data.sources.file_checks import Wanted, open_text, text_lines
from psgrad.data.sources.objects import header_of, json_value, object_rows, word_for
from psgrad.data.sources.source import Column, DataHeader, LineSource, TableSource
from psgrad.data.sources.source_rows import SourceRows
from psgrad.errors import DataError


class JSON(TableSource):
    """A list of objects, whose keys are the columns, or an object whose `data` is such a list."""

    name: ClassVar[str] = "json"
    compressed: ClassVar[bool] = True

    def header(self, path: Path) -> DataHeader:
        found = objects(path)
        return header_of(path, found, len(found))

    def rows(self, path: Path, wanted: Wanted) -> SourceRows:
        found = objects(path)
        with errors_of_damage(path, "json"):
            return object_rows(path, lambda: enumerate(found), wanted, "entry")


def objects(path: Path) -> list[dict[str, Any]]:
    """The rows of a json file. Raises DataError."""
    try:
        with errors_of_damage(path, "json"), open_text(path) as file:
            found = json_value(file.read())
    except ValueError as error:
        several = "Extra data" in str(error)
        raise DataError(
            f"{path} is no JSON: {error}",
            expected="a list of objects",
            cause="an object in each line: name the file .jsonl"
            if several
            else "a file that was cut, or an object with a key twice",
        ) from error
    if isinstance(found, dict):
        found = found.get("data", found)
    if not isinstance(found, list):
        raise DataError(
            f"{path} holds {word_for(found)}", expected='a list of objects, or {"data": [...]} with one'
        )
    for number, each in enumerate(found):
        if not isinstance(each, dict):
            raise DataError(f"{path}, entry {number} holds {word_for(each)}", expected="a list of objects")
    return found


_ROWS = 1000  # that the header looks at


class JSONL(LineSource):
    """An object in each line; its keys are the columns. Blank lines are no rows."""

    name: ClassVar[str] = "jsonl"
    compressed: ClassVar[bool] = True

    def header(self, path: Path) -> DataHeader:
        with errors_of_damage(path, "jsonl"):
            found = [each for _, each in islice(_objects_by_line(path), _ROWS + 1)]
        return header_of(path, found[:_ROWS], len(found) if len(found) <= _ROWS else None)

    def rows(self, path: Path, wanted: Wanted) -> SourceRows:
        with errors_of_damage(path, "jsonl"):
            return object_rows(path, lambda: _objects_by_line(path), wanted, "line")


def _objects_by_line(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(the number of the line, counted from 1, its object) of each line that is not blank."""
    for number, line in text_lines(path):
        try:
            found = json_value(line)
        except ValueError as error:
            raise DataError(
                f"{path}, line {number} is no JSON: {error}",
                expected="an object in each line",
                cause="a file of one JSON value (name it .json), a line that was cut, or an object with a key"
                " twice",
            ) from error
        if not isinstance(found, dict):
            raise DataError(
                f"{path}, line {number} holds {word_for(found)}", expected="an object {...} in each line"
            )
        yield number, found


COLUMN = "text"


class TXT(LineSource):
    """Lines of text in UTF-8, the column `text`. Blank lines are no rows."""

    name: ClassVar[str] = "txt"
    compressed: ClassVar[bool] = True

    def header(self, path: Path) -> DataHeader:
        return DataHeader(path, [COLUMN], {COLUMN: Column("text", "text")}, None)

    def rows(self, path: Path, wanted: Wanted) -> SourceRows:
        with errors_of_damage(path, "text"):
            return object_rows(
                path, lambda: ((number, {COLUMN: line}) for number, line in text_lines(path)), wanted, "line"
            )
