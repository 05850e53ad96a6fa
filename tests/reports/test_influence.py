"""What a person sees of an influence run: the page, its figures and the terminal, each with sign and unit,
harmless and bounded.
"""

from __future__ import annotations

import io
import json
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from psgrad.reports.influence_page import fit_facts, render_influence, write_influence_report
from psgrad.reports.influence_plots import draw_influence_plots
from psgrad.reports.influence_terminal import summary, write_influence
from psgrad.reports.influence_words import examples, signed
from psgrad.run.results import TopSample
from psgrad.run.results.influence import (
    ALL_INDEX,
    SIGN,
    CheckedRemoval,
    InfluenceResult,
    RemovalCheck,
    pairs_of,
    shown_queries,
)
from psgrad.run.results.manifest import read_manifest
from tests.reports.frames import MANIFEST
from tests.reports.influence_runs import UNIT, made_up, result
from tests.reports.test_html import LIMIT_BYTES, Page

EVIL = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&{{7*7}}$x^$"


def _page(found: InfluenceResult) -> Page:
    html = render_influence(found, [])
    assert len(html.encode()) <= LIMIT_BYTES
    page = Page(html)
    assert not {"script", "iframe", "object", "embed", "link", "form", "base"} & set(page.tags)
    for _, name, value in page.attributes:
        assert not name.startswith("on")
        assert name != "href"
        assert name != "src" or value.startswith(("data:image/png;base64,", "data:image/svg+xml;base64,"))
    assert (
        "meta",
        "content",
        "default-src 'none'; img-src data:; style-src 'unsafe-inline'",
    ) in page.attributes
    return page


def _terminal(found: InfluenceResult, top: int = 3, style: str = "terminal") -> str:
    stream = io.StringIO()
    write_influence(found, top, style, stream)
    return stream.getvalue()


class _Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_narrow_terminal_breaks_ids_and_never_cuts_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    found, stream = result(), _Screen()
    write_influence(found, 3, "terminal", stream)
    assert "…" not in stream.getvalue()
    for side in pairs_of(found.scores, ALL_INDEX, 3):
        for score in side["score"]:
            assert signed(score) in stream.getvalue()


def _pictures(page: Page) -> int:
    return sum((tag, name) == ("img", "src") for tag, name, _ in page.attributes)


# -- the page ------------------------------------------------------------------------------------------------


def test_the_page_shows_each_query_with_what_helps_and_hurts_it() -> None:
    found = result()
    page = _page(found)
    assert "All 20 queries" in page.text
    shown = shown_queries(found.queries, 7)
    for query in (ALL_INDEX, *shown[:6]):
        for side in pairs_of(found.scores, query, 6):
            for pair in side.to_dict("records"):
                assert pair["train_id"] in page.text
                assert signed(pair["score"]) in page.text
    titles = [page.text.index(f"Query test-{query:05d}: label") for query in shown[:6]]
    assert titles == sorted(titles)
    assert f"Query test-{shown[6]:05d}" not in page.text
    assert (
        "6 of 20 queries are shown: the worst of those that the model gets wrong, then the worst of the"
        " others." in page.text
    )
    assert _pictures(page) == 6 + 7 * 12


@pytest.mark.long
def test_the_page_says_sign_and_unit_and_where_the_numbers_come_from() -> None:
    text = _page(result(manifest={**MANIFEST, "influence": {"normalize": "self_influence"}})).text
    for words in (
        SIGN.capitalize(),
        f"P{UNIT[1:]}",
        "0.0123",
        "3.1e-13",
        "Spectrum largest",
        "gauss_newton",
        "digits.py:build",
    ):
        assert words in text
    assert "Normalised by" in text
    assert "Nothing here is differentially private" in text
    assert "no method predicts that from one model" in text
    assert "Normalised by" not in _page(result(manifest={"influence": {"normalize": "none"}})).text


def test_a_method_that_predicts_no_removal_says_so() -> None:
    text = _page(
        result(method="gradient_dot", unit="fall of the loss by one step", predicts_removal=False)
    ).text
    assert "This method predicts no retraining" in text
    assert "had the model been trained to the end without this example" not in text
    assert "Fall of the loss by one step" in text


