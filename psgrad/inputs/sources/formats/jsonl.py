"""Datasets in jsonl: an object a line, in UTF-8."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

from psgrad.errors import DataError
from psgrad.inputs.sources.arrow_columns import errors_of_damage
from psgrad.inputs.sources.file_checks import Wanted, text_lines
from psgrad.inputs.sources.objects import distinct_keys, header_of, object_rows, word_for
from psgrad.inputs.sources.source import DataHeader, LineSource
from psgrad.inputs.sources.source_rows import SourceRows

_ROWS = 1000  # that the header looks at


class JSONL(LineSource):
    """An object in each line; its keys are the columns. Blank lines are no rows."""

    name: ClassVar[str] = "jsonl"
    compressed: ClassVar[bool] = True

    def header(self, path: Path) -> DataHeader:
        with errors_of_damage(path, "jsonl"):
            found = [each for _, each in islice(_objects(path), _ROWS + 1)]
        return header_of(path, found[:_ROWS], len(found) if len(found) <= _ROWS else None)

    def rows(self, path: Path, wanted: Wanted) -> SourceRows:
        with errors_of_damage(path, "jsonl"):
            return object_rows(path, lambda: _objects(path), wanted, "line")


def _objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(the number of the line, counted from 1, its object) of each line that is not blank."""
    for number, line in text_lines(path):
        try:
            found = json.loads(line, object_pairs_hook=distinct_keys)
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
