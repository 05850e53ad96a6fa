"""The page on vmap(grad(f)): its example is run, and the tables list what the levels ran."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from psgrad.engine.transforms import grad, vmap
from psgrad.engine.transforms.batch_values import BatchTracer
from psgrad.engine.transforms.batching import BatchLevel

PAGE = (Path(__file__).parents[2] / "docs" / "explanation" / "vmap-grad.md").read_text(encoding="utf-8")


def shape(value: Any) -> str:
    return str(list((value.value if isinstance(value, BatchTracer) else value).shape))


def test_the_example_runs_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    process = BatchLevel.process

    def watched(level: BatchLevel, op: Any, args: Any, kwargs: Any) -> Any:
        result = process(level, op, args, kwargs)
        name = op._schema.name.removeprefix("aten::")
        ran.append(
            f"`{name}` {', '.join(shape(a) for a in args if isinstance(a, torch.Tensor))} → {shape(result)}"
        )
        return result

    monkeypatch.setattr(BatchLevel, "process", watched)
    code = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names = {"vmap": vmap, "grad": grad, "w": torch.randn(3), "samples": torch.randn(5, 3)}
    exec(code[0], names)
    assert re.findall(r"`\w+` \[[^|→]*→ \[[\d, ]*\]", PAGE) == ran
