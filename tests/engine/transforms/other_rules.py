"""Other rules of an operator, for one test."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from psgrad.engine.transforms.rules import registry


def with_rules(monkeypatch: pytest.MonkeyPatch, op: Any, **rules: Any) -> None:
    """Other rules of an operator, for the test."""
    monkeypatch.setitem(registry.table, id(op), replace(registry.rules_of(op), **rules))
