"""`psgrad ops`: the table, and what a pattern leaves of it."""

from __future__ import annotations

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


def test_ops_has_the_whole_table(ops) -> None:
    code, out, err = ops()
    assert code == 0
    rows = [tuple(part.strip() for part in line.split("  ") if part.strip()) for line in out.splitlines()]
    assert rows == [Coverage._fields, *coverage()]
    assert err.startswith(f"{len(coverage()):,} operators; VJP: ")
    assert json.loads(ops("--json")[1]) == [each._asdict() for each in coverage()]


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
    code, out, _ = ops(pattern, "--json")
    assert code == 0
    assert {each["operator"] for each in json.loads(out)} == expected


def test_a_pattern_that_fits_nothing_is_reported(ops) -> None:
    code, out, err = ops("softmacks")
    assert code == 2
    assert out == ""
    assert "softmacks" in err
    assert "hint" in err
    assert "Traceback" not in err
