"""Lines of rows, against a count of the lines that are there."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from psgrad.data.sources.csv_files import csv_lines

CELLS = st.text(alphabet='ab,"\n é', max_size=6)


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_csv_lines_quoted_line_ends(tmp_path: Path, end: str) -> None:
    file = tmp_path / "data.csv"
    text = 'id,text\na,plain\nb,"two\nlines"\n\nc,"a ""quote"""\nd,last\n'
    file.write_bytes(text.replace("\n", end).encode())
    assert csv_lines(file, [3, 0, 1, 2, 9]) == {0: 2, 1: 3, 2: 6, 3: 7}


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_csv_lines_blank_lines(tmp_path: Path, end: str) -> None:
    file = tmp_path / "data.csv"
    file.write_bytes("id,x\na,1\n\n\nb,2\nc,3".replace("\n", end).encode())
    assert csv_lines(file, range(4)) == {0: 2, 1: 5, 2: 6}


@given(rows=st.lists(st.tuples(CELLS, CELLS), min_size=1, max_size=8))
def test_csv_lines_random_files(
    rows: list[tuple[str, str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("lines") / "data.csv"
    text, starts = "id,x\n", []
    for row in rows:
        starts.append(text.count("\n") + 1)
        line = io.StringIO()
        csv.writer(line, lineterminator="\n").writerow(row)
        text += line.getvalue()
    file.write_bytes(text.encode())
    assert csv_lines(file, range(len(rows))) == dict(enumerate(starts))


def test_csv_lines_quote_inside_cell(tmp_path: Path) -> None:
    file = tmp_path / "data.csv"
    file.write_text('id,x\na,5" pipe\nb,2\nc,3\n')
    assert csv_lines(file, [2]) == {2: 4}


def test_csv_lines_long_cell(tmp_path: Path) -> None:
    limit = csv.field_size_limit()
    file = tmp_path / "data.csv"
    file.write_text(f'id,x\na,"{"x" * 200_000}"\nb,2\n')
    assert csv_lines(file, [1]) == {1: 3}
    assert csv.field_size_limit() == limit
