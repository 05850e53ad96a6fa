"""The two rankings, by norm and by loss, are compared where a report begins: on the page and on the
terminal.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from psgrad.reports.analyze_page import render
from psgrad.reports.analyze_plots import norm_histogram
from psgrad.reports.analyze_terminal import summary
from psgrad.reports.outliers import rankings_of
from psgrad.run.results import AnalyzeResult
from psgrad.run.results.manifest import OutlierFacts, read
from tests.reports import frames


def outliers(
    spearman: float = 0.99996, shared: int = 8, score: str = "grad_norm", other: str = "loss", **more: Any
) -> dict[str, Any]:
    agreement = {
        "spearman": spearman,
        "top": 18,
        "expected": 17.7,
        "shared": shared,
        "top_overlap": shared / 18,
        "other": other,
        "words": "w",
        **more,
    }
    return {"decided_by": "review", "score": score, "loss_agreement": agreement}


def run(**changes: Any) -> AnalyzeResult:
    return frames.result(
        frames.classification(300), manifest={**frames.MANIFEST, "outliers": outliers(**changes)}
    )


def plain(page: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", "", page.split("</style>")[-1]))


def test_tops_that_disagree_are_said_first_and_loudly_and_the_loss_is_offered() -> None:
    page = render(run(), [norm_histogram(frames.classification(20))])
    said = (
        "Gradient norm and loss disagree about which samples to look at first: only 8 of the first 18 by"
        " gradient norm are among the first 18 by loss (44%), although the rank correlation over all samples"
        " is 0.9999, at which 17.7 are expected."
    )
    words = plain(page)
    assert f"What stands out {said}" in words  # nothing stands before it
    assert 'id="rankings" class="loud"' in page
    assert (
        "--set analyze.outliers.score=loss, or analyze.outliers.score: loss in the config, ranks and judges"
        " by it." in words
    )
    assert "8 of 18" in words.split("What stands out")[0]  # among the headline figures
    assert "1.00" not in words.split("Samples to look at first")[0]


@pytest.mark.parametrize(
    ("top", "shared", "expected"),
    [
        (
            18,
            0,
            "look at first: none of the first 18 by gradient norm is among the first 18 by loss, although",
        ),
        (
            18,
            1,
            (
                "look at first: only 1 of the first 18 by gradient norm is among the first 18 by loss (6%),"
                " although"
            ),
        ),
        (1, 0, "Gradient norm and loss: the first by gradient norm is not the first by loss, and"),
        (1, 1, "Gradient norm and loss agree: the first by gradient norm is the first by loss, and"),
    ],
)
def test_tops_of_one_and_tops_without_any_in_common(top: int, shared: int, expected: str) -> None:
    facts = outliers()
    agreement = {**facts["loss_agreement"], "top": top, "shared": shared}
    found = rankings_of(read(OutlierFacts, {**facts, "loss_agreement": agreement}))
    assert found is not None
    assert expected in found.sentence


@pytest.mark.long
def test_the_overlap_is_said_once_beside_the_headline() -> None:
    listed = len(
        frames.result(frames.classification(300)).samples.query("is_outlier_issue and status == 'ok'")
    )
    once = run(top=listed, shared=1)
    words = (
        plain(render(once, [norm_histogram(frames.classification(20))]))
        .split("What stands out")[2]
        .split("How large")[0]
    )
    assert words.count("by loss") == 1  # in the first sentence
    assert "Agreement" not in words
    assert "largest by loss" not in words
    once = run(top=listed + 5, shared=1)
    assert "are also among" in plain(render(once, [norm_histogram(frames.classification(20))]))


def test_the_terminal_says_so_too() -> None:
    _, disagreement, offer, *_ = summary(run()).splitlines()
    assert disagreement.startswith(
        "Gradient norm and loss disagree about which samples to look at first: only 8 of the first 18"
    )
    assert offer.endswith("--set analyze.outliers.score=loss ranks and judges by it")


def test_tops_that_agree_are_said_quietly() -> None:
    page = render(run(shared=18), [norm_histogram(frames.classification(20))])
    assert (
        "Gradient norm and loss agree: 18 of the first 18 by gradient norm are among the first 18 by loss"
        " (100%)" in plain(page)
    )
    assert 'class="loud"' not in page
    assert "--set analyze.outliers.score=loss" not in summary(run(shared=18))


@pytest.mark.parametrize(
    ("top", "shared", "expected", "alarm"),
    [
        (2, 0, 1.8, False),  # a few rows
        (9, 0, 8.9, False),
        (10, 0, 8.9, True),
        (18, 2, 1.1, False),  # as many as expected
        (18, 10, 12.0, False),
        (18, 5, 12.0, True),
        (18, 5, None, False),  # of an older run
    ],
)
def test_rankings_disagree_beyond_chance_alone(
    top: int, shared: int, expected: float | None, alarm: bool
) -> None:
    changed = run(top=top, shared=shared, expected=expected)
    page, words = render(changed, [norm_histogram(frames.classification(20))]), summary(changed)
    assert ('class="loud"' in page) == alarm
    assert ("disagree" in words) == alarm
    assert ("--set analyze.outliers.score=loss" in words) == alarm
    if expected is not None:
        assert f"at which {expected:.1f} are expected" in words


def test_a_gap_is_said_on_the_page_and_on_the_terminal() -> None:
    facts = {**outliers(), "gap": {"rows": 6, "factor": 8.04}}
    found = frames.result(frames.classification(300), manifest={**frames.MANIFEST, "outliers": facts})
    said = "6 samples stand out by gradient norm: the next is 8.0 times smaller"
    assert said in summary(found).splitlines()
    assert f"{said}." in plain(render(found, [norm_histogram(frames.classification(20))]))
    assert "stand out by" not in summary(run())


def test_a_run_that_is_ranked_by_loss_says_so_and_does_not_offer_it() -> None:
    page = plain(render(run(score="loss", other="grad_norm"), [norm_histogram(frames.classification(20))]))
    assert "Loss and gradient norm disagree" in page
    assert "--set analyze.outliers.score=loss" not in page
    assert "ranks the examples by another score, the loss" in page
    assert "Which training examples are first by loss?" in page
    assert "pull hardest" not in page
    assert "of the first ranks by loss" in page


@pytest.mark.parametrize(
    "facts",
    [{}, {"loss_agreement": {"spearman": None, "top": None, "shared": None}}, {"loss_agreement": {}}],
)
def test_what_can_not_be_compared_is_not(facts: dict[str, Any]) -> None:
    assert rankings_of(read(OutlierFacts, facts)) is None
    assert "disagree" not in render(
        frames.result(frames.classification(20), manifest={"outliers": facts}),
        [norm_histogram(frames.classification(20))],
    )
