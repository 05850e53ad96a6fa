"""The code of the pages on transforms, each run from top to bottom as one program."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from psgrad.engine import transforms
from psgrad.engine.transforms import vmap
from psgrad.engine.transforms.rules import registry
from psgrad.errors import UnsupportedOperatorError

DOCS = Path(__file__).parents[3] / "docs"
ADDING, GUIDE = DOCS / "guides" / "adding-an-operator.md", DOCS / "explanation" / "transforms.md"


@pytest.fixture
def _the_rules_of_the_page_go_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "table", dict(registry.table))


def run(
    page: Path, before: Callable[[str, dict[str, Any]], None] = lambda block, names: None
) -> dict[str, Any]:
    """The names that the page's code leaves; `before` is called ahead of each block."""
    text = page.read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) > 4
    names: dict[str, Any] = {}
    for block in blocks:
        before(block, names)
        line = text[: text.index(block)].count("\n")
        exec(compile("\n" * line + block, str(page), "exec"), names)
    return names


@pytest.mark.usefixtures("_the_rules_of_the_page_go_with_it")
def test_adding_an_operator() -> None:
    def refused_so_far(block: str, names: dict[str, Any]) -> None:
        if block.startswith("from psgrad.engine.transforms.rules.families import elementwise"):
            with pytest.raises(UnsupportedOperatorError, match=r"pages::soft_clamp.*test_pages\.py"):
                vmap(lambda x: names["soft_clamp"](x, 2.0))(torch.ones(3))

    assert run(ADDING, refused_so_far)["gradients"].shape == (5, 3)


def test_transforms_guide_code() -> None:
    names = run(GUIDE)
    loss, w, samples = names["loss"], names["w"], names["samples"]
    leaf = w.clone().requires_grad_()
    torch.testing.assert_close(
        names["per_sample"], torch.stack([torch.autograd.grad(loss(leaf, x), leaf)[0] for x in samples])
    )
    square = names["square"].clone().requires_grad_()

    def deep(x: torch.Tensor) -> torch.Tensor:
        for _ in range(8):
            x = torch.tanh(square @ (square.T @ x)) + x
        return x.sum()

    torch.testing.assert_close(
        names["lean"], torch.stack([torch.autograd.grad(deep(x), square)[0] for x in samples])
    )


def test_transforms_guide_names_every_transform() -> None:
    text = GUIDE.read_text(encoding="utf-8")
    assert [name for name in transforms.__all__ if f"`{name}`" not in text] == []
