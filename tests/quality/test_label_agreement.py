"""Agreement of labels and predictions: another order of the classes, and what chance would do."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment

from psgrad.quality.label_agreement import _assigned, by_chance, label_facts
from psgrad.reports.labels import label_warning, label_words

NAMES = ("stay", "upgrade", "churn")


def predicted(labels: np.ndarray, right: float, classes: int, seed: int = 0) -> np.ndarray:
    """The labels, but for a share of them any class."""
    random = np.random.default_rng(seed)
    return np.where(random.random(len(labels)) < right, labels, random.integers(0, classes, len(labels)))


def drawn(count: int, classes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, 1]).integers(0, classes, count)


def test_a_good_model_has_its_share_and_no_warning() -> None:
    labels = drawn(200, 3)
    guesses = predicted(labels, 0.9, 3)
    facts = label_facts(labels, guesses)
    assert (facts.rows, facts.agree) == (200, int((labels == guesses).sum()))
    share = f"{(labels == guesses).mean():.0%}"
    expected = f"0 stay, 1 upgrade, 2 churn; the model agrees with {share} of 200 labels"
    assert label_words(facts, NAMES) == expected
    assert label_warning(facts, NAMES) == ""


@pytest.mark.parametrize("classes", [2, 3, 10, 50])
def test_another_order_of_the_classes_is_found_and_named(classes: int) -> None:
    outputs = np.roll(np.arange(classes), 1)  # label 0 is the last output
    labels = drawn(40 * classes, classes)
    guesses = outputs[predicted(labels, 0.9, classes)]
    facts = label_facts(labels, guesses)
    assert dict(facts.order or []) == dict(enumerate(outputs.tolist()))
    assert facts.agree_in_order == int((outputs[labels] == guesses).sum())


def test_the_words_of_another_order_are_the_order_of_the_outputs() -> None:
    labels = drawn(60, 3)
    facts = label_facts(labels, np.array([2, 0, 1])[labels])
    words = label_warning(facts, NAMES)
    assert "would agree with 100% were its outputs in another order: 0 upgrade, 1 churn, 2 stay" in words
    assert "another order: 0 is label 1, 1 is label 2, 2 is label 0" in label_warning(facts, None)


def test_the_outputs_of_labels_are_those_of_the_assignment_with_most_agreement() -> None:
    own = 0
    for seed in range(200):
        classes = 2 + seed % 4
        labels = drawn(8, classes, seed)
        guesses = predicted(labels, 0.8, classes, seed)
        counts = np.zeros((classes, classes))
        np.add.at(counts, (labels, guesses), 1)
        rows, outputs = linear_sum_assignment(counts, maximize=True)
        found = _assigned(labels, guesses, classes)
        assert counts[rows, found].sum() == counts[rows, outputs].sum()
        if counts.trace() == counts[rows, outputs].sum():
            own += 1
            assert found.tolist() == list(range(classes)), "its own output where nothing is won"
    assert 0 < own < 200


def test_random_predictions_bring_up_no_other_order() -> None:
    for seed in range(300):
        count, classes = 4 + 7 * (seed % 30), 2 + seed % 9
        facts = label_facts(drawn(count, classes, seed), drawn(count, classes, seed + 1000))
        assert facts.order is None


def test_a_model_that_says_one_class_is_no_better_than_chance() -> None:
    labels = drawn(300, 10)
    words = label_warning(label_facts(labels, np.full(300, 4)), None)
    share = f"{(labels == 4).mean():.0%}"
    assert f"agrees with {share} of the labels, and would by chance with {share}" in words


def test_a_rare_class_that_is_never_predicted_is_no_alarm() -> None:
    labels = np.repeat([0, 1], [196, 4])
    assert label_warning(label_facts(labels, np.zeros(200, np.int64)), None) == ""


def test_agreement_by_chance_is_that_of_all_permutations() -> None:
    labels, guesses = np.array([0, 0, 1, 2, 1, 0]), np.array([0, 1, 1, 1, 2, 0])
    agree = [(labels == np.array(order)).sum() for order in permutations(guesses.tolist())]
    mean, deviation = by_chance(labels, guesses)
    assert mean == pytest.approx(np.mean(agree))
    assert deviation == pytest.approx(np.std(agree))


def test_no_rows_and_no_names_say_nothing() -> None:
    nothing = np.empty(0, np.int64)
    assert label_words(label_facts(nothing, nothing), None) == ""
    assert label_warning(label_facts(nothing, nothing), None) == ""
