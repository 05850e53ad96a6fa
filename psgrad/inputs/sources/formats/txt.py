"""Datasets in txt: a row a line."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from psgrad.inputs.sources.arrow_columns import errors_of_damage
from psgrad.inputs.sources.file_checks import Wanted, text_lines
from psgrad.inputs.sources.objects import object_rows
from psgrad.inputs.sources.source import Column, DataHeader, LineSource
from psgrad.inputs.sources.source_rows import SourceRows

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
