"""The figures of an influence report: how scores are distributed, how few examples carry them, and
self-influence beside loss.
"""

from __future__ import annotations

import textwrap

import numpy as np
from matplotlib.axes import Axes

from psgrad.reports.figures import (
    DARK,
    QUIET,
    REST,
    REVIEW,
    Array,
    Plot,
    figure_with_axes,
    legend_above,
    name_rows,
    plain_log_ticks,
    say_empty,
    scatter,
    styled,
)
from psgrad.reports.influence_words import own_words, query_name, reported_queries, unit_words
from psgrad.reports.words import count, percent, shorten_middle
from psgrad.run.results import disagrees
from psgrad.run.results.influence import ALL_INDEX, SIGN, InfluenceResult, carriers, cumulative_influence
from psgrad.wording import correlation

MAX_ROWS = 12  # queries in one figure
MAX_POINTS = 20_000  # single examples drawn
STRONGEST = 10  # marked by themselves

_RIDGE_BINS = 80  # even, so that zero is between two of them
_CURVE_POINTS = 300


def draw_influence_plots(result: InfluenceResult) -> list[Plot]:
    """All figures that this result has the data for, in reading order."""
    plots = [score_distributions(result), cumulative(result)]
    if "self_influence" in result.training and result.training["self_influence"].notna().any():
        plots.append(self_influence_against_loss(result))
    return plots


def columns_of(result: InfluenceResult) -> dict[int, Array]:
    """The scores that can be drawn as a whole: those for all queries together, and those of the first few;
    without excluded rows.
    """
    queries = reported_queries(result, MAX_ROWS - 1)
    columns = {ALL_INDEX: result.training["overall"].to_numpy(float)} if ALL_INDEX in queries else {}
    columns |= {query: result.shown[query] for query in queries if query in result.shown}
    return {query: values[np.isfinite(values)] for query, values in columns.items()}


@styled
def score_distributions(result: InfluenceResult) -> Plot:
    """A row a query: how many training examples have which score, on an axis that is linear about zero and
    logarithmic beyond.
    """
    columns = columns_of(result)
    drawn = {query: values for query, values in columns.items() if (values != 0).any()}
    figure, axes = figure_with_axes(1.5 + 0.55 * max(len(drawn), 2))
    caption = (
        "Height: how many training examples have such a score, as a share of the row's fullest bin (square"
        f" root). Ticks: the {STRONGEST} strongest of either sign. Right: the share of the examples that"
        " help. "
    )
    if not drawn:
        say_empty(axes, "no score that is not zero")
        return Plot("score_distributions", "Scores of all training examples", caption, figure)
    width = _linear_width(np.concatenate(list(drawn.values())))
    axes.set_xscale("symlog", linthresh=width)
    largest = max(float(np.abs(values).max()) for values in drawn.values())
    transform = axes.xaxis.get_transform()
    end = float(transform.transform(np.array([largest * 1.1]))[0])
    places = np.linspace(-end, end, _RIDGE_BINS + 1)
    edges = transform.inverted().transform(places)
    for row, values in enumerate(drawn.values()):
        _ridge(axes, row, values, edges)
    axes.set_xlim(edges[0], edges[-1])
    name_rows(axes, [shorten_middle(query_name(result, query), 24) for query in drawn])
    axes.set_ylim(len(drawn) - 0.8, -0.95)
    axes.axvline(0, color=QUIET, linewidth=0.8)
    _beside(axes, -0.8, "help")
    axes.minorticks_off()
    words = f"score (signed log scale: linear about zero): {unit_words(result)}; {SIGN}"
    axes.set_xlabel(textwrap.fill(words, 110), parse_math=False)
    return Plot("score_distributions", "Scores of all training examples", caption, figure)


@styled
def cumulative(result: InfluenceResult) -> Plot:
    """A line a query: which share of the positive total its 1, 2, ... strongest proponents carry."""
    figure, axes = figure_with_axes(3.8)
    columns = {query: values for query, values in columns_of(result).items() if (values > 0).any()}
    caption = (
        "How few examples carry the help: the strongest proponents' share of the sum of positive scores."
        " Dots: half, and nine tenths. "
    )
    if not columns:
        say_empty(axes, "no score above zero")
        return Plot("cumulative_influence", "How many examples carry the influence", caption, figure)
    first_single = next((query for query in columns if query != ALL_INDEX), None)
    for query, values in columns.items():
        curve = 100 * cumulative_influence(values)
        places = np.unique(np.geomspace(1, len(curve), _CURVE_POINTS).round().astype(int))
        whole = query == ALL_INDEX
        words = "all queries" if whole else "single queries" if query == first_single else None
        colour, size = (DARK, 5) if whole else (REST, 3.5)
        width, alpha, order = (2.4, 1.0, 3) if whole else (1.2, 0.75, 2)
        line = places, curve[places - 1]
        axes.plot(*line, color=colour, linewidth=width, alpha=alpha, zorder=order, label=words)
        for share in (0.5, 0.9):
            place = carriers(values, share)
            axes.plot([place], [curve[place - 1]], "o", markersize=size, color=colour, zorder=4)
    axes.set(
        xscale="log",
        ylim=(0, 103),
        xlabel="strongest proponents (log scale)",
        ylabel="share of the sum of positive scores (%)",
    )
    plain_log_ticks(axes.xaxis)
    for share in (50, 90):
        axes.axhline(share, color=QUIET, linewidth=0.8, linestyle=(0, (1, 2)))
    legend_above(axes)
    caption += carrier_words(columns)
    return Plot("cumulative_influence", "How many examples carry the influence", caption, figure)


