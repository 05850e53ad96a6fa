"""The figures of an influence report: they draw what they say, with sign and unit, and count what they leave
out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from psgrad.reports.influence_plots import (
    draw_influence_plots,
    score_distributions,
    self_influence_against_loss,
)
from psgrad.run.results.influence import SIGN, shown_queries
from tests.reports.influence_runs import UNIT, result


def _words(figure: Figure) -> str:
    said = [text.get_text() for axes in figure.axes for text in axes.texts]
    said += [
        words for axes in figure.axes for words in (axes.get_title(), axes.get_xlabel(), axes.get_ylabel())
    ]
    return " ".join([*said, figure.get_suptitle(), figure.get_supxlabel()]).replace("\n", " ")


def _ticks(axes: Axes) -> list[tuple[float, float]]:
    """The strongest scores, drawn as ticks under their rows: (row, score)."""
    return [
        (round(float(row)), float(score))
        for line in axes.lines
        if line.get_marker() == "|"
        for score, row in zip(*line.get_data(), strict=True)
    ]


def test_distributions_have_each_querys_strongest_on_its_row() -> None:
    found = result()
    (axes,) = score_distributions(found).figure.axes
    columns = [found.training["overall"].to_numpy(), *found.shown.values()]
    expected = []
    for row, values in enumerate(columns):
        finite = np.sort(values[np.isfinite(values)])
        expected += [(row, score) for score in [*finite[-10:], *finite[:10]]]
    assert sorted(_ticks(axes)) == sorted(expected)
    shown = shown_queries(found.queries, 6)
    assert list(found.shown) == shown
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "(all)",
        *(f"test-{query:05d}" for query in shown),
    ]
    assert UNIT in axes.get_xlabel().replace("\n", " ")
    assert SIGN in axes.get_xlabel().replace("\n", " ")
    helping = np.nanmean(np.where(np.isnan(columns[1]), np.nan, columns[1] > 0))
    assert f"{helping:.0%}" in _words(axes.figure)  # type: ignore[arg-type]


def test_no_score_is_off_the_axis_of_distributions_and_most_are_about_its_linear_part() -> None:
    scores = np.concatenate([np.linspace(-1, 1, 590), np.linspace(10, 500, 10)]).reshape(2, 300)
    (axes,) = score_distributions(result(scores=scores, m=2, nonfinite=0)).figure.axes
    low, high = axes.get_xlim()
    assert low < -1
    assert high > 500
    assert 0.1 < axes.xaxis.get_transform().linthresh < 1.1  # type: ignore[attr-defined]


def test_ridges_are_high_where_the_scores_are() -> None:
    scores = np.array([[-2.0] * 9 + [1.0] * 4 + [3.0]])
    (axes,) = score_distributions(result(14, 1, scores=scores, nonfinite=0)).figure.axes
    heights = {
        round(float(x), 3): -float(y)
        for each in axes.collections
        for path in each.get_paths()
        for x, y in path.vertices
        if y < 0
    }  # x of a bin's edge -> height above row 0
    assert set(np.round(list(heights.values()), 6)) == {
        0.8,
        round(0.8 * np.sqrt(4 / 9), 6),
        round(0.8 * np.sqrt(1 / 9), 6),
    }
    for score, height in ((-2.0, 0.8), (1.0, 0.8 * np.sqrt(4 / 9)), (3.0, 0.8 * np.sqrt(1 / 9))):
        edges = [edge for edge, found in heights.items() if found == pytest.approx(height)]
        assert min(edges) <= score <= max(edges)


def test_each_training_example_is_a_point_and_the_others_are_counted() -> None:
    found = result()
    negative = found.training.assign(
        self_influence=found.training["self_influence"].where(found.training["index"] > 9, -1.0)
    )
    plot = self_influence_against_loss(replace(found, training=negative))
    (axes,) = plot.figure.axes
    drawn = sum(len(each.get_offsets()) for each in axes.collections)  # type: ignore[arg-type]
    usable = (negative["status"] == "ok") & (negative["self_influence"] > 0)
    assert drawn == usable.sum()
    missing = ((negative["status"] == "ok") & (negative["self_influence"] <= 0)).sum()
    assert f"Not drawn: {missing:,} whose" in plot.caption
    said = axes.get_xlabel().replace("\n", " ")
    assert said == "self-influence (log scale): predicted rise of its own loss, in nats, if it were removed"
    assert axes.get_ylabel() == "loss of the training example (nats, log scale)"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"unit": UNIT.replace("in nats", "in nats (uncalibrated)")},
            "rise of its own loss, in nats (uncalibrated), if it were removed",
        ),
        (
            {"unit": "predicted fall of the query's margin, in nats, if"},
            "predicted rise of its own loss, in nats, if it were removed",
        ),
        ({"unit": "relative, no unit", "predicts_removal": False}, "relative, no unit"),
        ({"unit": "fall of the query's loss", "predicts_removal": False}, "fall of its own loss"),
    ],
)
def test_self_influence_is_reported_as_influence_on_the_own_loss(
    changes: dict[str, Any], expected: str
) -> None:
    (axes,) = self_influence_against_loss(replace(result(), **changes)).figure.axes
    assert expected in axes.get_xlabel().replace("\n", " ")


@pytest.mark.long
@pytest.mark.filterwarnings("error")
def test_figures_render_without_warnings_whatever_the_names_are() -> None:
    found = result(20, 1, class_names=["$x^$ \\frac{ 漢"] * 10)
    evil = replace(
        found,
        unit="$x^$ \\frac{",
        queries=found.queries.assign(id="$y^$"),
        scores=found.scores.assign(train_id="$z_$"),
    )
    for plot in draw_influence_plots(evil):
        assert plot.png().startswith(b"\x89PNG")
