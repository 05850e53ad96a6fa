"""Two runs side by side, as a figure and as a page."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from markupsafe import Markup
from matplotlib.colors import LinearSegmentedColormap, LogNorm

from psgrad.reports.ci_words import clean
from psgrad.reports.comparison import sentences, tables
from psgrad.reports.drawing import DARK, DASHES, QUIET, REST, Plot, figure_with_axes, say_empty
from psgrad.reports.outliers import score_words
from psgrad.reports.sections import Facts, Page, Section, Text, image, render
from psgrad.reports.ticks import log_axis
from psgrad.reports.words import count
from psgrad.results.findings import Comparison
from psgrad.wording import correlation

MAX_POINTS = 4000  # above, they are binned
_BINS = 160
_HEADLINE = {
    "common": "samples in both",
    "came": "came",
    "went": "went",
    "entered": "entered the list",
    "left": "left the list",
}


def draw_comparison(result: Comparison) -> Plot:
    """Each common sample's score in B against that in A; on the line nothing has changed."""
    a, b = (result.common[column].to_numpy(float) for column in ("score_a", "score_b"))
    figure, axes = figure_with_axes(5.0)
    log = len(a) > 0 and min(a.min(), b.min()) > 0
    if not len(a):
        say_empty(axes, "no sample has a finite score in both")
    else:
        low, high = min(a.min(), b.min()), max(a.max(), b.max())
        axes.plot([low, high], [low, high], color=QUIET, linewidth=0.9, linestyle=DASHES, zorder=1)
        if len(a) <= MAX_POINTS:
            axes.scatter(a, b, s=9, color=REST, alpha=0.6, linewidths=0, zorder=2)
        else:
            edges = np.geomspace(low, high, _BINS) if log else np.linspace(low, high, _BINS)
            colours = LinearSegmentedColormap.from_list("", [REST + "55", DARK])
            binned = np.histogram2d(a, b, bins=[edges, edges])[0].T
            drawn = axes.pcolormesh(
                edges, edges, np.where(binned > 0, binned, np.nan), norm=LogNorm(), cmap=colours, zorder=2
            )
            figure.colorbar(drawn, ax=axes, label="samples per bin (log scale)")
        if log:
            log_axis(axes, "x", "y")
        scale = " (log scale)" if log else ""
        axes.set_xlabel(f"{score_words(clean(result.score))} in A{scale}", parse_math=False)
        axes.set_ylabel(f"{score_words(clean(result.score))} in B{scale}", parse_math=False)
    caption = (
        f"{count(len(a))} that are in both runs and have a score in both. On the line nothing has changed. "
    )
    alt = f"{clean(result.score)} in run B against run A; {sentences(result)[1]}."
    return Plot("comparison", "Score in B against A", caption, figure, vector=False, alt=alt)


def render_page(result: Comparison) -> str:
    """The comparison as HTML."""
    plot, (a, b) = draw_comparison(result), (clean(result.a), clean(result.b))
    warnings = [Text(Markup("<b>Warning:</b> {}").format(clean(each))) for each in result.warnings]
    figures = [(f"{result.counts[key]:,}", words) for key, words in _HEADLINE.items()]
    facts = Facts([("Run A", a), ("Run B", b), ("Score", score_words(clean(result.score)))])
    return render(
        Page(
            title="Two runs compared",
            what=Markup("<bdi>{}</bdi> (A) and <bdi>{}</bdi> (B)").format(a, b),
            private="Scores tell about single samples.",
            headline=[(correlation(result.spearman), "rank correlation (Spearman)"), *figures],
            sections=[
                Section("In short", [*map(Text, sentences(result)), *warnings]),
                Section(plot.title, [replace(image(plot), title="")]),
                *(Section(each.caption, [each]) for each in tables(result)),
                Section("This run", [facts]),
            ],
        )
    )
