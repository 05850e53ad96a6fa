"""`psgrad dp-audit`: attacks private steps, and compares the result with their stated guarantee."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from psgrad.cli.options import AsJson, ConfigPath, Overwrite, Settings, read_config
from psgrad.cli.processes import ProcessesOption, require_free, shared_run
from psgrad.cli.progress import ProgressOption, ProgressStyle
from psgrad.errors import EXIT_GATE_FAILED

CanaryCount = Annotated[
    int | None,
    typer.Option(
        "--canaries",
        metavar="N",
        min=1,
        help="Records with planted gradients. Left out: as many as fit, up to 5,000.",
    ),
]
Steps = Annotated[
    int | None,
    typer.Option(
        "--steps",
        metavar="N",
        min=1,
        help="Planned steps to audit. Left out: until canaries are drawn about twice.",
    ),
]
Confidence = Annotated[
    float,
    typer.Option(
        "--confidence", metavar="P", help="Of the lower bound; a correct run passes with at least this."
    ),
]
CanariesOnly = Annotated[
    bool,
    typer.Option(
        "--canaries-only", help="Use no records of the dataset: faster, and the result may be published."
    ),
]
AuditOutput = Annotated[
    Path | None,
    typer.Option(
        "--output", metavar="DIR", help="Folder of the audit, instead of the config's `output`-audit."
    ),
]


def dp_audit(
    config: ConfigPath,
    canaries: CanaryCount = None,
    steps: Steps = None,
    confidence: Confidence = 0.95,
    canaries_only: CanariesOnly = False,
    output: AuditOutput = None,
    overwrite: Overwrite = False,
    settings: Settings = None,
    as_json: AsJson = False,
    processes: ProcessesOption = 1,
    shown: ProgressOption = ProgressStyle.auto,
) -> None:
    """Attack private steps, to test their guarantee.

    Finds a lower bound on epsilon beside the accounted one, the noise, and the true sensitivity. Takes
    the config's private steps with canaries: records with planted gradients that are in the data by the
    toss of a coin. Guesses the coins. Then takes one step on neighbouring datasets with the same random
    numbers. Trains nothing, spends nothing, and does not change a run in the config's output. Exit code 1
    if the declared guarantee is contradicted.
    """
    resolved = read_config(config, settings, None)
    folder = output or resolved.output_of("audit")
    require_free(folder, overwrite)
    from psgrad.commands.dp_audit import dp_audit as run_dp_audit
    from psgrad.reports.audit import PRIVATE_WARNING, write_audit

    with shared_run(processes, shown, resolved) as (group, progress):
        result = run_dp_audit(
            resolved,
            canaries=canaries,
            steps=steps,
            confidence=confidence,
            canaries_only=canaries_only,
            output=output,
            overwrite=overwrite,
            progress=progress,
            processes=group,
        )
    if result is None:  # on all ranks but the first
        return
    for note in result.notes:
        typer.echo(note, err=True)
    if result.records:
        typer.echo(PRIVATE_WARNING, err=True)
    write_audit(result, "json" if as_json else "terminal", sys.stdout)
    if result.violations:
        raise typer.Exit(EXIT_GATE_FAILED)
