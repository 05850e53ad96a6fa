"""Files of text in UTF-8, line by line, compressed or not. No torch."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pyarrow as pa

from psgrad.config.data import COMPRESSIONS
from psgrad.errors import DataError

LONGEST_LINE = 1 << 26
"""Characters of a line of text: an image of 48 MB in base64 fits."""


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
