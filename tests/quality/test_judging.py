"""The verdict: its columns, which samples are flagged and why, and what is reported if it is undecided."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr

from psgrad.errors import ConfigError
from psgrad.quality.judging import judge, rank_samples
from psgrad.quality.references import OTHER, join_small, labels_of
from psgrad.run.results import SAMPLE_COLUMNS
from psgrad.run.results.manifest import content_of
from tests.quality.frames import config, samples, trusted

NEW_COLUMNS = (
    "p_value",
    "q_value",
    "outlier_score",
    "is_outlier_issue",
    "reasons",
    "status",
    "group",
)


def test_judge_columns() -> None:
    frame = samples([1.0, 2.0, 3.0], target=[0, 1, 0], prediction=[0, 1, 1], confidence=0.5, el2n=0.1)
    judged = [name for name in SAMPLE_COLUMNS if name != "dataset_row"]  # that of samples drawn at random
    for reference in (None, trusted([1.0, 2.0])):
        assert list(judge(frame, config(), reference).frame) == [*judged, "el2n"]
    assert set(NEW_COLUMNS) <= set(SAMPLE_COLUMNS)


def test_judge_without_reference() -> None:
    done = judge(samples([4.0, 1.0, 3.0, 2.0]), config(review_fraction=0.25))
    frame, facts = done.frame, done.facts
    assert frame["is_outlier_issue"].tolist() == [True, False, False, False]
    assert frame["outlier_score"].tolist() == [0.25, 1.0, 0.5, 0.75]
    assert frame[["p_value", "q_value"]].isna().all().all()
    assert facts.decided_by == "review list"
    assert not facts.evaluable
    assert "no verdict" in facts.why_not
    assert content_of(facts.counts) == {
        "samples": 4,
        "ok": 4,
        "nonfinite": 0,
        "skipped": 0,
        "zero_gradients": 0,
        "tested": 0,
        "outliers": 0,
        "review": 1,
    }


def test_judge_with_reference() -> None:
    norms = [100.0, 200.0, 0.0, 5.0, np.nan]
    done = judge(samples(norms), config(fdr=0.1), trusted(np.arange(1.0, 40.0)))
    frame = done.frame
    np.testing.assert_array_equal(frame["p_value"], [1 / 40, 1 / 40, 1.0, 36 / 40, np.nan])
    np.testing.assert_allclose(frame["q_value"], [0.05, 0.05, 1.0, 1.0, np.nan])
    assert frame["is_outlier_issue"].tolist() == [True, True, False, False, True]
    np.testing.assert_array_equal(frame["outlier_score"], [1 / 40, 1 / 40, 1.0, 36 / 40, 0.0])
    assert frame["reasons"].tolist() == [
        "p = 0.025, q = 0.05 against 39 trusted samples",
        "p = 0.025, q = 0.05 against 39 trusted samples",
        "gradient is exactly zero",
        "",
        "loss or gradient is not finite",
    ]
    assert done.facts.evaluable
    assert done.facts.smallest_flaggable == 1
    assert done.facts.counts.outliers == 2
    assert done.facts.counts.zero_gradients == 1


def test_judge_lower_tail_of_another_score() -> None:
    frame = samples([1.0] * 4, margin=[-9.0, 5.0, np.nan, 7.0])
    done = judge(frame, config(score="margin", tail="lower", fdr=0.1), trusted(np.arange(1.0, 40.0)))
    assert done.frame["is_outlier_issue"].tolist() == [True, False, False, False]
    assert done.frame["status"].tolist() == ["ok", "ok", "skipped", "ok"]
    assert done.frame["reasons"].tolist()[2] == "not judged: margin is undefined"
    assert np.isnan(done.frame["outlier_score"][2])
    assert done.frame["rank"].tolist()[:2] == [1, 2]
    assert (
        judge(frame, config(score="margin", tail="lower", review_fraction=0.3)).frame["reasons"][0]
        == "among the smallest 30 % of margin"
    )


def test_judge_skips_samples_of_reference() -> None:
    frame = samples([1.0, 50.0, 60.0, 70.0])
    known = trusted(
        [1.0, 50.0, 2.0, 3.0], fingerprints=np.array(["0" * 32, f"{1:032x}", f"{2:032x}", "x"], dtype=object)
    )
    done = judge(frame.assign(fingerprint=[f"{row:032x}"[::-1] for row in range(4)]), config(fdr=0.5), known)
    assert done.facts.reference.in_both == 1, "row 0 alone: its digits are the same backwards"
    prints = np.array([f"{row:x}".rjust(16, "a") + "0" * 16 for row in range(4)])
    known = trusted([1.0, 50.0 * (1 + 1e-6), 2.0, 3.0], fingerprints=prints)
    done = judge(frame.assign(fingerprint=prints), config(fdr=0.5), known)
    assert done.frame["q_value"].isna().tolist() == [
        True,
        True,
        False,
        False,
    ], "the third has the old id and another norm"
    assert done.frame["p_value"].notna().all()
    assert done.facts.counts.tested == 2
    assert any("2 samples are in the reference themselves" in each for each in done.facts.caveats)
    assert done.frame["reasons"][1].startswith("in the reference itself")


@pytest.mark.parametrize(("kind", "evaluable"), [("run", False), ("data", False), ("baseline", True)])
def test_judge_all_samples_in_reference(kind: str, evaluable: bool) -> None:
    frame = samples(np.arange(1.0, 30.0))
    frame["fingerprint"] = [f"{row:016x}" for row in range(29)]
    known = trusted(frame["grad_norm"], kind=kind, fingerprints=frame["fingerprint"].to_numpy())
    facts = judge(frame, config(), known).facts
    assert facts.evaluable is evaluable
    assert facts.resolution == "no sample was tested"


def test_judge_small_reference_not_evaluable() -> None:
    facts = judge(samples(np.ones(50)), config(fdr=0.1), trusted([1.0] * 8)).facts
    assert not facts.evaluable
    assert (
        facts.why_not
        == "50 samples can't be flagged, whatever their scores: the reference has 8 samples to hold them"
        " against; it takes 9 or more at a false discovery rate of 0.1"
    )
    assert facts.smallest_flaggable is None
    facts = judge(samples(np.ones(50)), config(fdr=0.1), trusted([1.0] * 99)).facts
    assert facts.evaluable
    assert facts.resolution.startswith(
        "99 trusted samples can tell 5 or more outliers among 50 samples, and never fewer"
    )


def test_judge_reference_sample_without_score() -> None:
    done = judge(samples([10.0]), config(), trusted([1.0, 2.0, np.nan]))
    assert done.frame["p_value"].tolist() == [2 / 4]
    assert any("1 of the trusted samples have no finite score" in each for each in done.facts.caveats)


def test_judge_groups_and_small_groups() -> None:
    target = np.repeat([0, 1, 2, 3], [60, 60, 3, 2])
    norms = np.where(target == 1, 1000.0, 1.0) + np.arange(125)
    done = judge(samples(norms, target=target), config(group_by="class", min_group=50, review_fraction=0.04))
    frame, facts = done.frame, done.facts
    assert frame["group"].unique().tolist() == ["0", "1", OTHER]
    assert facts.groups.joined == ["2", "3"]
    listed = frame[frame["is_outlier_issue"]]
    assert listed["group"].value_counts().to_dict() == {"0": 2, "1": 2, OTHER: 1} or len(listed) == 5
    assert frame.groupby("group")["percentile"].max().tolist() == [100.0] * 3
    assert facts.groups.each[OTHER].samples == 5


def test_judge_group_missing_in_reference_not_evaluable() -> None:
    known = trusted(np.arange(1.0, 201.0), np.repeat(["0", "1"], 100))
    frame = samples(np.ones(30), target=np.repeat([0, 1, 7], 10))
    facts = judge(frame, config(group_by="class"), known).facts
    assert not facts.evaluable
    assert facts.why_not.startswith(f"10 samples of the groups {OTHER} can't be flagged")
    assert judge(frame[:20], config(group_by="class"), known).facts.evaluable


def test_judge_row_without_a_position_that_counts_is_skipped() -> None:
    frame = samples(np.array([1.0, 0.0, 2.0]), length=[3, 0, 1])
    ranked = rank_samples(frame, 0.5)
    assert ranked["status"].tolist() == ["ok", "skipped", "ok"]
    assert ranked["reasons"][1] == "not judged: no position of it counts in the loss"
    assert ranked["rank"].dropna().tolist() == [2, 1]
    assert not ranked["is_outlier_issue"][1]


@pytest.mark.parametrize(
    ("by", "columns", "words"),
    [
        ("class", {}, "the samples have no column 'target'"),
        ("source", {"sourse": 1}, "did you mean sourse?"),
        ("weight", {"weight": [0.5, 1.0]}, "holds real numbers"),
        ("class", {"target": [np.zeros(3), np.zeros(3)]}, "more than one value a sample"),
    ],
)
def test_judge_group_by_refused(by: str, columns: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match="group_by") as caught:
        judge(samples([1.0, 2.0], **columns), config(group_by=by))
    assert words in str(caught.value)


def test_judge_group_of_missing_values() -> None:
    assert labels_of(samples(np.ones(3), source=[1.0, np.nan, 2.0]), "source").tolist() == [
        "1",
        "(missing)",
        "2",
    ]
    assert join_small(np.array(["a", "b"], object), np.array(["a", "a"], object), 2)[0].tolist() == [
        "a",
        OTHER,
    ]


@pytest.mark.parametrize(
    ("score", "words"), [("grad_nrm", "did you mean grad_norm?"), ("id", "no column of numbers 'id'")]
)
def test_judge_score_refused(score: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        judge(samples([1.0, 2.0]), config(score=score))
    assert words in str(caught.value)


def test_judge_compares_norm_with_loss() -> None:
    random = np.random.default_rng(3)
    norms, losses = random.lognormal(size=200), random.lognormal(size=200)
    said = judge(samples(norms).assign(loss=losses), config(review_fraction=0.1)).facts.loss_agreement
    assert said.spearman == pytest.approx(spearmanr(norms, losses).statistic, rel=1e-12)
    top = set(np.argsort(norms)[-20:]) & set(np.argsort(losses)[-20:])
    assert said.top_overlap == len(top) / 20
    assert (said.top, said.shared, said.other) == (20, len(top), "loss")


@pytest.mark.parametrize(("shift", "warned"), [(-1.0, True), (0.0, False), (1.0, True)])
def test_judge_shift_of_all_samples(shift: float, warned: bool) -> None:
    random = np.random.default_rng(6)
    facts = judge(
        samples(np.exp(shift + random.normal(size=800))), config(), trusted(np.exp(random.normal(size=800)))
    ).facts
    assert any("don't look exchangeable" in each for each in facts.caveats) is warned


@pytest.mark.long
@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 1.0, 2.0, np.nan, np.inf]), max_size=6),
    st.lists(st.sampled_from([0.0, 1.0, np.nan]), max_size=4),
    st.booleans(),
)
def test_judge_any_table(norms: list[float], known: list[float], grouped: bool) -> None:
    frame = samples(np.array(norms), target=np.arange(len(norms)) % 2)
    by = {"group_by": "class", "min_group": 2} if grouped else {}
    for reference in (None, trusted(known, np.array(["0"] * len(known), dtype=object) if grouped else None)):
        done = judge(frame, config(**by), reference)
        scores = done.frame["outlier_score"]
        assert scores[done.frame["status"] == "ok"].between(0, 1).all()
        assert (scores[done.frame["status"] == "nonfinite"] == 0).all()
        assert (done.frame["status"] == "nonfinite").tolist() == (~np.isfinite(np.array(norms))).tolist()
        assert done.frame["is_outlier_issue"].tolist() == done.frame["is_outlier_issue"].astype(bool).tolist()
        json.dumps(content_of(done.facts), allow_nan=True)


def test_judge_joined_small_groups() -> None:
    """Classes 1 to 3 are rare here or there; class 3 has no sample of its own. Their norms are a thousand
    times those of class 0.
    """
    known = np.append(np.linspace(1, 2, 60), np.linspace(1000, 2000, 15))
    labels = np.repeat(["0", "1", "2", "3"], [60, 5, 5, 5])
    done = judge(
        samples([1.5, 1500.0, 3000.0], target=[0, 1, 2]), config(group_by="class"), trusted(known, labels)
    )
    assert done.frame["group"].tolist() == ["0", OTHER, OTHER]
    joined = known[60:]
    expected = [(1 + (known[:60] >= 1.5).sum()) / 61, (1 + (joined >= 1500).sum()) / 16, 1 / 16]
    np.testing.assert_allclose(done.frame["p_value"], expected)
    assert done.facts.groups.joined == ["1", "2", "3"]


@pytest.mark.parametrize(
    ("fraction", "count", "listed"),
    [(0.07, 100, 7), (0.14, 50, 7), (0.29, 100, 29), (0.011, 1000, 11), (0.07, 99, 7)],
)
def test_judge_review_fraction(fraction: float, count: int, listed: int) -> None:
    done = judge(samples(np.arange(1.0, count + 1)), config(review_fraction=fraction))
    assert done.frame["is_outlier_issue"].sum() == done.facts.counts.review == listed


def test_judge_baseline_nothing_tested_not_evaluable() -> None:
    reference = replace(trusted(np.arange(1.0, 40.0)), kind="baseline")
    frame = samples([1.0, 2.0, 3.0], margin=np.nan)
    facts = judge(frame, config(score="margin"), reference).facts
    assert facts.counts.skipped == 3
    assert not facts.evaluable
    assert "none has a finite score" in facts.why_not
