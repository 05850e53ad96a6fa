"""A config that can be read, and a stand-in for what the command does with it."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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
        stand_in(monkeypatch, "analyze", analyze=function)

    return install


def stand_in(monkeypatch: pytest.MonkeyPatch, module: str, **functions: Callable[..., Any]) -> None:
    """Puts a module with these functions in the place of psgrad.commands.`module`, which is not imported."""
    name = f"psgrad.commands.{module}"
    made = types.ModuleType(name)
    vars(made).update(functions)
    monkeypatch.setitem(sys.modules, name, made)
