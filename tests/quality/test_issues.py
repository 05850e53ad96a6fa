"""The issue table: what is planted is found, and scores order samples as cleanlab's do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from psgrad.quality.issues import issue_table


def samples_of(probabilities: Any, given: Any, **further: Any) -> pd.DataFrame:
    """A table of samples of a model with these probabilities [n, classes] of each class."""
    n = len(given)
    of_label = probabilities[np.arange(n), given]
    norms = np.sqrt(((probabilities - np.eye(probabilities.shape[1])[given]) ** 2).sum(1))
    columns = {
        "id": [f"row {row}" for row in range(n)],
        "index": np.arange(n),
        "target": given,
        "prediction": probabilities.argmax(1),
        "confidence": probabilities.max(1),
        "loss": -np.log(of_label),
        "grad_norm": norms,
        "p_value": np.nan,
        "is_outlier_issue": False,
        "status": "ok",
    }
    return pd.DataFrame(columns | further)


def noisy(n: int = 400, classes: int = 4, seed: int = 0) -> tuple[Any, Any, Any]:
    """(probabilities, labels of which a twentieth is wrong, which are)."""
    draw = np.random.default_rng(seed)
    true = draw.integers(0, classes, n)
    logits = draw.normal(size=(n, classes)) + 4 * np.eye(classes)[true]
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    wrong = np.zeros(n, bool)
    wrong[draw.choice(n, n // 20, replace=False)] = True
    return probabilities, np.where(wrong, (true + 1) % classes, true), wrong


def test_planted_labels_are_found_by_one_model() -> None:
    probabilities, given, wrong = noisy()
    issues = issue_table(samples_of(probabilities, given))
    own = probabilities[np.arange(len(given)), given]
    np.testing.assert_allclose(issues.samples["label_score"], own, rtol=1e-6)
    found = issues.samples["is_label_issue"]
    assert found[wrong].mean() > 0.9
    assert found[~wrong].mean() < 0.06
    assert issues.samples["given_label"].tolist() == given.tolist()
    assert issues.samples["predicted_label"].tolist() == probabilities.argmax(1).tolist()


def test_label_issues_come_from_the_checkpoints_where_a_run_has_them() -> None:
    probabilities, given, wrong = noisy()
    learnt = np.where(np.eye(4)[given] > 0, 0.97, 0.01)  # the last model has learnt its labels
    correctness = (probabilities.argmax(1) == given).astype(float)
    losses = -np.log(probabilities[np.arange(len(given)), given])[:, None]
    without = issue_table(samples_of(learnt, given))
    assert not without.samples["is_label_issue"].any()
    assert "has seen its labels" in without.summary.set_index("issue").loc["label", "made_of"]
    samples = samples_of(learnt, given, correctness=correctness)
    found = issue_table(samples, losses=np.repeat(losses, 3, axis=1)).samples["is_label_issue"]
    assert found[wrong].mean() > 0.9
    assert found[~wrong].mean() < 0.03
    losses[:, 0] = np.where(np.arange(len(given)) < 20, 6.0, 0.1)
    losses[50] = 0.8  # most checkpoints prefer another class, by little
    samples["correctness"] = np.where(np.isin(np.arange(len(given)), [*range(20), 50]), 0.0, 1.0)
    found = issue_table(samples, losses=losses).samples
    assert found["index"][found["is_label_issue"]].tolist() == list(range(20))
    assert found["label_score"][50] == pytest.approx(np.exp(-0.8) / 2)


def test_label_issues_out_of_sample_are_confident_learnings() -> None:
    """By hand: a class is likely where its probability is at least the mean over the rows with its label."""
    given = np.array([0, 0, 0, 1, 1, 0])
    own = np.array([0.9, 0.8, 0.1, 0.7, 0.55, 0.45])  # class 1 is likely from 0.625 on
    probabilities = np.where(np.eye(2)[given] > 0, own[:, None], 1 - own[:, None])
    issues = issue_table(samples_of(probabilities, given), probabilities=probabilities)
    assert issues.samples["is_label_issue"].tolist() == [False, False, True, False, False, False]
    np.testing.assert_allclose(issues.samples["label_score"], own)
    learnt = samples_of(np.eye(2)[given] * 0.98 + 0.01, given)
    of_run = issue_table(learnt, probabilities=probabilities).samples
    assert of_run["is_label_issue"].tolist() == issues.samples["is_label_issue"].tolist()
    assert of_run["predicted_label"].tolist() == [0, 0, 1, 1, 1, 1]


def test_label_issues_out_of_sample_are_cleanlabs() -> None:
    library = pytest.importorskip("cleanlab.filter", reason="cleanlab is not installed")
    for seed in range(5):
        probabilities, given, _ = noisy(seed=seed)
        theirs = library.find_label_issues(given, probabilities, filter_by="confident_learning", n_jobs=1)
        ours = issue_table(samples_of(probabilities, given), probabilities=probabilities).samples
        assert ours["is_label_issue"].tolist() == theirs.tolist()


def test_near_duplicates_come_in_sets_and_first_those_with_different_labels_found_by_inputs() -> None:
    draw = np.random.default_rng(0)
    points, features = draw.normal(size=(200, 16)), draw.normal(size=(200, 8))
    points[[150, 151]] = points[3] * 1.0001 + 1e-4
    points[199] = points[40]
    features[120] = features[60] + 1e-4
    probabilities, given, _ = noisy(200)
    given[60], given[120], given[[3, 150, 151, 40, 199]] = 0, 1, 2
    issues = issue_table(samples_of(probabilities, given), points, features)
    found = issues.samples[issues.samples["is_near_duplicate_issue"]].set_index("index")
    assert found["near_duplicate_set"].tolist() == [1, 2, 0, 0, 1, 1, 2]
    assert found.index.tolist() == [3, 40, 60, 120, 150, 151, 199]
    assert (issues.samples["near_duplicate_set"] == -1).sum() == 193
    assert found.index[found["near_duplicate_labels_differ"]].tolist() == [60, 120]
    assert found["near_duplicate_score"][[60, 120]].tolist() == [0, 0]
    assert found["near_duplicate_score"].max() < issues.samples["near_duplicate_score"].median()
    made_of = issues.summary.set_index("issue").loc["near_duplicate", "made_of"]
    assert "2 samples are in sets with different labels" in made_of
    alone = issue_table(samples_of(probabilities, given), points).samples.query("is_near_duplicate_issue")
    assert alone["index"].tolist() == [3, 40, 150, 151, 199]  # without features of inputs


@pytest.mark.parametrize("sorted_by_group", [False, True])
def test_order_of_the_dataset_is_tested_for_independent_draws(sorted_by_group: bool) -> None:
    draw = np.random.default_rng(0)
    group = np.repeat(np.arange(10), 30)
    points = draw.normal(size=(10, 8))[group] + 0.1 * draw.normal(size=(300, 8))
    order = np.arange(300) if sorted_by_group else draw.permutation(300)
    probabilities, given, _ = noisy(300)
    issues = issue_table(samples_of(probabilities, given), points[order])
    p_value = issues.summary.set_index("issue").loc["non_iid", "score"]
    assert (p_value < 0.01) == sorted_by_group
    assert issues.samples["is_non_iid_issue"].any() == sorted_by_group


def test_rare_classes_weak_groups_and_values_that_are_not_finite() -> None:
    probabilities, given, _ = noisy(400)
    given = np.where(np.arange(400) < 3, 3, given % 3)
    groups = np.where(np.arange(400) % 4 == 0, "weak", "strong")
    table = samples_of(probabilities, given, group=groups)
    table.loc[table["group"] == "weak", "loss"] = 3.0
    table.loc[7, ["loss", "grad_norm", "status"]] = [np.nan, np.nan, "nonfinite"]
    issues = issue_table(table)
    found = issues.samples
    assert found[found["is_class_imbalance_issue"]]["index"].tolist() == [0, 1, 2]
    assert (found["is_underperforming_group_issue"] == (table["group"] == "weak")).all()
    assert found[found["is_null_issue"]]["index"].tolist() == [7]
    scores = found[[name for name in found if name.endswith("_score")]]
    assert scores.notna().all(axis=None)
    assert ((scores >= 0) & (scores <= 1)).all(axis=None)


def test_types_that_a_run_can_not_tell_are_named_in_the_summary() -> None:
    table = samples_of(*noisy(40)[:2]).drop(columns=["confidence"])
    issues = issue_table(table)
    of = issues.summary.set_index("issue")
    for name in ("label", "near_duplicate", "non_iid", "class_imbalance", "underperforming_group"):
        assert of.loc[name, "made_of"].startswith("needs ")
        assert pd.isna(of.loc[name, "found"])
        assert f"is_{name}_issue" not in issues.samples
