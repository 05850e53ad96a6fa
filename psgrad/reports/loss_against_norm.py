"""Each sample's loss against its gradient norm; on the page its marks are linked with the table."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pandas as pd
from markupsafe import Markup
from matplotlib.axes import Axes

from psgrad.reports.figures import (
    INK,
    REST,
    REVIEW,
    Plot,
    binned,
    figure_with_axes,
    legend_above,
    say_empty,
    scatter,
    styled,
)
from psgrad.reports.outliers import LISTED, listed_samples
from psgrad.reports.words import count, identifier, label, number
from psgrad.run.results import disagrees
from psgrad.wording import correlation

MAX_POINTS = 4000  # single samples drawn as pixels; above, they are binned
NORM_AXIS = "gradient norm (L2 over all trainable parameters, log scale)"


@styled
def loss_against_norm(samples: pd.DataFrame, unit: str = "", listed: str = LISTED) -> Plot:
    """Each sample's loss, in a unit, against its norm: points while they can be told apart, binned above
    that. The samples of the page's table are outlined.
    """
    log_loss = bool((samples.loc[samples["status"] == "ok", "loss"] >= 0).all())
    drawn, not_drawn = drawable(samples, ["grad_norm", "loss"] if log_loss else ["grad_norm"])
    figure, axes = figure_with_axes(4.2)
    caption = (
        f"One point a sample, of {count(len(drawn))}. Wherever the two orders disagree, neither is right by"
        " itself: look at both. "
    )
    if not len(drawn):
        say_empty(axes)
    else:
        axes.set(xscale="log", yscale="log" if log_loss else "linear")
        caption += _draw_points(axes, drawn, listed_samples(samples).index, listed)
        caption += "Outlined: the samples of the table of the page. "
        loss = f"loss ({unit})" if unit else "loss"
        axes.set(xlabel=NORM_AXIS, ylabel=loss)
        if log_loss:
            axes.set_ylabel(f"{loss[:-1]}, log scale)" if unit else "loss (log scale)")
        if axes.get_legend_handles_labels()[0]:
            legend_above(axes, columns=2)
        if drawn["loss"].nunique() > 1 and drawn["grad_norm"].nunique() > 1:
            spearman = correlation(drawn["loss"].rank().corr(drawn["grad_norm"].rank()))
            caption += f"Rank correlation of loss and norm (Spearman): {spearman}. "
    return Plot("loss_against_norm", "Loss against gradient norm", caption + not_drawn, figure)


def linked_svg(plot: Plot, listed: pd.DataFrame, class_names: list[str] | None) -> Markup:
    """The figure of `loss_against_norm` as an element of the page, in which each listed sample is marked with
    its row (data-s) and has its words.
    """
    rows: dict[int, Mapping[Any, Any]] = {int(row["index"]): row for row in listed.to_dict("records")}
    for prefix, address in (("", _SVG), ("xlink", "http://www.w3.org/1999/xlink")):
        ET.register_namespace(prefix, address)
    svg = ET.fromstring(plot.svg())
    svg.attrib = {"class": "scatter", "viewBox": svg.attrib["viewBox"], "role": "img", "aria-label": plot.alt}
    for group in svg.iter(f"{{{_SVG}}}g"):
        if (name := group.get("id", "")).startswith(_ROWS):
            marks = [
                each for part in group.findall(f"{{{_SVG}}}g") for each in part.iter() if each is not part
            ]
            marks = marks or group.findall(f"{{{_SVG}}}path")
            for mark, row in zip(marks, name.removeprefix(_ROWS).split("-"), strict=True):
                mark.attrib |= {"class": "pt", "data-s": row}
                ET.SubElement(mark, f"{{{_SVG}}}title").text = _point_words(rows[int(row)], class_names)
    # Inside HTML an element has no namespaces of its own.
    return Markup(re.sub(r' xmlns(:xlink)?="[^"]*"', "", ET.tostring(svg, encoding="unicode")))


_SVG = "http://www.w3.org/2000/svg"
_ROWS = "rows-"  # what the name of a group of marks begins with; the rows of its samples follow


def _point_words(row: Mapping[Any, Any], class_names: list[str] | None) -> str:
    known = "target" in row and not np.ndim(row["target"])
    about = f", label {label(row['target'], class_names)}" if known else ""
    return f"{identifier(row['id'])}{about}: norm {number(row['grad_norm'])}, loss {number(row['loss'])}"


def drawable(samples: pd.DataFrame, positive: list[str]) -> tuple[pd.DataFrame, str]:
    """The rows that a log axis can show, and a sentence that counts the others."""
    finite = samples[samples["status"] == "ok"]
    drawn = finite[(finite[positive] > 0).all(axis=1)]
    names = " or ".join(column.removeprefix("grad_") for column in positive)
    missing = [
        (int((samples["status"] == "nonfinite").sum()), "with a loss or gradient that is not finite"),
        (int((samples["status"] == "skipped").sum()), "that could not be judged"),
        (len(finite) - len(drawn), f"with a {names} of exactly zero"),
    ]
    said = " and ".join(f"{n:,} {what}" for n, what in missing if n)
    return drawn, f"Not drawn: {said}." if said else ""


def _draw_points(axes: Axes, drawn: pd.DataFrame, marked: pd.Index[Any], listed: str) -> str:
    """Draw loss against norm; returns what the caption must add. The `marked` samples, those of the page's
    table, are marks of their own, the others of either group points or, where there are too many, binned.
    """
    shown, wrong = drawn.index.isin(marked), disagrees(drawn).to_numpy(bool)
    in_bins = []
    for in_review, colour, words in ((False, REST, "other samples"), (True, REVIEW, listed)):
        inside = drawn["is_outlier_issue"].to_numpy(bool) == in_review
        if (inside & ~shown).sum() > MAX_POINTS:
            many = drawn[inside & ~shown]
            binned(axes, many["grad_norm"].to_numpy(), many["loss"].to_numpy(), colour)
            in_bins.append(words)
        for differs, marker, outlined in ((False, "o", "o"), (True, "x", "X")):
            said = f"{words}, prediction differs from label" if differs else words
            alike = inside & (wrong == differs)
            if words not in in_bins:
                scatter(axes, drawn[alike & ~shown], "grad_norm", (colour, marker), said)
            if len(rows := drawn[alike & shown]):
                named = words in in_bins or not (alike & ~shown).any()
                marks = axes.scatter(rows["grad_norm"], rows["loss"], s=26, marker=outlined)
                marks.set(
                    color=colour, edgecolor=INK, linewidths=0.6, zorder=3, label=said if named else None
                )
                marks.set_gid(_ROWS + "-".join(map(str, rows["index"])))
    if not in_bins:
        return ""
    return (
        f"Blue: other samples; orange: {listed}. Binned, darker for more samples (log shade):"
        f" {' and '.join(in_bins)}. "
    )
