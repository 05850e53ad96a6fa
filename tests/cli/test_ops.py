"""`psgrad ops`: the table, and what a pattern leaves of it."""

from __future__ import annotations

import json

import pytest

from psgrad.engine.transforms.rules.registry import Coverage, coverage


@pytest.fixture
def ops(run):
    """ops(*arguments) runs the command."""
    return lambda *arguments: run("ops", *arguments)


def test_ops_has_the_whole_table(ops) -> None:
    ended = ops()
    assert ended.code == 0
    lines = ended.out.splitlines()
    rows = [tuple(part.strip() for part in line.split("  ") if part.strip()) for line in lines]
    assert rows == [Coverage._fields, *coverage()]
    assert ended.err.startswith(f"{len(coverage()):,} operators; VJP: ")
    assert json.loads(ops("--json").out) == [each._asdict() for each in coverage()]


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
    ended = ops(pattern, "--json")
    assert ended.code == 0
    assert {each["operator"] for each in json.loads(ended.out)} == expected


def test_a_pattern_that_fits_nothing_is_reported(ops) -> None:
    ops("softmacks").refused(2, "softmacks", "hint")
