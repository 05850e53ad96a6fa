"""The figures of a private run: what is public follows from the plan, what is private says so in the
picture.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb

from psgrad.reports.figures import Plot
from psgrad.reports.privacy_plots import (
    clipping_by_step,
    epsilon_against_steps,
    losses_by_step,
    norms_before_clipping,
    private_plots,
    write_plots,
)
from psgrad.run.private_runs import PrivateRunFolder
from tests.reports import private_runs


def axes_of(plot: Plot) -> Axes:
    (axes,) = plot.figure.axes
    return axes


def luminance(colour: str) -> float:
    """Relative luminance of WCAG 2.1, without its gamma: what grey a colour prints as."""
    return float(np.dot(to_rgb(colour), (0.2126, 0.7152, 0.0722)))


def test_the_steps_taken_and_those_planned_are_one_curve() -> None:
    result = private_runs.result(steps=120)
    planned, taken = axes_of(epsilon_against_steps(result)).lines[:2]
    np.testing.assert_allclose(np.column_stack(planned.get_data()), result.curve)
    np.testing.assert_allclose(np.column_stack(taken.get_data()), result.curve[:120], rtol=1e-6)


def test_figures_of_one_step_begin_at_zero_and_have_whole_ticks_and_no_line() -> None:
    result = private_runs.result(steps=1)
    for plot in (clipping_by_step(result), losses_by_step(result, "nats")):
        plot.png()
        axes = axes_of(plot)
        low, high = axes.get_xlim()
        ticks = [tick for tick in axes.get_xticks() if low <= tick <= high]
        assert (low, ticks[0]) == (0, 0)
        assert 1 in ticks
        assert all(tick == round(tick) for tick in ticks)
    assert axes.get_ylabel() == "mean loss of the batch (nats)"
    labels = [str(line.get_label()) for line in axes_of(epsilon_against_steps(result)).lines]
    assert "planned (RDP)" in labels
    assert "taken (RDP)" not in labels


def test_steps_between_the_points_of_a_coarse_curve_are_drawn_to_their_end() -> None:
    result = private_runs.result(steps=120)
    coarse = replace(result, curve=result.curve[49::50])
    taken = axes_of(epsilon_against_steps(coarse)).lines[1]
    np.testing.assert_allclose(
        np.column_stack(taken.get_data()), [*coarse.curve[:2], (120, result.step["epsilon_rdp"])]
    )


def test_the_public_figure_says_what_its_epsilon_means() -> None:
    axes = axes_of(epsilon_against_steps(private_runs.result(target_epsilon=3.0)))
    title = axes.get_title(loc="left")
    assert (
        title
        == "delta 1e-5, add or remove one (one row), Poisson sampling, each record by itself with probability"
        " 0.0712"
    )
    legend = axes.get_legend()
    assert legend is not None
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


def test_the_histogram_has_every_norm_and_the_bound() -> None:
    result = private_runs.result()
    axes = axes_of(norms_before_clipping(result))
    assert sum(bar.get_height() for bar in axes.patches) == 1200  # type: ignore[attr-defined]
    assert axes.lines[0].get_xdata()[0] == result.bound  # type: ignore[index]
    share = np.mean(result.norms > 2)
    legend = axes.get_legend()
    assert legend is not None
    assert legend.get_texts()[0].get_text() == f"bound 2; {share:.0%} above"


def test_norms_that_are_zero_or_not_finite_are_counted() -> None:
    result = replace(private_runs.result(), norms=np.array([0.0, np.nan, np.inf, 1.0, 2.0]))
    assert "3 zero or not finite" in norms_before_clipping(result).caption


def test_empty_batches_leave_a_gap() -> None:
    result = private_runs.result()
    gaps = result.steps.assign(clip_fraction=np.nan, mean_loss=np.nan)
    assert axes_of(clipping_by_step(replace(result, steps=gaps))).texts
    gaps.loc[5:9, "mean_loss"] = 1.0
    assert len(axes_of(losses_by_step(replace(result, steps=gaps))).collections[0].get_offsets()) == 5  # type: ignore[arg-type]


def marked(plots: Iterable[Plot]) -> list[bool]:
    return [plot.title.startswith("NOT PRIVATE") for plot in plots]


def test_what_is_not_private_says_so_in_the_picture() -> None:
    result = private_runs.result()
    assert all(marked(private_plots(result)))
    assert not any(marked([epsilon_against_steps(result)]))


def test_public_figures_follow_from_what_is_public() -> None:
    one = private_runs.result()
    other = replace(one, steps=one.steps.assign(mean_loss=9.0, batch_size=1), norms=one.norms * 3, bound=17.0)
    assert epsilon_against_steps(one).svg() == epsilon_against_steps(other).svg()


@pytest.mark.long
def test_each_figure_goes_where_it_belongs(tmp_path: Path) -> None:
    write_plots(private_runs.result(steps=1), PrivateRunFolder(tmp_path))
    files = {str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.rglob("*.png")}
    assert sorted(files) == [
        "private/NOT_PRIVATE_clip_fraction.png",
        "private/NOT_PRIVATE_losses.png",
        "private/NOT_PRIVATE_norms.png",
        "public/epsilon.png",
    ]
    assert all(data.startswith(b"\x89PNG") for data in files.values())


@pytest.mark.long
@pytest.mark.filterwarnings("error")
def test_figures_render_without_warnings_and_leave_matplotlib_as_it_was() -> None:
    before = dict(matplotlib.rcParams)
    result = private_runs.result()
    for plot in [epsilon_against_steps(result), *private_plots(result)]:
        assert plot.png().startswith(b"\x89PNG")
    assert dict(matplotlib.rcParams) == before
