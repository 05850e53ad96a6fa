"""The figures draw what they say, count what they leave out, and touch no global state."""

from __future__ import annotations

import subprocess
import sys

import matplotlib
import numpy as np
import pytest
from matplotlib.figure import Figure

from psgrad.quality.ranking import rank_samples
from psgrad.reports.plots import draw_plots, norm_histogram, norms_per_class, norms_per_layer, top_sheet
from psgrad.reports.scatter import loss_against_norm
from psgrad.results import has_classes
from tests.reports import frames


def _texts(figure: Figure) -> list[str]:
    return [label.get_text() for axes in figure.axes for label in axes.get_yticklabels()]


def test_the_histogram_holds_every_finite_sample_once() -> None:
    samples = frames.classification(1797, nonfinite=3)
    (axes,) = norm_histogram(samples).figure.axes
    heights = [bar.get_height() for container in axes.containers for bar in container]  # type: ignore[attr-defined]
    assert sum(heights) == 1794
    assert sum(bar.get_height() for bar in axes.containers[1]) == 18  # type: ignore[attr-defined]
    assert axes.get_xscale() == "log"


def test_zero_and_nonfinite_rows_are_counted_in_the_caption() -> None:
    samples = frames.regression(10).assign(grad_norm=[0.0, 0.0, np.nan, *range(1, 8)])
    caption = norm_histogram(rank_samples(samples.drop(columns="status"), 0.1)).caption
    assert caption.endswith("Not drawn: 1 with a loss or gradient that is not finite and 2 with a norm of exactly zero.")


def test_a_negative_loss_gets_a_linear_axis() -> None:
    samples = frames.regression(50)
    assert loss_against_norm(samples).figure.axes[0].get_yscale() == "log"
    assert loss_against_norm(samples.assign(loss=samples["loss"] - 1)).figure.axes[0].get_yscale() == "linear"


def test_many_points_are_binned_and_none_is_lost() -> None:
    plot = loss_against_norm(frames.classification(20_000, nonfinite=0))
    assert "Binned" in plot.caption
    mesh, *points = plot.figure.axes[0].collections
    assert np.nansum(np.ma.filled(mesh.get_array(), 0)) + sum(len(each.get_offsets()) for each in points) == 20_000


def test_the_rank_correlation_is_spearmans() -> None:
    samples = frames.regression(50).assign(loss=lambda f: f["grad_norm"] ** 3)
    assert "(Spearman): 1.00" in loss_against_norm(samples).caption


def test_classes_have_their_names_and_sizes() -> None:
    samples = frames.classification(100, classes=2, nonfinite=0)
    sizes = samples["target"].value_counts()
    names = _texts(norms_per_class(samples, ["cat", "$dog$"]).figure)
    assert names == [f"cat  (n = {sizes[0]})", f"$dog$  (n = {sizes[1]})"]


def test_of_many_classes_and_layers_the_largest_are_shown_and_the_rest_counted() -> None:
    per_class = norms_per_class(frames.classification(9000, classes=300), None)
    assert "30 of 300 classes" in per_class.caption
    assert len(_texts(per_class.figure)) == 30
    parameters = frames.parameters(300)
    per_layer = norms_per_layer(parameters)
    assert "30 of 300 parameters" in per_layer.caption
    names = [label.get_text() for label in per_layer.figure.axes[0].get_yticklabels()]
    assert names == list(parameters.loc[parameters["share"].nlargest(30).index.sort_values(), "parameter"])


def test_regression_has_no_classes() -> None:
    assert has_classes(frames.classification(10))
    assert not has_classes(frames.regression(10))
    assert [plot.name for plot in draw_plots(frames.result(frames.regression(), inputs=None))] == [
        "norm_histogram",
        "loss_against_norm",
        "norms_per_layer",
    ]


def test_the_sheet_has_a_picture_for_each_top_sample() -> None:
    samples = frames.classification(100)
    inputs = frames.result(samples).top_inputs[:7]
    figure = top_sheet(samples, inputs, None).figure
    assert [len(axes.images) for axes in figure.axes] == [1] * 7 + [0] * 5
    assert str(inputs[0].id) in figure.axes[0].get_title()


@pytest.mark.filterwarnings("error")
def test_figures_render_without_warnings_and_leave_matplotlib_as_it_was() -> None:
    before = dict(matplotlib.rcParams)
    for plot in draw_plots(frames.result(frames.classification(300), class_names=["漢字"] * 10)):
        assert plot.png().startswith(b"\x89PNG")
        assert b"<svg" in plot.adaptive_svg()
        assert plot.alt
    assert dict(matplotlib.rcParams) == before


def test_reports_load_neither_torch_nor_pyplot() -> None:
    script = (
        "import sys, psgrad.reports.write, psgrad.reports.terminal, psgrad.reports.privacy_plots, psgrad.reports.influence; "
        "print([n for n in ('torch', 'matplotlib.pyplot') if n in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.strip() == "[]"