def test_warnings_and_excluded_rows_are_counted_and_named() -> None:
    warnings = [f"not converged: query {number}" for number in range(30)]
    found = result(nonfinite=25, warnings=warnings)
    page = _page(found)
    assert "25 training examples excluded: loss or gradient not finite" in page.text
    gone = found.training.loc[found.training["status"] != "ok", "id"]
    assert [each in page.text for each in gone] == [True] * 20 + [False] * 5
    assert "the others are in self_influence.parquet" in page.text
    assert "not converged: query 19" in page.text
    assert "10 more warnings are in manifest.json" in page.text
    assert "excluded" not in _page(result(nonfinite=0)).text.replace("excluded, not finite", "")


def test_page_checked_removals_and_scores_beyond_the_loss() -> None:
    found = result()
    query = shown_queries(found.queries, 1)[0]
    beyond = (found.scores["query_index"] == query) & (found.scores["rank"] == -1)
    removals = [
        CheckedRemoval("digit-00003", 3, "test-00001", 1, -6.11, -0.0042),
        CheckedRemoval("digit-00007", 7, "digit-00007", None, 48.0, 0.9),
    ]
    told = replace(
        found, scores=found.scores.assign(beyond_loss=beyond), check=RemovalCheck(10, False, removals)
    )
    marked = signed(found.scores.loc[beyond, "score"].item()) + "!"
    for text in (_page(told).text, _terminal(told)):
        for words in (
            "-6.11",
            "-0.00420",
            "itself",
            "+48.0",
            "+0.900",
            "for 10 steps of the full gradient",
            "and is no amount",
            marked,
        ):
            assert words in text
    content = json.loads(_terminal(told, style="json"))
    assert content["check"]["removals"][0] == {
        "train_id": "digit-00003",
        "train_index": 3,
        "query_id": "test-00001",
        "query_index": 1,
        "predicted": -6.11,
        "found": -0.0042,
    }
    assert content["predicts_removal"] is True
    plain = _page(found).text
    assert "and is no amount" not in plain
    assert "predicted and found" not in plain


def test_checked_removals_of_a_short_step_are_compared_over_its_length() -> None:
    """An eighth of a step finds an eighth of what a step would: that is as predicted."""
    removals = [
        CheckedRemoval("a", 3, "q", 1, -0.00587, -0.000703),
        CheckedRemoval("b", 4, "b", None, 0.08, 0.0115),
    ]
    told = replace(result(), check=RemovalCheck(1, False, removals, 0.125))
    for text in (_page(told).text, _terminal(told)):
        assert "for 0.125 of a step" in text
        assert "-0.000734" in text
        assert "It is 0.96 to 1.1 times what is predicted for 0.125 of a step." in text
    whole = RemovalCheck(10, False, [replace(each, found=2 * each.predicted) for each in removals], 0.5)
    assert "those taken had 0.5 of their length. It is 2 times what is predicted." in whole.words
    assert "Full steps" not in RemovalCheck(10, True, [], 0.003).words
    nothing = [replace(removals[0], found=None)]
    told = replace(result(), check=RemovalCheck(0, False, nothing, 0.0, 37.4, at_minimum=False))
    for text in (_page(told).text, _terminal(told)):
        assert "predicted, at no minimum" in text
        assert "would lower it 37 times as far as the removal of one of these rows" in text
        assert "predicted and found" not in text


@pytest.mark.parametrize("calibrated", [True, False])
def test_page_says_whether_scores_are_amounts_and_why(calibrated: bool) -> None:
    unit = UNIT if calibrated else UNIT.replace("in nats", "in nats (uncalibrated)")
    facts = {
        "solver_because": "it fits",
        "leverage": calibrated,
        "calibrated": calibrated,
        "calibrated_because": "of the model",
    }
    text = _page(result(unit=unit, facts=[facts])).text
    assert ("These are amounts: of the model." in text) == calibrated
    assert ("Such amounts are uncalibrated, so rely on their order: of the model." in text) != calibrated
    assert f"Leverage correction{'yes' if calibrated else 'no'}" in text
    assert "Why this solver" in text


def test_page_damping_is_explained_and_no_headline() -> None:
    found = result(facts=[{"damping": 0.0004983, "mean_eigenvalue": 0.0004983}])
    html = render_influence(found, [])
    headline = html[html.index("<body") : html.index("What was asked")]
    assert "damping" not in headline.lower()
    assert "0.0004983 (1 × the mean eigenvalue)" in html
    assert "Keep it unless" in html


