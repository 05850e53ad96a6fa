"""The tables of benchmarks/tables.py are judged tables, and its run folders are those of finished runs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from psgrad.commands.check import check
from psgrad.commands.diff import diff

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("tables")
    sys.modules.pop("tables", None)


def test_the_runs_can_be_checked_and_compared(tables: Any, tmp_path: Path) -> None:
    a, b = (
        tables.run_folder(tmp_path / name, tables.samples(2000, first, first))
        for name, first in (("a", 0), ("b", 100))
    )
    assert check(a).count("review") == 20
    found = diff(a, b)
    assert (found.counts["common"], found.counts["came"], found.counts["went"]) == (1900, 100, 100)
    assert found.spearman is not None
    assert 0.8 < found.spearman < 1
