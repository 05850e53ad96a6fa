"""The figures of an influence report: they draw what they say, with sign and unit, and count what they leave
out.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from psgrad.reports.influence_plots import (
    cumulative,
    draw_influence_plots,
    score_distributions,
    self_influence_against_loss,
)
from psgrad.reports.influence_sheets import PER_SIDE, query_sheet
from psgrad.reports.influence_words import signed
from psgrad.results import ALL_INDEX, SIGN, TopSample, carriers, pairs_of, shown_queries
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


@pytest.mark.parametrize("inputs", ["image", "text", None])
def test_a_sheet_has_the_strongest_of_either_sign_with_sign_and_unit(inputs: str | None) -> None:
    found = result(inputs=inputs, checkpoints=2)
    for query in (0, ALL_INDEX):
        words = _words(query_sheet(found, query, "sheet").figure)
        for side in pairs_of(found.scores, query, PER_SIDE):
            assert len(side) == PER_SIDE
            for pair in side.to_dict("records"):
                assert signed(pair["score"]) in words
                assert pair["train_id"] in words
        assert UNIT in words
        assert SIGN in words


def test_a_sheet_of_pictures_shows_each_pairs_own() -> None:
    found = result()
    query = shown_queries(found.queries, 1)[0]
    (axes,) = query_sheet(found, query, "sheet").figure.axes
    pairs = [pair for side in pairs_of(found.scores, query, PER_SIDE) for pair in side.to_dict("records")]
    _, *shown = axes.images  # the first one is the query's
    for image, pair in zip(shown, pairs, strict=True):
        expected = found.training_inputs[pair["train_index"]].image
        assert expected is not None
        np.testing.assert_array_equal(np.asarray(image.get_array())[..., 0], np.round(expected[0] * 255))
        left, right, _, top = image.get_extent()
        above = [
            text.get_text()
            for text in axes.texts
            if left < text.get_position()[0] < right and 0 < top - text.get_position()[1] < 0.15
        ]
        assert above == [signed(pair["score"])]


@pytest.mark.long
def test_sheet_of_table_rows_has_its_values_in_columns_that_do_not_collide() -> None:
    found = result(inputs="text")
    values = tuple((f"measurement_{place}", 1234.5 + place) for place in range(12))
    rows = {index: TopSample(each.id, values=values) for index, each in found.training_inputs.items()}
    long = found.training.assign(
        target="a class with a name",
        prediction="another class with a name",
        id="an identifier of some length",
    )
    changed = replace(
        found,
        training=long,
        training_inputs=rows,
        scores=found.scores.assign(train_id="an identifier of some length"),
    )
    figure = query_sheet(changed, shown_queries(found.queries, 1)[0], "sheet").figure
    FigureCanvasAgg(figure).draw()
    texts = [text for text in figure.axes[0].texts if text.get_text().strip()]
    assert not any(text.get_text() == "…" for text in texts)
    assert sum(text.get_text().endswith("…") for text in texts) > 2  # the last line that there is room for
    for line in {round(text.get_position()[1], 3) for text in texts}:
        boxes = sorted(
            (text.get_window_extent() for text in texts if round(text.get_position()[1], 3) == line),
            key=lambda box: box.x0,
        )
        assert all(left.x1 <= right.x0 for left, right in itertools.pairwise(boxes))
        assert boxes[-1].x1 <= figure.bbox.width


def test_sheet_without_classes_has_no_columns_for_them() -> None:
    found = result(inputs="text")
    without = [frame.assign(target=None, prediction=None) for frame in (found.training, found.queries)]
    bare = replace(found, training=without[0], queries=without[1])
    for changed, expected in ((found, True), (bare, False)):
        drawn = query_sheet(changed, shown_queries(changed.queries, 1)[0], "sheet")
        words = [text.get_text() for text in drawn.figure.axes[0].texts]
        assert ("label" in words, "model" in words, "Bold:" in drawn.caption) == (expected,) * 3
        assert "input" in words
        assert ("–" in words) is False


def test_a_side_without_examples_says_so() -> None:
    found = result(6, 2, scores=-np.ones((2, 6)))
    assert "nothing helps" in _words(query_sheet(found, 0, "sheet").figure)


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


def test_dots_on_the_cumulative_curves_are_the_carriers() -> None:
    found = result()
    plot = cumulative(found)
    (axes,) = plot.figure.axes
    dots = sorted(float(line.get_xdata()[0]) for line in axes.lines if line.get_marker() == "o")  # type: ignore[index]
    columns = [found.training["overall"].to_numpy(), *found.shown.values()]
    assert dots == sorted(carriers(values, share) for values in columns for share in (0.5, 0.9))
    half = np.median([carriers(values, 0.5) for values in found.shown.values()])
    assert f"{half:,.0f} carry half of it" in plot.caption


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
def test_all_queries_come_first_unless_there_is_but_one() -> None:
    found = result()
    names = [plot.name for plot in draw_influence_plots(found)]
    assert names[0] == "all_queries_sheet"
    assert names[-1] == "self_influence"
    assert next(plot.name for plot in draw_influence_plots(result(m=1))) == "query_1_sheet"


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
