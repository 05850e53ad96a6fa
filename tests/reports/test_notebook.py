"""Results in a notebook: the verdict, the first ranks with their inputs, and figures; all text of the data is
escaped.
"""

from __future__ import annotations

import base64
import io
from dataclasses import replace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from PIL import Image

from psgrad.reports.analyze_plots import draw_plots
from psgrad.reports.influence_plots import draw_influence_plots
from psgrad.reports.notebook import ROWS, AnalyzeRun, InfluenceRun, cell
from psgrad.reports.words import MISSING
from psgrad.run.results import AnalyzeResult, CheckResult, GateOutcome, TopSample
from tests.reports import frames, influence_runs


def table_of(page: str) -> tuple[str, list[str], list[list[str]]]:
    """(the text, the headings, the rows); the page must be well-formed."""
    root = ElementTree.fromstring(page)
    said = "\n".join("".join(each.itertext()) for each in root.findall("div"))
    rows = [["".join(each.itertext()).strip() for each in row] for row in root.findall("table/tbody/tr")]
    return said, [str(each.text) for each in root.findall("table/thead/tr/th")], rows


@pytest.fixture
def analyzed() -> AnalyzeRun:
    return AnalyzeRun.of(frames.result(frames.classification(30)))


def test_analyze_shows_the_first_ranks(analyzed: AnalyzeRun) -> None:
    said, headings, rows = table_of(analyzed._repr_html_())
    assert said.startswith("30 samples, ")
    first = analyzed.samples[analyzed.samples["rank"] <= ROWS].sort_values("rank")
    assert [row[headings.index("id")] for row in rows] == [str(each) for each in first["id"]]
    shown = [float(row[headings.index("grad_norm")]) for row in rows]
    np.testing.assert_allclose(shown, first["grad_norm"].to_numpy(float), rtol=1e-3)


def test_analyze_says_what_the_gate_says(analyzed: AnalyzeRun) -> None:
    outcomes = (
        GateOutcome("nonfinite", "failed", "2 samples <b>"),
        GateOutcome("max_outliers", "passed", "0"),
    )
    said, *_ = table_of(replace(analyzed, check=CheckResult(outcomes, (), "run", 30))._repr_html_())
    assert "gate.nonfinite: failed; 2 samples <b>" in said
    assert "gate.max_outliers: passed; 0" in said


def test_texts_of_the_data_are_escaped_and_cut(analyzed: AnalyzeRun) -> None:
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
    result = InfluenceRun.of(influence_runs.result(n=40, m=5))
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
    one_side = influence_runs.result(n=6, m=1, nonfinite=0, scores=np.ones((1, 6)))
    _, _, rows = table_of(InfluenceRun.of(one_side)._repr_html_())
    assert [row[1] for row in rows] == ["1", "2", "3"]  # the query, and not "(all)" as well
    assert all(row[2] and row[4:] == ["", ""] for row in rows)


def pictures(page: str) -> list[np.ndarray]:
    """The pixels of each picture of a page, in its order."""
    sources = [str(each.get("src")) for each in ElementTree.fromstring(page).iter("img")]
    return [np.asarray(Image.open(io.BytesIO(base64.b64decode(each.partition(",")[2])))) for each in sources]


def test_images_are_beside_the_first_ranks(analyzed: AnalyzeRun) -> None:
    first = analyzed.samples[analyzed.samples["rank"] <= 2].sort_values("rank")["id"]
    images = [np.full((4, 5), shade, np.float32) for shade in (0.0, 1.0)]
    inputs = [TopSample(each, image) for each, image in zip(first, images, strict=True)]
    page = replace(analyzed, top_inputs=inputs[::-1])._repr_html_()
    black, white = pictures(page)
    assert (black.shape[:2], black.max(), white.min()) == ((4, 5), 0, 255)
    texts = [TopSample(each, text=f"<b>{each}") for each in first]
    _, headings, rows = table_of(replace(analyzed, top_inputs=texts)._repr_html_())
    place = headings.index("id") + 1
    assert headings[place] == "input"
    assert [row[place] for row in rows][:3] == [f"<b>{first.iloc[0]}", f"<b>{first.iloc[1]}", ""]


def test_images_of_queries_and_examples_are_beside_their_ids() -> None:
    result = InfluenceRun.of(influence_runs.result(n=40, m=1))
    best = result.scores[result.scores["rank"] == 1].iloc[-1]
    shown = {int(best["train_index"]): TopSample("t", np.ones((3, 3), np.float32))}
    page = replace(result, query_inputs={}, training_inputs=shown)._repr_html_()
    assert {picture.min() for picture in pictures(page)} == {255}
    assert f"{best['train_id']} <img" in page


@pytest.mark.parametrize(
    "result",
    [frames.result(frames.classification(30)), influence_runs.result(n=40, m=5)],
    ids=["analyze", "influence"],
)
def test_each_plot_is_a_method_that_gives_a_figure(result: Any) -> None:
    run = AnalyzeRun.of(result) if isinstance(result, AnalyzeResult) else InfluenceRun.of(result)
    drawn = draw_plots(result) if isinstance(result, AnalyzeResult) else draw_influence_plots(result)
    names = [name for name in dir(run.plot) if not name.startswith("_")]
    assert sorted(names) == sorted(plot.name for plot in drawn)
    for name in names:
        figure = getattr(run.plot, name)()
        assert isinstance(figure, Figure)
        assert figure.axes
        assert figure._repr_png_().startswith(b"\x89PNG")
    with pytest.raises(AttributeError, match=r"^there is no plot 'norm' of this run; it has .*"):
        _ = run.plot.norm
