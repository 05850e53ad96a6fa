"""Ticks: enough to read a scale by, told apart, in numbers without a corner that has to be added."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from psgrad.reports.drawing import Plot, figure_with_axes
from psgrad.reports.measure_plots import matrix, spectrum
from psgrad.reports.ticks import LogTicks, log_axis
from psgrad.run.results import MeasureResult


def _ticks(figure: Figure, axis: str = "x") -> list[str]:
    """The words of the ticks within the axis, as they are drawn."""
    Plot("name", "title", "", figure).png()
    axes = figure.axes[0]
    low, high = sorted(axes.get_xlim() if axis == "x" else axes.get_ylim())
    labels = axes.get_xticklabels() if axis == "x" else axes.get_yticklabels()
    places = axes.get_xticks() if axis == "x" else axes.get_yticks()
    return [label.get_text() for label, place in zip(labels, places, strict=True) if low <= place <= high]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.45, 1.9, ["0.5", "1", "1.5"]),
        (0.003, 0.7, ["0.01", "0.1"]),
        (1e-3, 1e3, ["0.001", "0.01", "0.1", "1", "10", "100", "1,000"]),
        (2.3, 9.0, ["4", "6", "8"]),
        (1.1374, 1.1476, ["1.1375", "1.14", "1.1425", "1.145", "1.1475"]),
        (3e-7, 4e-7, ["3.2×10⁻⁷", "3.4×10⁻⁷"]),
    ],
)
def test_log_axis_has_three_ticks_or_more(low: float, high: float, expected: list[str]) -> None:
    figure, axes = figure_with_axes(3)
    axes.plot([low, high], [1, 2])
    log_axis(axes, "x")
    axes.set_xlim(low, high)
    found = _ticks(figure)
    assert len(found) > 2
    assert len(set(found)) == len(found)
    assert [tick for tick in expected if tick not in found] == []


def test_log_ticks_of_what_is_counted_are_whole() -> None:
    assert LogTicks(whole=True).tick_values(0.9, 3.2) == [1, 2, 3]
    assert LogTicks().tick_values(0.9, 3.2) != [1, 2, 3]
    assert LogTicks().tick_values(-1, 1) == []


@pytest.mark.parametrize(
    "values",
    [(0.99988, 0.99998), (-1e-4, 1e-4), (0.00482, 0.00494), (1.5e8, 1.6e8), (0.0, 1.0), (-20.0, 20.0)],
)
def test_linear_ticks_need_no_offset_and_do_not_collide(values: tuple[float, float]) -> None:
    figure = Figure(figsize=(8, 2.3), layout="constrained")
    for axes in figure.subplots(1, 2):
        axes.plot(values, [1, 2])
    found = _ticks(figure)
    assert len(found) > 2
    assert len(set(found)) == len(found)
    axes = figure.axes[0]
    assert axes.xaxis.get_offset_text().get_text() == ""
    low, high = axes.get_xlim()
    drawn = [
        label
        for label, place in zip(axes.get_xticklabels(), axes.get_xticks(), strict=True)
        if low <= place <= high
    ]
    FigureCanvasAgg(figure).draw()  # at the resolution that places are measured in
    boxes = [label.get_window_extent() for label in drawn]
    assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))


def _measure() -> MeasureResult:
    return MeasureResult("ntk", "Kernel", "K", "squared")


def test_spectrum_places_are_whole_and_its_share_is_no_whole_that_it_is_not() -> None:
    plot = spectrum(_measure(), "spectrum", np.array([1.0, *[1e-6] * 19]))
    assert all(float(tick) == round(float(tick)) for tick in _ticks(plot.figure))
    assert "99.998% of their sum; the first ten are 99.999% of it" in plot.caption
    assert "100" not in plot.caption
    assert "the first ten" not in spectrum(_measure(), "spectrum", np.arange(1.0, 8.0)).caption


def test_matrix_axes_say_what_rows_and_columns_are() -> None:
    plot = matrix(
        _measure(), "rank_correlation", np.array([[1, 0.9999898], [0.9999888, 1]]), "checkpoint", ["1", "2"]
    )
    axes, bar = plot.figure.axes
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("checkpoint", "checkpoint")
    assert _ticks(plot.figure) == ["1", "2"]
    assert bar.yaxis.get_offset_text().get_text() == ""
