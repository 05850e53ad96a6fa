"""Each sample's loss against its gradient norm: as a figure, and as the part of the page that is linked with
its tables.
"""

from __future__ import annotations

import html
import re
from typing import Any

import numpy as np
import pandas as pd
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, LogNorm

from psgrad.reports.drawing import (
    DARK,
    REST,
    REVIEW,
    SHADES,
    Plot,
    figure_with_axes,
    legend_above,
    log_bins,
    say_empty,
    scatter,
)
from psgrad.reports.outliers import LISTED
from psgrad.reports.sections import Image
from psgrad.reports.ticks import log_axis
from psgrad.reports.words import count, identifier, label, number
from psgrad.run.results import disagrees
from psgrad.wording import correlation

MAX_POINTS = 4000  # single samples drawn as pixels; above, they are binned

NORM_AXIS = "gradient norm (L2 over all trainable parameters, log scale)"


def loss_against_norm(samples: pd.DataFrame, unit: str = "", listed: str = LISTED) -> Plot:
    """Each sample's loss, in a unit, against its norm: points while they can be told apart, binned above
    that.
    """
    log_loss = bool((samples.loc[samples["status"] == "ok", "loss"] >= 0).all())
    drawn, not_drawn = drawable(samples, ["grad_norm", "loss"] if log_loss else ["grad_norm"])
    figure, axes = figure_with_axes(4.2)
    alt = "Loss against gradient norm: nothing to draw."
    caption = (
        "One point a sample. Wherever the two orders disagree, neither is right by itself: look at both. "
    )
    if not len(drawn):
        say_empty(axes)
    else:
        caption += _draw_points(axes, drawn, listed)
        alt = (
            f"Loss against gradient norm of {count(len(drawn))},"
            f" {count(int(drawn['is_outlier_issue'].sum()))} of them listed."
        )
        log_axis(axes, "x")
        if log_loss:
            log_axis(axes, "y")
        axes.set(xlabel=NORM_AXIS, ylabel=f"loss ({unit})" if unit else "loss")
        if axes.get_legend_handles_labels()[0]:
            legend_above(axes, columns=2)
        if drawn["loss"].nunique() > 1 and drawn["grad_norm"].nunique() > 1:
            spearman = drawn["loss"].rank().corr(drawn["grad_norm"].rank())
            caption += f"Rank correlation of loss and norm (Spearman): {correlation(spearman)}. "
            alt += f" Their rank correlation is {correlation(spearman)}."
    return Plot(
        "loss_against_norm", "Loss against gradient norm", caption + not_drawn, figure, vector=False, alt=alt
    )


def linked_image(plot: Plot, listed: pd.DataFrame, class_names: list[str] | None) -> Image:
    """The figure of `loss_against_norm` as SVG inside the page: each listed sample is an element of its own,
    marked with the sample's row (data-s).

    The other samples are pixels in it. Its colours are the page's own. The figure is changed: its file must
    be written before.
    """
    (axes,) = plot.figure.axes
    for artist in axes.collections:
        artist.set_rasterized(True)
    drawn = plot.adaptive_svg().decode("utf-8")
    log_loss = axes.get_yscale() == "log"
    there = listed[(listed["grad_norm"] > 0) & ((listed["loss"] > 0) | (not log_loss))]
    inside = (
        (axes.transData - axes.transAxes).transform(there[["grad_norm", "loss"]].to_numpy(np.float64))
        if len(there)
        else ()
    )
    box, (width, height) = axes.get_position(), 72 * plot.figure.get_size_inches()
    marks = [
        _mark(row, width * (box.x0 + x * box.width), height * (1 - box.y0 - y * box.height), class_names)
        for row, (x, y) in zip(there.assign(differs=disagrees(there)).to_dict("records"), inside, strict=True)
    ]
    caption = f"{plot.caption} Outlined: the samples of the table below."
    return Image(plot.title, caption, Markup(_page_svg(drawn, plot.alt, "".join(marks))), plot.alt)


def _mark(row: dict[Any, Any], x: float, y: float, class_names: list[str] | None) -> str:
    """A listed sample as an element of its own, at a place in points: artists of matplotlib take ten times as
    long.
    """
    form = f"M{x:.2f},{y:.2f}{_CROSS if row['differs'] else _DISC}"
    colour = "review" if row["is_outlier_issue"] else "rest"
    words = html.escape(_point_words(row, class_names))
    return (
        f'<g class="pt" data-s="{int(row["index"])}"><title>{words}</title><path d="{form}" style="fill:'
        f' var(--plot-{colour}); stroke: var(--plot-ink); stroke-width: 0.6"/></g>'
    )


