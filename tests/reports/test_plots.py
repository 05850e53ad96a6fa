"""The figures draw what they say, count what they leave out, and touch no global state."""

from __future__ import annotations

import subprocess
import sys

import matplotlib
import numpy as np
import pytest
from matplotlib.patches import StepPatch

from psgrad.quality.judging import rank_samples
from psgrad.reports.analyze_plots import (
    MAX_POINTS,
    draw_plots,
    loss_against_norm,
    norm_against_length,
    norm_histogram,
    norms_per_class,
)
from psgrad.reports.figures import Plot
from psgrad.reports.influence_plots import draw_influence_plots
from psgrad.reports.measure_plots import trajectories
from psgrad.reports.privacy_plots import epsilon_against_steps
from psgrad.run.results import has_classes
from psgrad.wording import correlation
from tests.browser.results import measured
from tests.reports import frames, influence_runs, private_runs


def test_norm_against_length_draws_each_sample_and_the_median() -> None:
    samples = frames.classification(500, nonfinite=3)
    samples["length"] = np.arange(len(samples)) % 40 + 1
    plot = norm_against_length(samples)
    drawn = samples[(samples["status"] == "ok") & (samples["grad_norm"] > 0)]
    points = [len(each.get_offsets()) for each in plot.figure.axes[0].collections]
    assert sum(points) == len(drawn)
    assert correlation(drawn["length"].rank().corr(drawn["grad_norm"].rank())) in plot.caption
    assert "norm_against_length" in [each.name for each in draw_plots(frames.result(samples))]


def test_the_histogram_holds_every_finite_sample_once() -> None:
    samples = frames.classification(1797, nonfinite=3)
    (axes,) = norm_histogram(samples).figure.axes
    others, review = [patch.get_data() for patch in axes.patches if isinstance(patch, StepPatch)]
    assert sum(others.values) + sum(review.values - review.baseline) == 1794
    assert sum(review.values - review.baseline) == 18
    assert axes.get_xscale() == "log"


def test_zero_and_nonfinite_rows_are_counted_in_the_caption() -> None:
    samples = frames.regression(10).assign(grad_norm=[0.0, 0.0, np.nan, *range(1, 8)])
    caption = norm_histogram(rank_samples(samples.drop(columns="status"), 0.1)).caption
    assert caption.endswith(
        "Not drawn: 1 with a loss or gradient that is not finite and 2 with a norm of exactly zero."
    )


def test_a_negative_loss_gets_a_linear_axis() -> None:
    samples = frames.regression(50)
    assert loss_against_norm(samples).figure.axes[0].get_yscale() == "log"
    assert loss_against_norm(samples.assign(loss=samples["loss"] - 1)).figure.axes[0].get_yscale() == "linear"


def test_of_many_points_as_many_as_said_are_drawn() -> None:
    plot = loss_against_norm(frames.classification(20_000, nonfinite=0))
    assert "At most 4,000 samples of each colour are drawn" in plot.caption
    drawn = sum(len(each.get_offsets()) for each in plot.figure.axes[0].collections)
    assert drawn == MAX_POINTS + 200  # the review list is a hundredth


def test_classes_have_their_names_and_sizes() -> None:
    samples = frames.classification(100, classes=2, nonfinite=0)
    sizes = samples["target"].value_counts()
    drawn = norms_per_class(samples, ["cat", "$dog$"]).figure.axes
    names = [label.get_text() for axes in drawn for label in axes.get_yticklabels()]
    assert names == [f"cat  (n = {sizes[0]})", f"$dog$  (n = {sizes[1]})"]


def test_regression_has_no_classes() -> None:
    assert has_classes(frames.classification(10))
    assert not has_classes(frames.regression(10))
    assert [plot.name for plot in draw_plots(frames.result(frames.regression(), inputs=None))] == [
        "norm_histogram",
        "loss_against_norm",
        "norms_per_layer",
    ]


@pytest.fixture(scope="module")
def drawn() -> list[Plot]:
    """Figures of every command, as they are laid out for their files."""
    run = frames.result(frames.classification(300))
    private = private_runs.result()
    figures = [*draw_plots(run), epsilon_against_steps(private)]
    figures += draw_influence_plots(influence_runs.result())
    figures += [trajectories(measured(run.samples)["trajectory"], run.samples)]
    for plot in figures:
        plot.png()
    return figures


@pytest.mark.long
def test_logarithmic_axes_say_that_they_are(drawn: list[Plot]) -> None:
    axes = [axis for plot in drawn for each in plot.figure.axes for axis in (each.xaxis, each.yaxis)]
    scales = {
        scale: [axis.get_label_text() for axis in axes if axis.get_scale() == scale]
        for scale in ("log", "symlog")
    }
    assert all("log scale" in label for label in scales["log"])
    assert all("signed log scale: linear about zero" in label for label in scales["symlog"])
    assert min(map(len, scales.values())) > 0


@pytest.mark.long
@pytest.mark.filterwarnings("error")
def test_figures_render_without_warnings_and_leave_matplotlib_as_it_was() -> None:
    before = dict(matplotlib.rcParams)
    for plot in draw_plots(frames.result(frames.classification(300), class_names=["漢字"] * 10)):
        assert plot.png().startswith(b"\x89PNG")
        assert b"<svg" in plot.svg()
        assert plot.alt
    assert dict(matplotlib.rcParams) == before


@pytest.mark.long
def test_reports_load_neither_torch_nor_pyplot() -> None:
    script = (
        "import sys, psgrad.reports.analyze_page, psgrad.reports.terminal, psgrad.reports.privacy_plots,"
        " psgrad.reports.influence_page; print([n for n in ('torch', 'matplotlib.pyplot') if n in"
        " sys.modules])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )
