"""Two runs as one figure and as one page that needs nothing else."""

from __future__ import annotations

import numpy as np
from matplotlib.colors import LinearSegmentedColormap, LogNorm

from psgrad.reports.ci.words import clean
from psgrad.reports.comparison import GROUP_HEADINGS, HEADINGS, group_cells, sections, sentences
from psgrad.reports.drawing import DARK, QUIET, REST, Plot, figure_with_axes, say_empty
from psgrad.reports.page import plot_uri, templates
from psgrad.reports.rankings import score_words
from psgrad.reports.ticks import log_axis
from psgrad.reports.words import count
from psgrad.results.comparison import Comparison
from psgrad.wording import correlation

MAX_POINTS = 4000  # above, they are binned
_BINS = 160
_HEADLINE = {"common": "samples in both", "came": "came", "went": "went", "entered": "entered the list", "left": "left the list"}


def draw_comparison(result: Comparison) -> Plot:
    """Each common sample's score in B against that in A; on the line nothing has changed."""
    a, b = (result.common[column].to_numpy(float) for column in ("score_a", "score_b"))
    figure, axes = figure_with_axes(5.0)
    log = len(a) > 0 and min(a.min(), b.min()) > 0
    if not len(a):
        say_empty(axes, "no sample has a finite score in both")
    else:
        low, high = min(a.min(), b.min()), max(a.max(), b.max())
        axes.plot([low, high], [low, high], color=QUIET, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
        if len(a) <= MAX_POINTS:
            axes.scatter(a, b, s=9, color=REST, alpha=0.6, linewidths=0, zorder=2)
        else:
            edges = np.geomspace(low, high, _BINS) if log else np.linspace(low, high, _BINS)
            colours = LinearSegmentedColormap.from_list("", [REST + "55", DARK])
            binned = np.histogram2d(a, b, bins=[edges, edges])[0].T
            drawn = axes.pcolormesh(edges, edges, np.where(binned > 0, binned, np.nan), norm=LogNorm(), cmap=colours, zorder=2)
            figure.colorbar(drawn, ax=axes, label="samples per bin (log scale)")
        if log:
            log_axis(axes, "x", "y")
        scale = " (log scale)" if log else ""
        axes.set_xlabel(f"{score_words(clean(result.score))} in A{scale}", parse_math=False)
        axes.set_ylabel(f"{score_words(clean(result.score))} in B{scale}", parse_math=False)
    caption = f"{count(len(a))} that are in both runs and have a score in both. On the line nothing has changed. "
    alt = f"{clean(result.score)} in run B against run A; {sentences(result)[1]}."
    return Plot("comparison", "Score in B against A", caption, figure, vector=False, alt=alt)


def render_page(result: Comparison) -> str:
    """The comparison as HTML. All text of the data is escaped."""
    plot = draw_comparison(result)
    return templates.get_template("comparison.html").render(
        title="Two runs compared",
        a=clean(result.a),
        b=clean(result.b),
        headline=[
            (correlation(result.spearman), "rank correlation (Spearman)"),
            *((f"{result.counts[key]:,}", words) for key, words in _HEADLINE.items()),
        ],
        facts=[("Run A", clean(result.a)), ("Run B", clean(result.b)), ("Score", score_words(clean(result.score)))],
        made="",
        notes=[],
        sentences=sentences(result),
        warnings=[clean(warning) for warning in result.warnings],
        plot=plot,
        image=plot_uri(plot),
        headings=HEADINGS,
        sections=sections(result),
        group_headings=GROUP_HEADINGS,
        groups=group_cells(result),
    )
