"""All files of a report, handed to whoever stores them."""

from __future__ import annotations

from collections.abc import Callable

from psgrad.reports.attribution_plots import attribution_plots
from psgrad.reports.html import render
from psgrad.reports.measure_plots import measure_plots
from psgrad.reports.measure_sections import MAX_MEASURES
from psgrad.reports.plots import draw_plots
from psgrad.results import AnalyzeResult


def write_report(result: AnalyzeResult, write: Callable[[str, bytes], None]) -> None:
    """Draw the plots and the page; `write(name, data)` is called for each of plots/<name>.png and report.html."""
    plots = draw_plots(result)
    of_measures = {measure.name: measure_plots(result, measure) for measure in list(result.measures.values())[:MAX_MEASURES]}
    for plot in (*plots, *(plot for drawn in of_measures.values() for plot in drawn), *attribution_plots(result)):
        write(f"plots/{plot.name}.png", plot.png())
    write("report.html", render(result, plots, of_measures).encode("utf-8", "replace"))
