"""ARCHITECTURE.md tells what happens: its step-by-step example is run, and what it says the levels run is what they ran."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from psgrad.engine.transforms import grad, vmap
from psgrad.engine.transforms.batching import BatchLevel, BatchTracer

PAGE = (Path(__file__).parent.parent / "ARCHITECTURE.md").read_text(encoding="utf-8")


def shape(value: Any) -> str:
    return str(list((value.value if isinstance(value, BatchTracer) else value).shape))


def test_the_example_runs_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    process = BatchLevel.process

    def watched(level: BatchLevel, op: Any, args: Any, kwargs: Any) -> Any:
        result = process(level, op, args, kwargs)
        name = op._schema.name.removeprefix("aten::")
        ran.append(f"`{name}` {' '.join(shape(a) for a in args if isinstance(a, torch.Tensor))} → {shape(result)}")
        return result

    monkeypatch.setattr(BatchLevel, "process", watched)
    section = PAGE[PAGE.index("step by step") : PAGE.index("## The way of a sample")]
    code = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    names = {"vmap": vmap, "grad": grad, "w": torch.randn(3), "samples": torch.randn(5, 3)}
    exec(code[0], names)
    assert re.findall(r"`\w+` \[[^|→]*→ \[[\d, ]*\]", section) == ran


def test_the_page_names_what_there_is() -> None:
    root = Path(__file__).parent.parent
    engine = root / "psgrad/engine"
    parts = ("transforms", "gradients", "gradients/deferral", "gradients/planning", "privacy", "influence")
    floors = (root / "psgrad" / floor for floor in ("workflows", "quality"))
    inside = [root, root / "psgrad", *floors, engine, *(engine / part for part in parts)]
    for path in re.findall(r"`([\w/-]+\.(?:py|md))`", PAGE):
        assert any((folder / path).is_file() for folder in inside), path