def test_an_excluded_query_is_named_and_not_shown() -> None:
    found = result(m=3)
    page = _page(replace(found, queries=found.queries.assign(status=["nonfinite", "ok", "ok"])))
    assert "1 query excluded" in page.text
    assert "Query test-00000" not in page.text
    assert "All 2 queries" in page.text


def test_several_checkpoints_have_a_spread_and_each_its_facts() -> None:
    found = result(checkpoints=2, inputs=None)
    two = replace(found, facts=[{"damping": 0.25}, {"damping": 0.75}])
    page = _page(two)
    assert "over checkpoints" in page.text
    assert "0.25, 0.75" in page.text
    pair = pairs_of(found.scores, shown_queries(found.queries, 1)[0], 1)[0].iloc[0]
    assert f"± {pair['score_std']:.2g}" in page.text
    assert "correlate by 0.40 (median over queries)" in page.text
    assert "among the strongest of 50% of them" in page.text
    assert "correlation of two checkpoints" in page.text


def test_markup_from_ids_classes_texts_and_facts_stays_text() -> None:
    found = result(40, 2, inputs="text")
    evil = replace(
        found,
        scores=found.scores.assign(train_id=EVIL),
        queries=found.queries.assign(id=EVIL),
        training=found.training.assign(id=EVIL),
        manifest=read_manifest(
            {
                "config": {"report": {"title": EVIL}},
                "influence": {"checkpoints": [{"path": EVIL}, {"path": EVIL}], "normalize": EVIL},
            }
        ),
        method=EVIL,
        unit=EVIL,
        measurement=EVIL,
        training_inputs={row: TopSample(row, text=EVIL) for row in found.training_inputs},
        facts=[{EVIL: EVIL}],
        warnings=[EVIL],
        class_names=[EVIL] * 10,
    )
    page = _page(evil)
    assert "<script>alert(1)</script>" in page.text
    assert "{{7*7}}" in page.text


@pytest.mark.parametrize(
    "found",
    [
        pytest.param(result(1, 1, nonfinite=0), id="one of each"),
        pytest.param(result(5, 3, nonfinite=5), id="nothing finite"),
        pytest.param(result(6, 2, scores=np.zeros((2, 6))), id="all zero"),
        pytest.param(result(6, 2, scores=-np.ones((2, 6))), id="all hurt"),
        pytest.param(result(6, 2, scores=np.full((2, 6), 1e-30)), id="tiny"),
        pytest.param(result(6, 2, inputs=None, manifest={}, facts=[], shown={}), id="nothing known"),
        pytest.param(result(30, 2, inputs="text", checkpoints=2), id="text"),
        pytest.param(replace(result(6, 2), query_inputs={}), id="a query without a picture"),
    ],
)
def test_every_shape_of_result_is_reported(found: InfluenceResult) -> None:
    html = render_influence(found, draw_influence_plots(found))
    assert "This run" in Page(html).text
    assert found.folder.name in _terminal(found)


def test_results_without_targets_or_self_influence_are_reported() -> None:
    found = result(20, 2, inputs=None)
    bare = replace(
        found,
        queries=found.queries.drop(columns=["target", "prediction", "confidence", "measurement"]),
        training=found.training.drop(columns=["target", "prediction", "confidence", "self_influence"]),
    )
    plots = draw_influence_plots(bare)
    assert "self_influence" not in [plot.name for plot in plots]
    assert "Self-influence against loss" not in Page(render_influence(bare, plots)).text
    assert "label" not in _terminal(bare)


@pytest.mark.long
def test_the_page_is_small_with_the_largest_inputs() -> None:
    found = result(
        200,
        10,
        inputs="large",
        class_names=["c" * 5000] * 10,
        facts=[{f"fact {i}": "f" * 9999 for i in range(999)}],
    )
    page = _page(found)
    assert _pictures(page) == 6 + 7 * 12
    assert page.tags.count("dt") < 60
    text = TopSample(0, text="ü" * 10**6)
    _page(
        replace(
            found,
            training_inputs=dict.fromkeys(found.training_inputs, text),
            query_inputs=dict.fromkeys(range(6), text),
        )
    )


