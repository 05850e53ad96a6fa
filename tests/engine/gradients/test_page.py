"""The code of the page on deferred gradients runs from top to bottom as one program, and what it names is
there.
"""

from __future__ import annotations

from collections.abc import Iterator
from inspect import isabstract

import pytest
import torch

from psgrad.engine.gradients import terms
from tests.engine.transforms.test_pages import DOCS, run

PAGE = DOCS / "explanation" / "deferred-gradients.md"


@pytest.fixture
def _default_dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


@pytest.mark.usefixtures("_default_dtype")
def test_gradients_page_code() -> None:
    names = run(PAGE)
    assert len(names["square_norms"]) == 6


def test_gradients_page_names_every_term_and_query() -> None:
    text = PAGE.read_text(encoding="utf-8")
    kinds = [
        name
        for name, kind in vars(terms).items()
        if isinstance(kind, type) and issubclass(kind, terms.Term) and not isabstract(kind)
    ]
    queries = (
        "square_norms",
        "inner",
        "gram",
        "dot",
        "weighted_sum",
        "mean",
        "second_moment",
        "project",
        "materialise",
        "reduce",
    )
    assert [name for name in kinds if f"`{name}`" not in text] == []
    assert [name for name in queries if f"`{name}" not in text] == []
