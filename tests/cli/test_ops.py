"""`psgrad ops`: the same table in each format, and what a pattern leaves of it."""

from __future__ import annotations

import csv
import io
import json

import pytest

from psgrad.cli import main
from psgrad.engine.transforms.rules.registry import Coverage, coverage


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """ops(*arguments) runs the command: exit code, stdout, stderr."""

    def run(*arguments: str) -> tuple[object, str, str]:
        monkeypatch.setattr("sys.argv", ["psgrad", "ops", *arguments])
        with pytest.raises(SystemExit) as leave:
            main()
        return leave.value.code, *capsys.readouterr()

    return run


def rows_of(style: str, text: str) -> list[tuple[str, ...]]:
    """What the command printed, heading first."""
    if style == "json":
        records = json.loads(text)
        return [tuple(records[0]), *(tuple(record.values()) for record in records)]
    if style == "csv":
        return [tuple(row) for row in csv.reader(io.StringIO(text))]
    lines = text.splitlines()
    if style == "markdown":
        cells = [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]
        return [cells[0], *cells[2:]]
    return [tuple(part for part in (cell.strip() for cell in line.split("  ")) if part) for line in lines]


@pytest.mark.parametrize("style", ["terminal", "json", "csv", "markdown"])
def test_each_format_has_the_whole_table(ops, style: str) -> None:
    code, out, err = ops("--format", style)
    assert code == 0
    assert rows_of(style, out) == [Coverage._fields, *coverage()]
    assert err.startswith(f"{len(coverage()):,} operators; VJP: ")


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("aten::sin", {"aten::sin", "aten::sinc", "aten::sinh"}),
        ("*.Tensor_mode", {"aten::div.Tensor_mode", "aten::divide.Tensor_mode"}),
        ("sin?", {"aten::sinc", "aten::sinh"}),
        ("aten::sin?", {"aten::sinc", "aten::sinh"}),
    ],
)
def test_a_pattern_picks_operators(ops, pattern: str, expected: set[str]) -> None:
    code, out, _ = ops(pattern, "--format", "csv")
    assert code == 0
    assert {name for name, *_ in rows_of("csv", out)[1:]} == expected


def test_a_pattern_that_fits_nothing_is_reported(ops) -> None:
    code, out, err = ops("softmacks")
    assert code == 2
    assert out == ""
    assert "softmacks" in err
    assert "next step" in err
    assert "Traceback" not in err
