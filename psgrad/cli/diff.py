"""`psgrad diff`: what changed between two runs."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from psgrad.cli.check import write_text

if TYPE_CHECKING:
    from psgrad.run.results.findings import Comparison


class DiffFormat(StrEnum):
    terminal = "terminal"
    json = "json"
    markdown = "markdown"


RunA = Annotated[
    Path,
    typer.Argument(
        metavar="A", help="The folder of a finished psgrad analyze: the earlier run.", show_default=False
    ),
]
RunB = Annotated[Path, typer.Argument(metavar="B", help="The folder of the later run.", show_default=False)]
Top = Annotated[
    int, typer.Option("--top", metavar="N", min=1, help="How many samples of each change are listed.")
]
AFormat = Annotated[DiffFormat, typer.Option("--format", help="How the comparison is written.")]
ToFile = Annotated[
    Path | None,
    typer.Option(
        "--output",
        metavar="FILE",
        help="Write it to a file: .html is the page, .png and .svg the plot, any other the format's text.",
    ),
]


def diff(
    a: RunA,
    b: RunB,
    top: Top = 20,
    style: AFormat = DiffFormat.terminal,
    output: ToFile = None,
) -> None:
    """Compare two finished runs, sample by sample.

    Says which samples are new, gone, higher or lower, and how similar the two rankings are. Samples are
    matched by their id if the config names one, else by their content. Needs neither the model nor the
    data.
    """
    from psgrad.commands.diff import diff as compared
    from psgrad.reports.comparison import render_comparison, sentences

    result = compared(a, b, top=top)
    suffix = "" if output is None else output.suffix.lower()
    if output is not None and suffix in (".html", ".png", ".svg"):
        _draw(result, output, suffix)
    else:
        write_text(render_comparison(result, style.value), output)
    if output is not None:
        for line in sentences(result):
            typer.echo(line, err=True)


def _draw(result: Comparison, output: Path, suffix: str) -> None:
    from psgrad.reports.comparison import draw_comparison, render_page
    from psgrad.run import RunFolder

    if suffix == ".html":
        data = render_page(result).encode("utf-8", "replace")
    else:
        plot = draw_comparison(result)
        data = plot.png() if suffix == ".png" else plot.svg()
    RunFolder(output.parent).write_bytes(output.name, data)
