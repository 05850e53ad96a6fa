"""Labels by name and by number, of a model's head."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from psgrad.errors import ConfigError, DataError
from tests.text_tasks import NAMED, refusal_of, samples_of

CLASSIFY = {"text": "t", "target": "y"}


def rows(*labels: object) -> list[dict[str, object]]:
    return [{"t": "the cat sat", "y": label} for label in labels]


def test_labels_are_names_of_the_models_config_or_numbers(tmp_path: Path) -> None:
    task = "sequence-classification"
    named = samples_of(tmp_path, task, rows("odd", "dull"), config=NAMED, **CLASSIFY)
    assert named.targets is not None
    assert named.targets.tolist() == [2, 0]
    assert named.class_names == ("dull", "fine", "odd")
    numbered = samples_of(tmp_path, task, rows(2, -100), **CLASSIFY)
    assert numbered.targets is not None
    assert numbered.targets.tolist() == [2, -100]


def test_labels_class_names_stand_in_for_names_that_nobody_gave(tmp_path: Path) -> None:
    task = "sequence-classification"
    given = samples_of(tmp_path, task, rows("no", "yes"), class_names=["yes", "no"], **CLASSIFY)
    assert given.targets is not None
    assert given.targets.tolist() == [1, 0]
    assert samples_of(tmp_path, task, rows(0, 1), **CLASSIFY).class_names is None
    said = refusal_of(ConfigError, tmp_path, task, rows(0), class_names=["a", "b", "c"], **CLASSIFY)
    assert "data.class_names has 3 names, and the model's head has 2 classes" in said


@pytest.mark.parametrize(
    ("label", "words"),
    [
        ("angry", "row 1 (ROWS, line 2) has the label 'angry'\n  expected: one of dull, fine, odd"),
        (3, "row 1 (ROWS, line 2) has the label 3\n  expected: a number from 0 to 2, or -100"),
        (None, "row 1 (ROWS, line 2) has no label\n  expected: one of dull, fine, odd"),
    ],
)
def test_label_outside_the_head_is_refused_with_its_row(label: object, words: str, tmp_path: Path) -> None:
    first: object = "fine" if isinstance(label, str) else 0
    said = refusal_of(
        DataError, tmp_path, "sequence-classification", rows(first, label), config=NAMED, **CLASSIFY
    )
    assert words.replace("ROWS", str(tmp_path / "rows.jsonl")) in said


def test_label_by_name_without_names_is_refused_with_the_way_to_give_them(tmp_path: Path) -> None:
    said = refusal_of(DataError, tmp_path, "sequence-classification", rows("good"), **CLASSIFY)
    assert "has the label 'good'" in said
    assert "LABEL_0, LABEL_1" in said
    assert "list the names in data.class_names" in said


def test_several_labels_become_ones_and_zeros(tmp_path: Path) -> None:
    config = {**NAMED, "problem_type": "multi_label_classification"}
    found = samples_of(
        tmp_path, "sequence-classification", rows(["odd", "dull"], [], ["fine"]), config=config, **CLASSIFY
    )
    target = found.read(0, 3).target
    assert target is not None
    assert torch.equal(target, torch.tensor([[1.0, 0, 1], [0, 0, 0], [0, 1, 0]]))
    said = refusal_of(DataError, tmp_path, "sequence-classification", rows("odd"), **CLASSIFY)
    assert "expected: lists of labels: the model's problem_type is multi_label_classification" in said


def test_labels_class_names_in_another_order_than_the_models_are_refused(tmp_path: Path) -> None:
    task, names = "sequence-classification", ["odd", "fine", "dull"]
    said = refusal_of(ConfigError, tmp_path, task, rows("odd"), config=NAMED, class_names=names, **CLASSIFY)
    assert "data.class_names has 'odd' as class 0, and the model's config (id2label) as class 2" in said
    assert "expected: the model's order: dull, fine, odd" in said
    others = samples_of(tmp_path, task, rows("odd"), class_names=["matt", "fine", "new"], **CLASSIFY)
    assert others.class_names == ("dull", "fine", "odd")


def test_labels_of_a_config_that_contradicts_itself_are_refused(tmp_path: Path) -> None:
    turned = {**NAMED, "label2id": {"odd": 0, "fine": 1, "dull": 2}}
    said = refusal_of(
        ConfigError, tmp_path, "sequence-classification", rows("odd"), config=turned, **CLASSIFY
    )
    assert "the model's config has 'dull' as class 0 in id2label, and as class 2 in label2id" in said
