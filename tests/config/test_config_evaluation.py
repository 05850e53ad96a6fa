"""The section influence.evaluate: what it fills in, and that what does not fit is told with its reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from psgrad.config import EvaluationConfig, load_config
from psgrad.engine.influence.evaluation.jobs import Recipe
from tests.config.test_config import MINIMAL, error_of


def load(folder: Path, *overrides: str) -> EvaluationConfig:
    path = folder / "config.yaml"
    path.write_text(MINIMAL, encoding="utf-8")
    return load_config(path, [f"influence.evaluate.{override}" for override in overrides]).influence.evaluate


def test_the_defaults_of_a_training_are_the_recipes() -> None:
    assert Recipe(**EvaluationConfig().train.model_dump(exclude={"function"})) == Recipe()


def test_a_bare_string_is_a_function_and_methods_are_named_or_have_options(tmp_path: Path) -> None:
    found = load(tmp_path, "train=own.py:train", "methods=[tracin, {name: influence, damping: 0.5}]")
    assert found.train.function == "own.py:train"
    assert [(method.name, method.options) for method in found.methods] == [
        ("tracin", {}),
        ("influence", {"damping": 0.5}),
    ]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train={optimizer: newton, epochs: 3}", "newton does not take epochs"),
        ("train={optimizer: adam, momentum: 0.9}", "adam does not take momentum"),
        ("train={optimizer: newton, tolerance: 1.0}", "tolerance: not a key here: newton ends where"),
        (
            "train={function: own.py:train, epochs: 3, weight_decay: 0.1}",
            "trains as it wants to and does not take epochs, weight_decay",
        ),
        ("train=own.py", "does not name a callable"),
        ("train={optimizer: lbfgs}", "optimizer"),
        ("subsets=2", "subsets"),
        ("fraction=1.0", "fraction"),
        ("ks=[]", "ks"),
        ("explained=3", "explained: not a key here: removal asks about at most 20 queries"),
        ("highest=20", "a fifth of influence.evaluate.removals"),
        ("tuning={subsets: 30}", "list a method several times"),
        ("subset=3", "did you mean subsets"),
    ],
)
def test_what_does_not_fit_is_reported(tmp_path: Path, override: str, words: str) -> None:
    assert words in error_of(tmp_path, MINIMAL, f"influence.evaluate.{override}")
