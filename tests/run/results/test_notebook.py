"""Results in a notebook: the verdict and the first ranks, with all text of the data escaped."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest

from psgrad.run.results import AnalyzeResult, CheckResult, GateOutcome
from psgrad.run.results.notebook import MISSING, ROWS, cell
from tests.reports import frames, influence_runs


def table_of(page: str) -> tuple[str, list[str], list[list[str]]]:
    """(the text, the headings, the rows); the page must be well-formed."""
    root = ElementTree.fromstring(page)
    said = "\n".join("".join(each.itertext()) for each in root.findall("div"))
    rows = [["".join(each.itertext()) for each in row] for row in root.findall("table/tbody/tr")]
    return said, [str(each.text) for each in root.findall("table/thead/tr/th")], rows


@pytest.fixture
def analyzed() -> AnalyzeResult:
    return frames.result(frames.classification(30))


def test_analyze_shows_the_first_ranks(analyzed: AnalyzeResult) -> None:
    said, headings, rows = table_of(analyzed._repr_html_())
    assert said.startswith("30 samples, ")
    first = analyzed.samples[analyzed.samples["rank"] <= ROWS].sort_values("rank")
    assert [row[headings.index("id")] for row in rows] == [str(each) for each in first["id"]]
    shown = [float(row[headings.index("grad_norm")]) for row in rows]
    np.testing.assert_allclose(shown, first["grad_norm"].to_numpy(float), rtol=1e-3)


def test_analyze_says_what_the_gate_says(analyzed: AnalyzeResult) -> None:
    outcomes = (
        GateOutcome("nonfinite", "failed", "2 samples <b>"),
        GateOutcome("max_outliers", "passed", "0"),
    )
    said, *_ = table_of(replace(analyzed, check=CheckResult(outcomes, (), "run", 30))._repr_html_())
    assert "gate.nonfinite: failed; 2 samples <b>" in said
    assert "gate.max_outliers: passed; 0" in said


def test_texts_of_the_data_are_escaped_and_cut(analyzed: AnalyzeResult) -> None:
    bad = "<script>alert(1)</script>" + "x" * 200
    named = replace(analyzed, samples=analyzed.samples.assign(id=[bad] * 30), class_names=["<i>"] * 99)
    page = named._repr_html_()
    assert "<script" not in page
    assert "<i>" not in page
    assert "x" * 100 not in page
    assert len(table_of(page)[2]) == ROWS


@pytest.mark.every(1)
@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, MISSING),
        (float("nan"), MISSING),
        (np.float32("nan"), MISSING),
        (pd.NA, MISSING),
        (12345, "12345"),
        (np.int64(1), "one"),
        (1.0, "one"),
        (0.123456, "0.1235"),
        (float("inf"), "inf"),
        ([1, 2], "[1, 2]"),
        ("a\x1b[2J", "a\\x1b[2J"),
        (True, "True"),
    ],
)
def test_a_value_of_each_kind(value: object, shown: str) -> None:
    assert cell(value, ["zero", "one"]) == shown


def test_influence_shows_both_sides_of_the_first_queries() -> None:
    result = influence_runs.result(n=40, m=5)
    said, headings, rows = table_of(result._repr_html_())
    assert "40 training examples, 5 queries" in said
    assert headings == ["query", "rank", "helps", "score", "hurts", "score"]
    scores = result.scores.set_index(["query_index", "rank"])
    expected = [
        [str(scores.loc[(query, rank), "query_id"]), str(rank)]
        + [
            text
            for side in (rank, -rank)
            for text in (
                str(scores.loc[(query, side), "train_id"]),
                f"{scores.loc[(query, side), 'score']:.4g}",
            )
        ]
        for query in scores.index.get_level_values(0).unique()[:3]
        for rank in (1, 2, 3)
    ]
    assert rows == expected


def test_influence_with_one_side_alone_leaves_the_other_empty() -> None:
    _, _, rows = table_of(influence_runs.result(n=6, m=1, nonfinite=0, scores=np.ones((1, 6)))._repr_html_())
    assert rows
    assert all(row[2] and row[4:] == ["", ""] for row in rows)
