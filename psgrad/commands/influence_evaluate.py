"""`psgrad influence --evaluate`: do the scores predict what happens when models are trained again?"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from psgrad.commands.evaluation_kinds import EVALUATIONS
from psgrad.commands.evaluation_parts import evaluation_of
from psgrad.commands.influence import described
from psgrad.commands.influence_setup import set_up_influence
from psgrad.commands.influence_tables import without_nonfinite
from psgrad.commands.run_manifest import describe_run, rank_facts_of_steps
from psgrad.config import Config, EvaluationKind
from psgrad.engine.execution.ranks import OneProcess, Processes
from psgrad.errors import ConfigError
from psgrad.reports.evaluation_plots import evaluation_plots
from psgrad.run import RunFolder
from psgrad.run.results import Say
from psgrad.run.results.influence import EVALUATION_FILE, EvaluationResult, evaluation_content
from psgrad.run.run import Run
from psgrad.user_code import with_code_beside


@with_code_beside
def evaluate_influence(
    config: Config,
    kind: EvaluationKind,
    *,
    output: Path | None = None,
    overwrite: bool = False,
    progress: Say = lambda _: None,
    processes: Processes | None = None,
) -> EvaluationResult | None:
    """Retrain models, and hold the config's scores and those of controls against them: the whole of `psgrad
    influence --evaluate`.

    Args:
        kind: 'lds', 'loo' or 'removal'; the options of each are in
            influence.evaluate.
        output: a folder of its own; None for the config's, with the kind behind its name. Scores in the
            config's folder stay as they are.
        overwrite: replace an earlier evaluation there. What it has of retrained models is used again where it
            is still true, so that a run that was stopped goes on where it was.
        processes: those that share the trainings and the passes; None for this one alone.

    Returns None on all ranks but the first.

    Raises PsgradError for everything that can be wrong with the config, the model, the data, the training or
    the disk.
    """
    processes = OneProcess() if processes is None else processes
    run = Run.open(output or config.output_of(kind), processes, progress, overwrite=overwrite)
    messages = list[str]()

    def say(message: str) -> None:
        messages.append(message)
        run.say("evaluation", message)

    with run.clock("load"):
        require_evaluable(config)
        setup = set_up_influence(config, say, progress, processes)
    if not processes.leads:
        setup, _ = without_nonfinite(setup, None, say)
        processes.agreed("the folder", list)
        EVALUATIONS[kind](evaluation_of(setup, run.folder, progress))
        rank_facts_of_steps(processes, "evaluation.")
        return None
    with run.clock("self-check"):
        check = setup.run.self_check(setup.views[0].training.stream)
    with run.clock("screening"):
        setup, _ = without_nonfinite(setup, None, say)
    manifest = replace(describe_run("influence-evaluation", setup.run, check), influence=described(setup))
    with run.begin(manifest):
        processes.agreed("the folder", list)
        with run.clock("evaluation"):
            evaluation = evaluation_of(setup, run.folder, progress)
            found = EVALUATIONS[kind](evaluation)
        result = EvaluationResult(
            kind=kind,
            method=evaluation.main,
            table=found.table,
            facts=found.facts,
            details=found.details,
            unit=setup.measurement.change,
            folder=run.path,
            points=found.points,
            curves=found.curves,
            notes=[*evaluation.notes, *dict.fromkeys(messages)],
            manifest=run.manifest,
        )
        facts = run.add(
            ranks=rank_facts_of_steps(processes, "evaluation."),
            engine=replace(run.manifest.engine, **setup.run.counts.facts()),
            evaluation=evaluation_content(result),
        )
        result = replace(result, manifest=facts)
        write_files(result, run.folder)
    return result


def require_evaluable(config: Config) -> None:
    """Raises ConfigError for samples that models are not trained on again."""
    if config.data.weight is not None:
        raise ConfigError(
            "data.weight: models are trained again without weights; expected losses that count the same"
            " for psgrad influence --evaluate",
            hint="leave data.weight out here",
        )
    if config.data.group is not None:
        raise ConfigError(
            "data.group: scores of groups are not compared with training again; expected a sample a row"
            " for psgrad influence --evaluate",
            hint="leave data.group out: rows are then evaluated one by one",
        )


def write_files(result: EvaluationResult, folder: RunFolder) -> None:
    """evaluation.json, the tables as CSV and parquet, and the figures."""
    for plot in evaluation_plots(result):
        folder.write_bytes(f"plots/{plot.name}.png", plot.png())
        folder.write_bytes(f"plots/{plot.name}.svg", plot.svg())
    folder.write_csv("evaluation.csv", result.table)
    folder.write_table("evaluation_details.parquet", result.details)
    if len(result.points):
        folder.write_table("evaluation_points.parquet", result.points)
    folder.write_json(EVALUATION_FILE, evaluation_content(result))