# From the middle on: a disc and a cross of the size of the other points, and a little more.
_DISC = "m-2.75,0a2.75,2.75 0 1,0 5.5,0a2.75,2.75 0 1,0 -5.5,0z"
_CROSS = (
    "m0,-1.6l1.6,-1.6l1.6,1.6l-1.6,1.6l1.6,1.6l-1.6,1.6"
    "l-1.6,-1.6l-1.6,1.6l-1.6,-1.6l1.6,-1.6l-1.6,-1.6l1.6,-1.6z"
)


def _point_words(row: dict[Any, Any], class_names: list[str] | None) -> str:
    about = (
        f", label {label(row['target'], class_names)}"
        if "target" in row and not np.ndim(row["target"])
        else ""
    )
    return f"{identifier(row['id'])}{about}: norm {number(row['grad_norm'])}, loss {number(row['loss'])}"


def _page_svg(drawn: str, alt: str, marks: str) -> str:
    """An SVG of matplotlib's as an element of the page: no ids that another figure may have, no comments,
    colours by name.
    """
    drawn = drawn[drawn.index("<svg") :]
    drawn = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>|<style.*?</style>", "", drawn, flags=re.DOTALL)
    box = re.search(r'viewBox="[-0-9. ]+"', drawn)
    assert box is not None
    drawn = drawn[drawn.index(">") + 1 :]
    for name, light, _ in SHADES:
        drawn = drawn.replace(light, f"var(--plot-{name})")
    drawn = re.sub(r'(\bid="|href="#|url\(#)', r"\1scatter-", drawn)
    return (
        f'<svg class="scatter" {box[0]} role="img"'
        f' aria-label="{html.escape(alt)}">{drawn.strip().removesuffix("</svg>")}{marks}</svg>'
    )


def drawable(samples: pd.DataFrame, positive: list[str]) -> tuple[pd.DataFrame, str]:
    """The rows that a log axis can show, and a sentence that counts the others."""
    finite = samples[samples["status"] == "ok"]
    drawn = finite[(finite[positive] > 0).all(axis=1)]
    missing = [
        f"{count:,} {what}"
        for count, what in (
            (int((samples["status"] == "nonfinite").sum()), "with a loss or gradient that is not finite"),
            (int((samples["status"] == "skipped").sum()), "that could not be judged"),
            (
                len(finite) - len(drawn),
                f"with a {' or '.join(_SHORT[column] for column in positive)} of exactly zero",
            ),
        )
        if count
    ]
    return drawn, f"Not drawn: {' and '.join(missing)}." if missing else ""


_SHORT = {"grad_norm": "norm", "loss": "loss", "length": "length"}


def _draw_points(axes: Axes, drawn: pd.DataFrame, listed: str) -> str:
    """Draw loss against norm, either group as points or, where it has too many, binned; returns what the
    caption must add.
    """
    binned = []
    for in_review, colour, words in ((False, REST, "other samples"), (True, REVIEW, listed)):
        rows = drawn[drawn["is_outlier_issue"] == in_review]
        if len(rows) > MAX_POINTS:
            _draw_density(axes, rows, within=drawn, colour=colour)
            binned.append(words)
        else:
            wrong = disagrees(rows)
            scatter(axes, rows[~wrong], "grad_norm", (colour, "o"), words)
            scatter(axes, rows[wrong], "grad_norm", (colour, "x"), f"{words}, prediction differs from label")
    return (
        f"Blue: other samples; orange: {listed}. Binned, darker for more samples (log shade):"
        f" {' and '.join(binned)}. "
        if binned
        else ""
    )


def _draw_density(axes: Axes, rows: pd.DataFrame, within: pd.DataFrame, colour: str) -> None:
    low, high = within["loss"].min(), within["loss"].max()
    across = log_bins(within["grad_norm"].to_numpy(float), 110)
    up = (
        log_bins(within["loss"].to_numpy(float), 70)
        if low > 0
        else np.linspace(low, max(high, low + 1e-9), 71)
    )
    counts, _, _ = np.histogram2d(rows["grad_norm"], rows["loss"], bins=[across, up])
    shades = LinearSegmentedColormap.from_list(
        "shades", ["#e4e9ef", REST, DARK] if colour == REST else ["#f7dcc6", REVIEW, "#7a3403"]
    )
    axes.pcolormesh(
        across, up, np.where(counts > 0, counts, np.nan).T, cmap=shades, norm=LogNorm(vmin=1), rasterized=True
    )
