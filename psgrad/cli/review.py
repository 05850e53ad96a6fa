"""`psgrad review`: predicts what a change of the training data does."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from psgrad.cli.check import AFormat, CheckFormat, ExitZero, show_check
from psgrad.cli.options import ConfigPath, Output, Overwrite, Settings, read_config
from psgrad.cli.progress import ProgressOption, ProgressStyle, progress_display
from psgrad.errors import EXIT_OK

Base = Annotated[
    str,
    typer.Option("--base", metavar="DATA", help="The training data before the change.", show_default=False),
]
Head = Annotated[
    str | None,
    typer.Option("--head", metavar="DATA", help="The training data after it; the config's where left out."),
]
Report = Annotated[bool, typer.Option("--report/--no-report", help="Write report.html.")]


def review(
    config: ConfigPath,
    base: Base,
    head: Head = None,
    style: AFormat = CheckFormat.terminal,
    to_file: Annotated[
        Path | None, typer.Option("--to", metavar="FILE", help="Write the verdict to a file.")
    ] = None,
    report: Report = True,
    output: Output = None,
    settings: Settings = None,
    overwrite: Overwrite = False,
    exit_zero: ExitZero = False,
    shown: ProgressOption = ProgressStyle.auto,
) -> None:
    """Predict what a change of the training data will do.

    Compares two versions of the training data row by row, and predicts the change of each query's loss
    from the model as it is now. Exit codes: 0 passed, 1 a limit of the config's section review is
    exceeded, 4 not evaluable, which is not a pass.
    """
    resolved = read_config(config, settings, output)
    from psgrad.commands.review import review as run_review

    with progress_display(shown) as progress:
        result = run_review(resolved, base, head, overwrite=overwrite, report=report, progress=progress)
    if style == CheckFormat.terminal and to_file is None:
        from psgrad.reports.review_page import terminal_text

        typer.echo(terminal_text(result))
    show_check(result.check, style.value, to_file)
    if style == CheckFormat.terminal:
        typer.echo(str(result.folder))
    if not exit_zero and result.check.exit_code != EXIT_OK:
        raise typer.Exit(result.check.exit_code)
