"""`psgrad influence --evaluate`: do the scores foretell what happens when models are trained again?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from psgrad.config import Config, EvaluationKind
from psgrad.reports.evaluation import finite
from psgrad.reports.evaluation_plots import evaluation_plots
from psgrad.results import Progress
from psgrad.results.evaluation import EVALUATION_FILE, EvaluationResult, evaluation_content
from psgrad.storage import RunFolder
from psgrad.workflows.evaluation_bench import Bench, bench_of
from psgrad.workflows.evaluation_mislabel import evaluate_mislabel
from psgrad.workflows.evaluation_truths import Found, evaluate_lds, evaluate_loo, evaluate_removal
from psgrad.workflows.influence_run import described, without_nonfinite
from psgrad.workflows.influence_setup import set_up_influence
from psgrad.workflows.record import Clock, describe_run, recorded

Say = Callable[[Progress], None]

_WAYS: dict[EvaluationKind, Callable[[Bench], Found]] = {
    "lds": evaluate_lds,
    "loo": evaluate_loo,
    "mislabel": evaluate_mislabel,
    "removal": evaluate_removal,
}


def evaluate_influence(
    config: Config,
    kind: EvaluationKind,
    *,
    output: Path | None = None,
    overwrite: bool = False,
    progress: Say = lambda _: None,
) -> EvaluationResult:
    """Retrain models, and hold the config's scores and those of controls against them: the whole of `psgrad influence --evaluate`.

    Args:
        kind: 'lds', 'loo', 'mislabel' or 'removal'; the options of each are in influence.evaluate.
        output: a folder of its own; None for the config's, with the kind behind its name. Scores in the config's folder stay as they are.
        overwrite: replace an earlier evaluation there. What it has of retrained models is used again where it is still true, so that a run
            that was stopped goes on where it was.

    Raises PsgradError for everything that can be wrong with the config, the model, the data, the training or the disk.
    """
    path = output if output is not None else config.output.with_name(f"{config.output.name}-{kind}")
    RunFolder.require_free(path, overwrite)
    clock, said = Clock(), list[str]()

    def say(message: str) -> None:
        said.append(message)
        progress(Progress(0, 0, "evaluation", message))

    with clock("load"):
        setup = set_up_influence(config, say)
    with clock("self-check"):
        check = setup.run.self_check(setup.moments[0].training.stream)
    with clock("screening"):
        setup, _ = without_nonfinite(setup, known=None, say=say)
    folder = RunFolder.create(path, overwrite)
    facts = describe_run("influence-evaluation", setup.run, check) | described(setup)
    with recorded(folder, facts, clock):
        with clock("evaluation"):
            bench = bench_of(setup, folder, progress)
            found = _WAYS[kind](bench)
        result = EvaluationResult(
            kind=kind,
            method=bench.main,
            table=found.table,
            facts=found.facts,
            details=found.details,
            unit=setup.measurement.change,
            folder=folder.path,
            points=found.points,
            curves=found.curves,
            notes=[*bench.notes, *dict.fromkeys(said)],
            manifest=facts,
        )
        facts["evaluation"] = evaluation_content(result)
        facts["timings"] = clock.seconds
        write_files(result, folder)
    return result


def write_files(result: EvaluationResult, folder: RunFolder) -> None:
    """evaluation.json, the tables as CSV and parquet, and the figures."""
    for plot in evaluation_plots(result):
        folder.write_bytes(f"plots/{plot.name}.png", plot.png())
        folder.write_bytes(f"plots/{plot.name}.svg", plot.svg())
    folder.write_csv("evaluation.csv", result.table)
    folder.write_table("evaluation_details.parquet", result.details)
    if len(result.points):
        folder.write_table("evaluation_points.parquet", result.points)
    folder.write_json(EVALUATION_FILE, finite(evaluation_content(result)))