def carrier_words(columns: dict[int, Array]) -> str:
    """In a sentence how many examples carry half, and nine tenths, of the positive total of single
    queries.
    """
    single = [values for query, values in columns.items() if query != ALL_INDEX] or list(columns.values())
    half, most = (np.median([carriers(values, share) for values in single]) for share in (0.5, 0.9))
    helping = np.median([int((values > 0).sum()) for values in single])
    return (
        f"Of the {helping:,.0f} examples that help a query, {half:,.0f} carry half of it and {most:,.0f} nine"
        f" tenths (medians of {count(len(single), 'line')}). "
    )


@styled
def self_influence_against_loss(result: InfluenceResult) -> Plot:
    """Each training example's influence on its own loss against that loss."""
    finite = result.training[(result.training["status"] == "ok") & result.training["self_influence"].notna()]
    drawn = finite[(finite["self_influence"] > 0) & (finite["loss"] > 0)]
    missing = len(finite) - len(drawn)
    caption = (
        "One point a training example, its influence on itself against its loss. Large self-influence marks"
        " wrong labels and rare examples; loss often does so as well. "
    )
    if len(drawn) > MAX_POINTS:
        caption += f"Drawn are the {MAX_POINTS:,} largest by self-influence of {len(drawn):,}. "
        drawn = drawn.nlargest(MAX_POINTS, "self_influence")
    figure, axes = figure_with_axes(4.2)
    if not len(drawn):
        say_empty(axes, "no positive self-influence to draw")
    else:
        wrong = disagrees(drawn)
        for rows, colour, marker, words in (
            (drawn[~wrong], REST, "o", "prediction is the label" if wrong.any() else None),
            (drawn[wrong], REVIEW, "x", "prediction differs from the label"),
        ):
            scatter(axes, rows, ("self_influence", "loss"), (colour, marker), words)
        axes.set(xscale="log", yscale="log")
        across, unit = own_words(result), result.manifest.loss_unit
        axes.set_xlabel(textwrap.fill(f"self-influence (log scale): {across}", 110), parse_math=False)
        axes.set_ylabel(f"loss of the training example ({unit}, log scale)")
        if wrong.any():
            legend_above(axes)
        if drawn["loss"].nunique() > 1 and drawn["self_influence"].nunique() > 1:
            spearman = drawn["loss"].rank().corr(drawn["self_influence"].rank())
            caption += f"Rank correlation (Spearman): {correlation(spearman)}. "
    if missing:
        caption += f"Not drawn: {missing:,} whose self-influence or loss is not positive. "
    return Plot("self_influence", "Self-influence against loss", caption, figure)


# -- what they share -----------------------------------------------------------------------------------------


def _linear_width(values: Array) -> float:
    """The power of ten at which the axis turns logarithmic: where most examples lie within."""
    sizes = np.abs(values[values != 0])
    least = max(float(np.quantile(sizes, 0.5)), float(sizes.max()) * 1e-3)
    return float(10 ** np.round(np.log10(least)))


def _ridge(axes: Axes, row: int, values: Array, edges: Array) -> None:
    counts = np.histogram(values, edges)[0]
    heights = 0.8 * np.sqrt(counts / counts.max())
    for sign, colour in ((1, REST), (-1, REVIEW)):
        of_sign = (edges[1:] + edges[:-1]) * sign > 0
        axes.fill_between(
            np.repeat(edges, 2)[1:-1],
            row,
            row - np.repeat(np.where(of_sign, heights, 0.0), 2),
            color=colour,
            alpha=0.55,
            linewidth=0,
        )
        strongest = np.sort(sign * values[sign * values > 0])[-STRONGEST:]
        axes.plot(
            sign * strongest,
            np.full(len(strongest), row + 0.06),
            "|",
            color=colour,
            markersize=6,
            markeredgewidth=1.2,
        )
    _beside(axes, row - 0.1, percent(float((values > 0).mean()), 0))


def _beside(axes: Axes, height: float, words: str) -> None:
    place = (1.005, height)
    axes.annotate(
        words,
        place,
        xycoords=axes.get_yaxis_transform(),
        fontsize=8,
        color=QUIET,
        va="center",
        annotation_clip=False,
    )
