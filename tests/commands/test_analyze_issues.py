"""What the issue table is made of beside the samples: features of inputs, and probabilities of the data."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold
from torch import nn

from psgrad.commands.analyze_issues import input_features
from psgrad.ragged import Block, RaggedAxes
from tests.workplace import CLASSES, Workplace


def features(rows: torch.Tensor, lengths: torch.Tensor | None = None) -> Any:
    ragged = None if lengths is None else RaggedAxes((((0, 0),), ()), (0, 0), True)
    return input_features(Block((rows,), None, lengths, ragged))


def test_features_of_near_inputs_are_near_and_of_others_far() -> None:
    rows = torch.randn(150, 3, 7, generator=torch.Generator().manual_seed(0))
    rows[140] = rows[3] + 1e-4
    found = features(rows)
    distances = np.linalg.norm(found - found[3], axis=1)
    assert np.argsort(distances)[:2].tolist() == [3, 140]
    assert distances[140] < 1e-2 < np.sort(distances)[2]


def test_features_of_tokens_do_not_depend_on_the_padding_of_their_block() -> None:
    draw, lengths = torch.Generator().manual_seed(0), torch.tensor([[4], [9], [4]])
    rows = torch.randint(1, 50, (3, 9), generator=draw)
    rows[2, :4] = rows[0, :4]
    rows[2, 4:] = 7  # behind its end
    found = features(rows, lengths)
    np.testing.assert_array_equal(found[0], found[2])
    assert np.linalg.norm(found[0] - found[1]) > 0.1
    assert features(rows.float(), lengths) is None


def test_probabilities_of_a_column_find_the_labels_and_are_checked(workplace: Workplace) -> None:
    target = workplace.arrays["y"]
    held = np.full((len(target), CLASSES), 0.1 / (CLASSES - 1), np.float32)
    held[np.arange(len(target)), target] = 0.9
    held[5] = np.roll(held[5], 1)
    workplace.save(held=held)
    given = ("--set", "analyze.probabilities=held", "--no-report")
    assert workplace.analyze(*given, "--overwrite").code == 0
    issues = pd.read_parquet(workplace.folder / "out" / "issues.parquet")
    assert issues["index"][issues["is_label_issue"]].tolist() == [5]
    wrong = workplace.analyze("--set", "analyze.probabilities=y", "--overwrite")
    wrong.refused(2, f"expected {CLASSES} probabilities, one for each class")
    workplace.save(held=held * 2)
    wrong = workplace.analyze(*given, "--overwrite")
    wrong.refused(2, "row 0 of the column 'held' is no distribution over classes")


def test_folds_are_trained_without_their_rows_from_fresh_weights(workplace: Workplace) -> None:
    inputs = torch.from_numpy(workplace.arrays["x"]).double()
    target = torch.from_numpy(workplace.arrays["y"])
    unread, sources = np.arange(len(inputs)) == 7, np.arange(len(target)) // 4
    workplace.save(x=np.where(unread[:, None], np.nan, workplace.arrays["x"]), source=sources)
    train = "influence={evaluate: {train: {optimizer: sgd, epochs: 9, batch_size: 64, learning_rate: 0.5}}}"
    given = ("--set", "analyze.folds=3", "--set", train, "--set", "engine.dtype=float64", "--no-report")
    known, grouped = np.delete(np.arange(len(target)), 7), ("--set", "analyze.outliers={group_by: source}")
    of_groups = (StratifiedGroupKFold, sources[known], grouped)
    for kind, groups, options in ((StratifiedKFold, None, ()), of_groups):
        assert workplace.analyze(*given, *options, "--overwrite").code == 0
        issues = pd.read_parquet(workplace.folder / "out" / "issues.parquet")
        folds = kind(3, shuffle=True, random_state=0).split(known, target[known], groups)
        for rows, left_out in ((known[one], known[other]) for one, other in folds):
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, CLASSES)).double()
            optimizer = torch.optim.SGD(model.parameters(), 0.5)
            for _ in range(9):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(inputs[rows]), target[rows]).backward()
                optimizer.step()
            wanted = model(inputs[left_out]).softmax(1)[range(len(left_out)), target[left_out]]
            np.testing.assert_allclose(issues["label_score"][left_out], wanted.detach(), rtol=1e-9)
        assert issues["label_score"][7] == 1
    resumed = workplace.analyze(*given, *grouped, "--resume", "--set", "analyze.folds=2")
    resumed.refused(2, "analyze.folds was 3 and is 2")
    assert workplace.analyze(*given, "--overwrite", "--set", "analyze.folds=20").code == 2
    assert workplace.analyze(*given, "--resume").code == 0  # the rows of a run that fails are kept
    for wrong, words in (
        ("analyze={folds: 7, outliers: {group_by: source}}", "7 folds of 6 groups by source"),
        ("analyze.folds=20", "20 folds, and no label has more than"),
        ("analyze.folds=30", "30 folds of 23 rows; expected at most one a row"),
        ("analyze.probabilities=held", "both folds and probabilities are given"),
        ("data.weight=y", "models are not trained again on rows with weights"),
        ("loss=mse", "the loss mse has no classes"),
    ):
        workplace.analyze(*given, "--overwrite", "--set", wrong).refused(2, words)


def test_leaks_are_found_and_limited(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    x = workplace.arrays["x"]
    asked = np.concatenate(
        [np.random.default_rng(9).normal(size=(9, 4)), x[[4]], x[[11]] + 1e-5, [[np.nan] * 4]]
    )
    others = {"y": np.zeros(12, np.int64), "uid": [f"q{row}" for row in range(12)]}
    np.savez(workplace.folder / "asked.npz", x=asked.astype(np.float32), **others)
    weights = np.linspace(0.5, 2, len(x), dtype=np.float32)
    workplace.save(x=np.where(np.arange(len(x))[:, None] == 20, np.nan, x), w=weights)
    queries = ("--set", "influence={queries: {path: asked.npz}}", "--set", "data.weight=w", "--check")
    for limit, given, code in ((0, (), 4), (1, queries, 1), (2, queries, 0)):
        gate = f"gate={{nonfinite: ignore, max_leaks: {limit}}}"
        assert workplace.analyze(*given, "--check", "--no-report", "--overwrite", "--set", gate).code == code
    issues = pd.read_parquet(workplace.folder / "out" / "issues.parquet")
    assert issues["leak_of"][issues["is_leak_issue"]].to_dict() == {4: "q9", 11: "q10"}
    assert "row-04: the input is" in workplace.command("check", "out", "--format", "github").out
    assert "evaluation row q9" in workplace.command("check", "out").out
    monkeypatch.setattr("psgrad.commands.analyze_issues.MOST", 10)
    assert workplace.analyze(*queries, "--overwrite", "--no-report", "--set", gate).code == 0
    issues = pd.read_parquet(workplace.folder / "out" / "issues.parquet")
    assert issues["leak_of"][issues["is_leak_issue"]].to_dict() == {4: "q9"}
    for inputs, kind in ((asked[:, :3] + 0.5, "numbers [3]"), (x.astype(int), "whole numbers [4]")):
        np.savez(workplace.folder / "asked.npz", x=inputs[:12], **others)
        wrong = workplace.analyze(*queries, "--overwrite")
        wrong.refused(3, f"inputs of {kind}; expected numbers [4], as in the training data")
    np.savez(workplace.folder / "asked.npz", x=asked[::-1].astype(np.float32), **others)
    workplace.analyze(*queries, "--resume", "--set", gate).refused(2, "influence.queries (their content) was")
