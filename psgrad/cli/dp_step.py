"""`psgrad dp-step`: differentially private updates, and what they would cost."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from psgrad.cli.options import AsJson, ConfigPath, Output, Overwrite, Settings, read_config, require_alone
from psgrad.cli.processes import OPTION, ProcessesOption, require_free, require_one, shared_run
from psgrad.cli.progress import ProgressOption, ProgressStyle


def _steps(text: str | int) -> int | str:
    """A number of steps, or all."""
    if text == "all" or (str(text).isascii() and str(text).isdigit() and int(text) >= 1):
        return text if text == "all" else int(text)
    raise typer.BadParameter(f"{text!r} is neither a number of steps of at least 1 nor all")


Steps = Annotated[
    Any,
    typer.Option(
        "--steps", metavar="N|all", parser=_steps, help="Take N of the planned steps, or all that are left."
    ),
]
Plan = Annotated[
    bool,
    typer.Option(
        "--plan", help="Only compute what the planned steps would cost; reads no data and takes no step."
    ),
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run in the run folder.")]
Seeded = Annotated[
    bool,
    typer.Option(
        "--insecure-deterministic",
        help="Allow noise.seed, for tests: whoever knows the seed can subtract the noise.",
    ),
]


def dp_step(
    config: ConfigPath,
    steps: Steps = 1,
    plan: Plan = False,
    resume: Resume = False,
    output: Output = None,
    settings: Settings = None,
    overwrite: Overwrite = False,
    insecure_deterministic: Seeded = False,
    as_json: AsJson = False,
    processes: ProcessesOption = 1,
    shown: ProgressOption = ProgressStyle.auto,
) -> None:
    """Take differentially private training steps.

    A step draws a batch, clips each record's gradient, adds noise, updates, and accounts. Prints what was
    spent and what it protects, then the run folder, of which public/ may be published.

    docs/explanation/dp.md says what is guaranteed, and what is outside it.
    """
    style = "json" if as_json else "terminal"
    if plan:
        require_alone("--plan", {"--resume": resume, OPTION: processes > 1})
        require_one("dp-step --plan")
    resolved = read_config(config, settings, output)
    if plan:
        from psgrad.commands.dp_plan import dp_plan as run_dp_plan
        from psgrad.reports.privacy import write_plan_of_noise

        write_plan_of_noise(run_dp_plan(resolved), style, sys.stdout)
        return
    if not resume:
        require_free(resolved.output, overwrite)
    from psgrad.commands.dp_step import dp_step as run_dp_step

    with shared_run(processes, shown, resolved) as (group, progress):
        result = run_dp_step(
            resolved,
            steps=steps,
            resume=resume,
            overwrite=overwrite,
            insecure_deterministic=insecure_deterministic,
            progress=progress,
            processes=group,
        )
    if result is None:  # on all ranks but the first
        return
    from psgrad.reports.privacy import write_step

    for note in result.notes:
        typer.echo(note, err=True)
    write_step(result, style, sys.stdout)
