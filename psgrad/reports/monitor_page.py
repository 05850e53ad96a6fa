"""The page of a monitored training: losses, gradient norms and the noise scale over steps, and the rows of
spikes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pyarrow as pa
from matplotlib.axes import Axes

from psgrad.errors import DataError
from psgrad.reports.figures import (
    DARK,
    DASHES,
    QUIET,
    REST,
    REVIEW,
    Plot,
    figure_with_axes,
    legend_above,
    plain_log_ticks,
    styled,
)
from psgrad.reports.page import render_template
from psgrad.reports.words import number, percent

MAX_ROWS = 200  # of the table of named rows
_LAYERS, _SOURCES = 6, 8  # lines in one figure
_COLOURS = (DARK, REST, REVIEW, QUIET)


def write_report(run: Path, write: Callable[[str, bytes], None]) -> None:
    """The page and its figures, from the tables in a run's folder. Raises DataError for tables that can't be
    read.
    """
    tables = {name: _read(run / name) for name in ("steps", "rows", "layers", "sources")}
    plots = figures(tables)
    for plot in plots:
        write(f"plots/{plot.name}.png", plot.png())
    write("report.html", render(tables, plots).encode())


def _read(folder: Path) -> pd.DataFrame:
    if not folder.is_dir():
        return pd.DataFrame()
    try:
        return pd.read_parquet(folder)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise DataError(f"the table {folder} of a monitored training can't be read: {error}") from error


def render(tables: dict[str, pd.DataFrame], plots: list[Plot]) -> str:
    """The page as HTML."""
    steps, rows = tables["steps"], tables["rows"]
    named = rows[rows["reason"].notna()] if len(rows) else rows
    known = steps["noise_scale"].dropna() if len(steps) else pd.Series(dtype=float)
    return render_template(
        "monitor.html",
        title="A training, step by step",
        headline=[
            (f"{len(steps):,}", "steps measured"),
            (f"{len(rows):,}", "rows measured"),
            (f"{len(named):,}", f"rows named, in {named['step'].nunique() if len(named) else 0} steps"),
            (number(known.iloc[-1]) if len(known) else "none", "gradient noise scale at the end, in rows"),
        ],
        rows=len(named),
        named=[*named.head(MAX_ROWS).itertuples()],
        plots=plots,
    )


def figures(tables: dict[str, pd.DataFrame]) -> list[Plot]:
    """Those that there are numbers for."""
    steps, rows = tables["steps"], tables["rows"]
    if not len(steps):
        return []
    plots = [
        _values(steps, rows, "loss", "loss_mean", "loss_max", "Losses of rows"),
        _values(steps, rows, "grad_norm", "grad_norm_median", "grad_norm_max", "Gradient norms of rows"),
    ]
    if steps["noise_scale"].notna().any():
        plots.append(_noise(steps, tables["sources"]))
    plots.append(_layers(tables["layers"]))
    return plots


@styled
def _values(steps: pd.DataFrame, rows: pd.DataFrame, column: str, middle: str, top: str, title: str) -> Plot:
    """One value of the rows: its middle and its largest at each step, and the named rows."""
    figure, axes = figure_with_axes(2.6)
    words = middle.removeprefix(f"{column}_")
    axes.plot(steps["step"], steps[top], color=QUIET, linewidth=0.8, label="largest")
    axes.plot(steps["step"], steps[middle], color=DARK, linewidth=1.2, label=words)
    named = rows[rows["reason"].notna()]
    if len(named):
        axes.scatter(named["step"], named[column], s=14, color=REVIEW, label="rows of spikes", zorder=3)
    if (rows[column].dropna() > 0).all() and rows[column].notna().any():
        axes.set_yscale("log")
    _along_steps(axes, "loss" if column == "loss" else "gradient norm")
    caption = f"At each measured step the {words} and the largest of the rows; rows of spikes are orange."
    return Plot(column, title, caption, figure)


@styled
def _noise(steps: pd.DataFrame, sources: pd.DataFrame) -> Plot:
    """The noise scale, overall and by source, beside the size of the batch."""
    figure, axes = figure_with_axes(2.6)
    axes.plot(steps["step"], steps["noise_scale"], color=DARK, label="all rows")
    names = [*sources["source"].value_counts().index[:_SOURCES]] if len(sources) else []
    for place, name in enumerate(names):
        own = sources[sources["source"] == name]
        axes.plot(
            own["step"],
            own["noise_scale"],
            color=REST,
            alpha=1 - place / (2 * len(names)),
            linewidth=0.9,
            label=name,
        )
    axes.plot(steps["step"], steps["rows"], color=REVIEW, linestyle=DASHES, label="rows of a step")
    axes.set_yscale("log")
    _along_steps(axes, "rows")
    caption = (
        "The number of rows at which a step is half signal and half noise, estimated over the last batches. A"
        " step of fewer rows is mostly noise; many more rows in a step gain little."
    )
    return Plot("noise_scale", "Gradient noise scale", caption, figure)


@styled
def _layers(layers: pd.DataFrame) -> Plot:
    """The share of the squared norm by module, of those with the largest shares."""
    figure, axes = figure_with_axes(3.0)
    shares = layers.groupby("module")["share"].mean().nlargest(_LAYERS)
    for place, name in enumerate(shares.index):
        own = layers[layers["module"] == name]
        colour, line = _COLOURS[place % len(_COLOURS)], "-" if place < len(_COLOURS) else DASHES
        axes.plot(own["step"], own["share"], color=colour, linestyle=line, linewidth=1, label=name or "model")
    axes.set_ylim(0, None)
    axes.yaxis.set_major_formatter(lambda value, _: percent(value))
    _along_steps(axes, "share", columns=2)
    caption = f"Of the squared gradient norms of all rows, the {len(shares)} modules with the largest shares."
    return Plot("layers", "Share of the gradient by module", caption, figure)


def _along_steps(axes: Axes, label: str, columns: int = 4) -> None:
    axes.set(xlabel="step", ylabel=label)
    if axes.get_yscale() == "log":
        plain_log_ticks(axes.yaxis)
    legend_above(axes, columns)
