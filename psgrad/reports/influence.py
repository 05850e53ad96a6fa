"""All files of an influence report, handed to whoever stores them."""

from __future__ import annotations

from collections.abc import Callable

from psgrad.reports.influence_html import render_influence
from psgrad.reports.influence_plots import draw_influence_plots
from psgrad.results import InfluenceResult


def write_influence_report(result: InfluenceResult, write: Callable[[str, bytes], None]) -> None:
    """Draw the plots and the page; `write(name, data)` is called for each of plots/<name>.png and report.html."""
    plots = draw_influence_plots(result)
    for plot in plots:
        write(f"plots/{plot.name}.png", plot.png())
    write("report.html", render_influence(result, plots).encode("utf-8", "replace"))