@pytest.mark.sweep
def test_many_examples_make_no_large_report() -> None:
    found = result(100_000, 2, k=10)
    files: dict[str, bytes] = {}
    began = time.process_time()
    write_influence_report(found, files.__setitem__)
    assert time.process_time() - began < 10
    assert len(files["report.html"]) < 1_000_000
    assert list(files) == [
        *(f"plots/{name}.png" for name in ("score_distributions", "self_influence")),
        "report.html",
    ]


def test_nested_facts_get_one_name_each() -> None:
    facts = {"mean_eigenvalue": 2, "spectrum": {"largest": 3, "by_layer": {"0": 1}}, "residual": None}
    assert fit_facts(result(facts=[facts]))[2:] == [
        ("Mean eigenvalue", "2"),
        ("Spectrum largest", "3"),
        ("Spectrum by layer 0", "1"),
    ]


# -- the terminal --------------------------------------------------------------------------------------------


def test_the_terminal_has_sign_and_unit_then_both_sides_of_each_query() -> None:
    found = result()
    lines = _terminal(found).splitlines()
    assert lines[0] == f"influence function; {SIGN}"
    assert lines[1] == f"unit: {UNIT}"
    assert lines[3] == "All 20 queries"
    assert lines[4].split() == ["rank", "helps", "id", "label", "model", "hurts", "id", "label", "model"]
    helps, hurts = (side.to_dict("records") for side in pairs_of(found.scores, ALL_INDEX, 3))
    for line, rank, helping, hurting in zip(lines[5:8], "123", helps, hurts, strict=True):
        cells = line.split()
        assert [cells[0], cells[1], cells[2]] == [rank, signed(helping["score"]), helping["train_id"]]
        assert cells[5:7] == [signed(hurting["score"]), hurting["train_id"]]
    assert lines[-1] == "runs/digits-influence"
    assert sum(line.startswith("Query ") for line in lines) == 3


def test_terminal_of_texts_shows_their_beginning() -> None:
    found = result(40, 2, inputs="text")
    lines = _terminal(found).splitlines()
    head = lines.index("All 2 queries") + 1
    assert lines[head].split().count("text") == 2
    helps, _ = pairs_of(found.scores, ALL_INDEX, 1)
    text = found.training_inputs[int(helps["train_index"].iloc[0])].text
    assert text is not None
    assert " ".join(text.split())[:39] in lines[head + 1]
    assert all(line.isprintable() for line in lines)
    query = next(place for place, line in enumerate(lines) if line.startswith("Query "))
    assert lines[query + 1].startswith("  def sample_")
    assert "text" not in _terminal(result())


def test_json_has_all_that_is_ranked_and_no_nan() -> None:
    found = result(checkpoints=2)
    found = replace(found, scores=found.scores.assign(score_std=np.nan))
    content = json.loads(_terminal(found, style="json"), parse_constant=lambda name: pytest.fail(name))
    assert len(content["scores"]) == len(found.scores)
    assert content["sign"] == SIGN
    assert content["unit"] == UNIT
    assert content["scores"][0]["score"] == found.scores["score"].iloc[0]
    assert content["scores"][0]["score_std"] is None


def test_the_summary_counts_what_was_left_out() -> None:
    assert (
        summary(result(nonfinite=1, m=1))
        == "300 training examples scored for 1 query; 1 training example excluded, whose loss or gradient is"
        " not finite"
    )
    assert summary(result(nonfinite=0, m=2)) == "300 training examples scored for 2 queries"


# -- words ---------------------------------------------------------------------------------------------------


def test_an_example_is_described_by_its_own_row() -> None:
    found = result()
    query = shown_queries(found.queries, 1)[0]
    for side, pairs in zip(examples(found, query, 4), pairs_of(found.scores, query, 4), strict=True):
        for example, pair in zip(side, pairs.to_dict("records"), strict=True):
            row: dict[Any, Any] = found.training.loc[pair["train_index"]].to_dict()
            assert (example.id, example.label, example.prediction) == (
                row["id"],
                str(row["target"]),
                str(row["prediction"]),
            )
            assert example.differs == (row["target"] != row["prediction"])
            assert example.input is not None
            np.testing.assert_array_equal(
                example.input.image, made_up(row["id"], int(pair["train_index"]), "image").image
            )
            assert isinstance(pairs, pd.DataFrame)
