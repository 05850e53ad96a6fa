"""The lines of a csv file in which rows begin: quoted cells may hold line ends, blank lines are not rows."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np

_BLOCK = 8 << 20


def csv_lines(path: Path, rows: Iterable[int]) -> dict[int, int]:
    """row -> the line in which it begins, for rows from 0 below the header and lines from 1. Rows beyond the
    end are left out.

    Raises OSError.
    """
    wanted = sorted(set(rows))
    if not wanted:
        return {}
    return _by_line_ends(path, wanted) if _is_plain(path) else _by_cells(path, wanted)


def _is_plain(path: Path) -> bool:
    """Whether every line end ends a row: no quotes, and no carriage return by itself."""
    with path.open("rb") as file:
        last = b""
        while block := file.read(_BLOCK):
            text = last + block
            if b'"' in block or text.count(b"\r", 0, len(text) - 1) != text.count(b"\r\n"):
                return False
            last = b"\r" if block.endswith(b"\r") else b""
    return last == b""


def _by_line_ends(path: Path, wanted: list[int]) -> dict[int, int]:
    starts = []  # of each block: the numbers of its lines that are not blank
    line, length = 1, 0  # of the line that goes on from the block before
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            ends = np.flatnonzero(np.frombuffer(block.replace(b"\r", b""), np.uint8) == ord("\n"))
            lengths = np.diff(ends, prepend=-1 - length) - 1
            starts.append(line + np.flatnonzero(lengths > 0))
            line += len(ends)
            size = len(block) - block.count(b"\r")
            length = size - 1 - int(ends[-1]) if len(ends) else length + size
    starts.append(np.array([line] if length else [], dtype=int))
    lines = np.concatenate(starts)[1:]  # without the header
    return {row: int(lines[row]) for row in wanted if row < len(lines)}


def _by_cells(path: Path, wanted: list[int]) -> dict[int, int]:
    result: dict[int, int] = {}
    limit = csv.field_size_limit(sys.maxsize)
    try:
        with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
            reader = csv.reader(file)
            row, begin, remaining = -1, 1, iter(wanted)
            next_row = next(remaining, None)
            for cells in reader:
                if cells:  # a blank line is no row
                    if row == next_row:
                        result[row] = begin
                        next_row = next(remaining, None)
                        if next_row is None:
                            break
                    row += 1
                begin = reader.line_num + 1
    except csv.Error:
        pass  # the lines so far are right
    finally:
        csv.field_size_limit(limit)
    return result
