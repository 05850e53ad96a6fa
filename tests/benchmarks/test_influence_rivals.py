"""Scores against captum's and dattri's: the comparisons of benchmarks/influence_agreement.py whose libraries
are test extras.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

FOLDER = Path(__file__).parents[2] / "benchmarks"
INSTALLED = ("captum", "dattri")
COMPARISONS = (
    "captum TracInCP, gradients by layer formulas",
    "captum TracInCP, gradients by a loop",
    "captum NaiveInfluenceFunction",
    "dattri TracIn",
    "dattri IF explicit",
    "dattri IF conjugate gradient, 40 iterations",
    "dattri TRAK, two checkpoints, no ridge",
    "dattri TRAK, two checkpoints, ridge",
)


@pytest.fixture(scope="module")
def agreement() -> Iterator[Any]:
    """The script; benchmarks import one another as scripts do."""
    before = set(sys.modules)
    sys.path.insert(0, str(FOLDER))
    try:
        yield importlib.import_module("influence_agreement")
    finally:
        sys.path.remove(str(FOLDER))
        for name in set(sys.modules) - before:
            if str(FOLDER) in str(getattr(sys.modules[name], "__file__", "")):
                del sys.modules[name]


@pytest.fixture(scope="module")
def setting(agreement: Any) -> Any:
    return agreement.Setting(training=130, queries=20, hidden=8, steps=40)


def named(agreement: Any, title: str) -> Any:
    return next(
        comparison
        for comparison in agreement.COMPARISONS
        if f"{comparison.library} {comparison.name}" == title
    )


def test_every_comparison_with_an_installed_library_is_listed(agreement: Any) -> None:
    assert [f"{c.library} {c.name}" for c in agreement.COMPARISONS if c.library in INSTALLED] == list(
        COMPARISONS
    )


@pytest.mark.long
@pytest.mark.parametrize("title", COMPARISONS)
@pytest.mark.filterwarnings("ignore")  # the rivals' own
def test_scores_are_those_of_others(agreement: Any, setting: Any, title: str) -> None:
    comparison = named(agreement, title)
    assert comparison.same
    theirs, ours = comparison.theirs(setting).double(), comparison.ours(setting)
    # dattri keeps its products in float32; its TRAK and all of captum's are in float64
    single = title.startswith("dattri") and "TRAK" not in title
    assert float((theirs - ours).norm() / ours.norm()) < (1e-6 if single else 1e-10)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_a_comparison_sees_another_definition(agreement: Any, setting: Any) -> None:
    """The bar is one that a forgotten factor, or another damping, misses."""
    comparison = named(agreement, "captum NaiveInfluenceFunction")
    assert agreement.compare(comparison, setting).passed
    scaled = replace(comparison, ours=lambda s: comparison.ours(s) * (1 + 2e-4))
    damped = replace(comparison, theirs=lambda s: agreement.captum_naive(s.last, agreement.DAMPING * 1.01))
    assert not agreement.compare(scaled, setting).passed
    assert not agreement.compare(damped, setting).passed


def test_the_margin_is_the_log_odds(agreement: Any) -> None:
    logits = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    for target in range(3):
        probability = logits.softmax(0)[target]
        torch.testing.assert_close(
            agreement.margin(logits, torch.tensor(target)), (probability / (1 - probability)).log()
        )
