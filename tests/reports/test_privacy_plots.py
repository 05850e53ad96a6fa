"""The figure of a private run: epsilon against steps, of what is public alone."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from matplotlib.axes import Axes

from psgrad.reports.figures import Plot
from psgrad.reports.privacy_plots import epsilon_against_steps
from tests.reports import private_runs


def axes_of(plot: Plot) -> Axes:
    (axes,) = plot.figure.axes
    return axes


def test_the_steps_taken_and_those_planned_are_one_curve() -> None:
    result = private_runs.result(steps=120)
    planned, taken = axes_of(epsilon_against_steps(result)).lines[:2]
    np.testing.assert_allclose(np.column_stack(planned.get_data()), result.curve)
    np.testing.assert_allclose(np.column_stack(taken.get_data()), result.curve[:120], rtol=1e-6)


def test_one_step_is_no_curve() -> None:
    labels = [
        str(line.get_label()) for line in axes_of(epsilon_against_steps(private_runs.result(steps=1))).lines
    ]
    assert "planned (RDP)" in labels
    assert "taken (RDP)" not in labels


def test_the_public_figure_says_what_its_epsilon_means() -> None:
    axes = axes_of(epsilon_against_steps(private_runs.result(target_epsilon=3.0)))
    title = axes.get_title(loc="left")
    assert (
        title
        == "delta 1e-5, add or remove one (one row), Poisson sampling, each record by itself with probability"
        " 0.0712"
    )
    legend = axes.get_legend()
    words = [text.get_text() for text in legend.get_texts()]
    ends = ["after 120 steps: 1.101 (PLD)", "after 120 steps: 1.235 (RDP)"]
    assert words == ["planned (RDP)", "taken (RDP)", *ends, "target 3"]
    assert axes.get_ylabel() == "epsilon at delta 1e-5 (upper bound)"
    assert axes.get_ylim()[0] == 0


def test_an_infinite_epsilon_is_reported_in_words() -> None:
    result = private_runs.result(epsilon_pld=math.inf, epsilon_rdp=math.inf)
    plot = epsilon_against_steps(replace(result, curve=[(1, math.inf), (2, math.inf)]))
    assert [text.get_text() for text in axes_of(plot).texts] == ["no finite epsilon to draw"]
    assert plot.png().startswith(b"\x89PNG")


def test_public_figures_follow_from_what_is_public() -> None:
    one = private_runs.result()
    other = replace(one, steps=one.steps.assign(mean_loss=9.0, batch_size=1))
    assert epsilon_against_steps(one).svg() == epsilon_against_steps(other).svg()
