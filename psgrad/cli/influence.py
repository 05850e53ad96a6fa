"""`psgrad influence`: which training examples made the model do this; its index; and whether the scores are
true.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

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
from psgrad.cli.processes import ProcessesOption, in_a_group, require_free, require_one, shared_run
from psgrad.cli.progress import ProgressOption, ProgressStyle

if TYPE_CHECKING:
    from psgrad.run.results.influence import InfluenceResult


class EvaluationKind(StrEnum):
    loo = "loo"
    lds = "lds"
    removal = "removal"


Top = Annotated[
    int | None,
    typer.Option(
        "--top", metavar="N", min=1, help="How many examples of either sign to rank for each query."
    ),
]
MethodName = Annotated[
    str | None,
    typer.Option("--method", metavar="NAME", help="Method, with its default options."),
]
Matrix = Annotated[
    bool,
    typer.Option(
        "--matrix", help="Also write all scores, one row for each training example, as matrix.safetensors."
    ),
]
Report = Annotated[
    bool,
    typer.Option(
        "--report/--no-report", help="Draw plots and report.html; without them the command is faster."
    ),
]
Evaluate = Annotated[
    EvaluationKind | None,
    typer.Option(
        "--evaluate",
        help=(
            "Do not rank, but retrain and compare: without one example (loo), on subsets (lds), or"
            " without each query's strongest proponents (removal)."
        ),
    ),
]
Ids = Annotated[
    list[str] | None,
    typer.Option("--id", metavar="ID", help="Ask about the row of this id. May be repeated."),
]
Where = Annotated[
    str | None,
    typer.Option(
        "--where",
        metavar="CONDITION",
        help='Ask only about rows such as "label == 3 and loss > 2".',
    ),
]
Worst = Annotated[
    int | None, typer.Option("--worst", metavar="N", min=1, help="Ask only about the N rows of largest loss.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue an index that was interrupted.")]
UpdateIndex = Annotated[
    bool,
    typer.Option(
        "--update",
        help=(
            "Let a finished index follow its data: compute the rows that are new, behind the others, and"
            " leave out those that are gone."
        ),
    ),
]
OverwriteIndex = Annotated[bool, typer.Option("--overwrite", help="Replace an index that is there already.")]


def influence(
    config: ConfigPath,
    method: MethodName = None,
    top: Top = None,
    ids: Ids = None,
    where: Where = None,
    worst: Worst = None,
    matrix: Matrix = False,
    report: Report = True,
    evaluate: Evaluate = None,
    output: Output = None,
    settings: Settings = None,
    overwrite: Overwrite = False,
    as_json: AsJson = False,
    processes: ProcessesOption = 1,
    shown: ProgressOption = ProgressStyle.auto,
) -> None:
    """Rank the training examples that made the model do this.

    By their influence on each query, and on all queries together. A positive score: the training example
    helps the query. The unit is printed; for most methods it is the predicted rise of the query's loss if
    the example were removed. Prints the strongest examples for the first queries, then the path of the
    run folder.

    `psgrad influence index CONFIG` builds the config's index, with which any number of queries take seconds.
    """
    style = "json" if as_json else "terminal"
    chosen = {"ids": ids, "where": where, "worst": worst}
    settings = [*(settings or ()), *_settings("influence.queries", chosen)]
    settings += _settings("influence", {"method": None if method is None else {"name": method}, "top": top})
    if evaluate is not None:
        require_alone("--evaluate", {"--matrix": matrix, "--top": top is not None})
        # The folder of an evaluation is its own: the config's is that of the scores.
        resolved = read_config(config, settings, None)
        folder = output or resolved.output_of(evaluate.value)
        require_free(folder, overwrite)
        from psgrad.commands.influence_evaluate import evaluate_influence as run_evaluate_influence
        from psgrad.reports.evaluation import write_evaluation

        with shared_run(processes, shown, resolved) as (group, progress):
            evaluation = run_evaluate_influence(
                resolved,
                evaluate.value,
                output=output,
                overwrite=overwrite,
                progress=progress,
                processes=group,
            )
        if evaluation is not None:  # on the first rank
            write_evaluation(evaluation, style, sys.stdout)
        return
    resolved = read_config(config, settings, output)
    require_free(resolved.output, overwrite)
    from psgrad.commands.influence import influence as run_influence

    with shared_run(processes, shown, resolved) as (group, progress):
        result = run_influence(
            resolved,
            overwrite=overwrite,
            matrix=matrix,
            report=report,
            progress=progress,
            processes=group,
        )
    if result is not None:  # on the first rank
        show_scores(result, resolved.influence.top, style)


def influence_index(
    config: ConfigPath,
    resume: Resume = False,
    update: UpdateIndex = False,
    settings: Settings = None,
    overwrite: OverwriteIndex = False,
    processes: ProcessesOption = 1,
    part: Part = None,
    shown: ProgressOption = ProgressStyle.auto,
) -> None:
    """Store training gradients, for many queries.

    `influence.index` of the config says where it is and what it stores. Prints its path.
    """
    if part is not None:
        given = {"--overwrite": overwrite, "--update": update}
        require_alone("--part", {"--processes": processes > 1, **given})
        require_one("influence index --part")
    if update:
        require_alone("--update", {"--resume": resume, "--overwrite": overwrite})
    resolved = read_config(config, settings, None)
    which = None if part is None else part_of(part)
    wanted = resolved.influence.index
    folder = resolved.output if wanted is None else wanted.path
    if wanted is not None and which is None and not (resume or update or in_a_group()):
        from psgrad.run.gradient_index import GradientIndex

        GradientIndex.require_free(folder, overwrite)
    from psgrad.commands.influence_index import influence_index as run_influence_index
    from psgrad.reports.influence_terminal import index_summary

    with shared_run(processes, shown, resolved) as (group, progress):
        result = run_influence_index(
            resolved,
            resume=resume,
            overwrite=overwrite,
            update=update,
            progress=progress,
            processes=group,
            part=which,
        )
    if result is not None:  # on the first rank
        typer.echo(index_summary(result), err=True)
        typer.echo(str(result.folder))
    elif which is not None:
        typer.echo(str(folder))


def _settings(section: str, values: Mapping[str, object]) -> list[str]:
    """Changes of a config as `--set` takes them, of those values that are given."""
    return [f"{section}.{key}={json.dumps(value)}" for key, value in values.items() if value]


def show_scores(result: InfluenceResult, top: int, style: str) -> None:
    from psgrad.reports.influence_terminal import summary, write_influence

    typer.echo(summary(result), err=True)
    write_influence(result, top, style, sys.stdout)
