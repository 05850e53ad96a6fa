"""A config that can be read, and a stand-in for what the command does with it."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import psgrad

CONFIG = """\
version: 1
model: {factory: "model.py:build"}
loss: cross_entropy
data: {path: data.npz, inputs: x, target: y}
output: runs/out
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    return path


@pytest.fixture
def workflow(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], None]:
    """workflow(function) makes the function what `psgrad analyze` calls."""

    def install(function: Callable[..., Any]) -> None:
        stand_in = types.ModuleType("psgrad.workflows")
        stand_in.analyze = function  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "psgrad.workflows", stand_in)
        monkeypatch.setattr(psgrad, "workflows", stand_in, raising=False)

    return install
