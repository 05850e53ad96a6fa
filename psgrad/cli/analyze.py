"""`psgrad analyze`: the samples of a dataset, measured, ranked and judged."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from psgrad.cli.check import show_check
from psgrad.cli.options import (
    AsJson,
    ConfigPath,
    Output,
    Overwrite,
    Part,
    Settings,
    part_of,
    read_config,
    require_alone,
)
from psgrad.cli.processes import ProcessesOption, require_free, require_one, shared_run
from psgrad.cli.progress import ProgressOption, ProgressStyle
from psgrad.errors import EXIT_OK

if TYPE_CHECKING:
    from psgrad.run.results import AnalyzeResult


def _limit(text: str | float) -> float:
    """A number of samples or a fraction of them; whether it is one that makes sense, the run says."""
    try:
        return int(text)
    except ValueError:
        try:
            return float(text)
        except ValueError:
            problem = f"{text!r} is neither a number of samples nor a fraction of them"
            raise typer.BadParameter(problem) from None


Limit = Annotated[
    float | None,
    typer.Option(
        "--limit",
        metavar="N|FRACTION",
        parser=_limit,
        help="Only the first N samples, or a fraction of them: a PARTIAL run.",
    ),
]
Sample = Annotated[
    bool,
    typer.Option("--sample", help="Draw the samples of --limit at random, by analyze.seed of the config."),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Continue the run in the run folder, if it was interrupted.")
]
Check = Annotated[
    bool, typer.Option("--check", help="Evaluate the config's gate at the end, and exit with its code.")
]
Report = Annotated[
    bool,
    typer.Option("--report/--no-report", help="Draw plots and report.html; psgrad report makes them later."),
]
Quiet = Annotated[
    bool,
    typer.Option(
        "-q",
        "--quiet",
        help="Print nothing on stderr except errors, the samples that are not finite and the verdict of"
        " --check.",
    ),
]


def analyze(
    config: ConfigPath,
    limit: Limit = None,
    sample: Sample = False,
    check: Check = False,
    resume: Resume = False,
    report: Report = True,
    output: Output = None,
    settings: Settings = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
    processes: ProcessesOption = 1,
    part: Part = None,
    shown: ProgressOption = ProgressStyle.auto,
) -> None:
    """Measure each sample by its gradient, and find outliers.

    Prints the top of the ranking, then the path of the run folder with the whole table, the measures, the
    plots and report.html. psgrad validate lists the mistakes of a config faster.
    """
    if resume:
        require_alone("--resume", {"--overwrite": overwrite})
    if part is not None:
        require_alone("--part", {"--processes": processes > 1, "--overwrite": overwrite})
        require_one("analyze --part")
    resolved = read_config(config, settings, output)
    which = None if part is None else part_of(part)
    if not resume and which is None:
        require_free(resolved.output, overwrite)
    from psgrad.commands.analyze import analyze as run_analyze

    with shared_run(processes, ProgressStyle.none if quiet else shown, resolved) as (group, progress):
        result = run_analyze(
            resolved,
            overwrite=overwrite,
            resume=resume,
            limit=limit,
            sample=sample,
            report=report,
            part=which,
            progress=progress,
            processes=group,
        )
    if result is not None:  # on the first rank
        show_result(result, resolved.analyze.top, check, as_json, quiet)
    elif which is not None:
        typer.echo(str(resolved.output))


def show_result(result: AnalyzeResult, top: int, check: bool, as_json: bool, quiet: bool) -> None:
    """Print a finished run, `top` rows of its table. Leaves with the gate's exit code if `check`."""
    from psgrad.reports.analyze_terminal import nonfinite_words

    if not quiet:
        _say(result)
    if bad := nonfinite_words(result):
        typer.echo(bad, err=True)
    if as_json:
        from psgrad.reports.analyze_terminal import run_content

        typer.echo(json.dumps(run_content(result, top), indent=2, allow_nan=False))
    else:
        from psgrad.reports.analyze_terminal import top_table
        from psgrad.reports.terminal import print_table

        print_table(top_table(result, top), sys.stdout)
        if check and result.check is not None:
            show_check(result.check, "terminal")
        typer.echo(str(result.folder))
    if check and result.check is not None:
        if as_json and not quiet:
            from psgrad.reports.ci import render_check

            typer.echo(render_check(result.check, "terminal"), err=True, nl=False)
        if result.check.exit_code != EXIT_OK:
            raise typer.Exit(result.check.exit_code)


def _say(result: AnalyzeResult) -> None:
    from psgrad.reports.analyze_terminal import summary

    run = result.manifest
    if run.partial:
        which = f"{run.counts.samples:,} of {run.counts.in_dataset:,} samples"
        seed = run.sampled_by
        which = f"the first {which}" if seed is None else f"{which}, drawn at random by seed {seed}"
        typer.echo(f"PARTIAL: {which}", err=True)
    typer.echo(summary(result), err=True)
