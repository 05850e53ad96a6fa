"""The code of docs/adding-an-operator.md, run from top to bottom as one program."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from psgrad.engine.transforms import vmap
from psgrad.engine.transforms.rules import registry
from psgrad.errors import UnsupportedOperatorError

PAGE = Path(__file__).parents[3] / "docs" / "adding-an-operator.md"


@pytest.fixture
def _the_rules_of_the_page_go_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_derivatives", dict(registry._derivatives))
    monkeypatch.setattr(registry, "_batchings", dict(registry._batchings))


@pytest.mark.usefixtures("_the_rules_of_the_page_go_with_it")
def test_the_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) > 4
    names: dict[str, Any] = {}
    for block in blocks:
        if block.startswith("from psgrad.engine.transforms.rules.families import elementwise"):
            with pytest.raises(UnsupportedOperatorError, match=r"pages::soft_clamp.*test_adding_an_operator\.py"):
                vmap(lambda x: names["soft_clamp"](x, 2.0))(torch.ones(3))
        line = text[: text.index(block)].count("\n")
        exec(compile("\n" * line + block, str(PAGE), "exec"), names)
    assert names["gradients"].shape == (5, 3)


def test_the_page_names_what_there_is() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for path in re.findall(r"`((?:psgrad|tests)/[\w/]+\.py)`", text):
        assert (PAGE.parents[1] / path).is_file(), path
