"""`psgrad influence --evaluate`: do the scores predict what happens when models are trained again?

Each kind trains models on parts of the rows: random subsets (lds), all but one (loo), or all but the
strongest proponents of a query (removal).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import numpy as np
import pandas as pd

from psgrad.commands.influence_retraining import (
    Array,
    Evaluation,
    Fits,
    evaluation_of,
)
from psgrad.commands.influence_setup import (
    InfluenceSetup,
    described,
    set_up_influence,
    without_nonfinite,
)
from psgrad.commands.run_manifest import describe_run
from psgrad.config import Config, EvaluationKind
from psgrad.engine.execution.ranks import OneProcess, Processes
from psgrad.engine.influence.evaluation.controls import NEIGHBOUR, NORM, RANDOM, own_controls
from psgrad.engine.influence.evaluation.metrics import (
    LDSScore,
    LOOScore,
    RemovalScore,
    ceiling,
    choose_removals,
    lds,
    leave_one_out,
    random_subsets,
    removal,
    rows_of,
    strongest,
)
from psgrad.engine.influence.evaluation.retraining import seed_of
from psgrad.engine.influence.evaluation.statistics import self_influences
from psgrad.errors import ConfigError
from psgrad.reports.evaluation_plots import evaluation_plots
from psgrad.run import RunFolder
from psgrad.run.results import ShowProgress
from psgrad.run.results.influence_evaluation import (
    EVALUATION_COLUMNS,
    EVALUATION_FILE,
    EvaluationResult,
    Retrained,
    evaluation_content,
)
from psgrad.run.run import Run
from psgrad.user_code import with_code_beside

# Examples that are left out one at a time, for their effects to be correlated with anything.
_FEWEST = 3
_EXPLAINED = 20  # queries, at most, of removal
_HIGHEST = 5  # of the removals of loo, one in this number is of those with the highest self-influence


@with_code_beside
def evaluate_influence(
    config: Config,
    kind: EvaluationKind,
    *,
    output: Path | None = None,
    overwrite: bool = False,
    progress: ShowProgress = lambda _: None,
    processes: Processes | None = None,
) -> EvaluationResult | None:
    """Retrain models, and hold the config's scores and those of controls against them: the whole of `psgrad
    influence --evaluate`.

    Args:
        kind: 'lds', 'loo' or 'removal'; the options of each are in influence.evaluate.
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
    with run.clock("load"):
        require_evaluable(config)
        setup = set_up_influence(config, run)
    if not processes.leads:
        _evaluated(setup, kind, run)
        return None
    with run.clock("self-check"):
        manifest = describe_run("influence-evaluation", setup.common, setup.views[0].training.stream)
        manifest = replace(manifest, influence=described(setup))
    with run.begin(manifest):
        evaluation, found = _evaluated(setup, kind, run)
        result = EvaluationResult(
            kind=kind,
            method=evaluation.main,
            table=table_of(kind, found),
            retrained=found.retrained,
            details=details_of(found, setup.query_reader.samples.ids[found.asked]),
            unit=setup.measurement.change,
            folder=run.path,
            points=found.points,
            notes=run.messages,
            manifest=run.manifest,
        )
        manifest = run.add(
            influence=described(evaluation.setup),
            engine=replace(run.manifest.engine, **setup.common.counts.facts()),
            evaluation=evaluation_content(result),
        )
        result = replace(result, manifest=manifest)
        write_files(result, run.folder)
    return result


def _evaluated(
    setup: InfluenceSetup, kind: EvaluationKind, run: Run[Processes]
) -> tuple[Evaluation, EvaluationScores]:
    """What all processes compute together: the evaluation, and what it found."""
    with run.clock("screening"):
        setup, _ = without_nonfinite(setup, run.say)
    run.processes.agreed("the folder", list)  # which the first process has made by then
    with run.clock("evaluation"):
        evaluation = evaluation_of(setup, run)
        found = EVALUATIONS[kind](evaluation)
    return evaluation, found


def require_evaluable(config: Config) -> None:
    """Raises ConfigError for samples that models are not trained on again."""
    if config.data.weight is not None:
        raise ConfigError(
            "data.weight: models are trained again without weights", hint="leave it out for --evaluate"
        )


def write_files(result: EvaluationResult, folder: RunFolder) -> None:
    """evaluation.json, the tables as CSV and parquet, and the figures."""
    for plot in evaluation_plots(result):
        folder.write_bytes(f"plots/{plot.name}.png", plot.png())
    folder.write_csv("evaluation.csv", result.table)
    folder.write_table("evaluation_details.parquet", result.details)
    if len(result.points):
        folder.write_table("evaluation_points.parquet", result.points)
    folder.write_json(EVALUATION_FILE, evaluation_content(result))


# -- the kinds -----------------------------------------------------------------------------------------------


Score = LDSScore | LOOScore | RemovalScore


@dataclass(frozen=True)
class EvaluationScores:
    """What an evaluation found.

    scores: of each method and control (of removal, for each number of removed examples), in the order of the
    table. controls: the names of these. asked: [m], the rows of the queries. points: see EvaluationResult.
    """

    scores: Sequence[tuple[str, Score]]
    controls: set[str]
    asked: Array
    retrained: Retrained
    points: pd.DataFrame = field(default_factory=pd.DataFrame)


def evaluate_lds(evaluation: Evaluation) -> EvaluationScores:
    """Linear datamodeling scores over retrained subsets."""
    wanted, asked, n = evaluation.wanted, evaluation.asked, len(evaluation.training)
    if not 0 < round(wanted.fraction * n) < n:
        raise ConfigError(
            f"influence.evaluate.fraction: {wanted.fraction:g} of {n} training examples are"
            f" {round(wanted.fraction * n)} of them",
            hint="a subset has some of the examples, and lacks some",
        )
    fits = evaluation.fitted()
    subsets = random_subsets(n, wanted.subsets, wanted.fraction, np.random.default_rng([wanted.seed, 3]))
    sets = {f"subset {number}": rows for number, rows in enumerate(rows_of(subsets))}
    outcomes = evaluation.retrained(
        sets, asked, lambda number, repeat: seed_of(wanted.seed, 1, number, repeat)
    )
    truth = np.stack(list(outcomes.values()))  # [S, R, m]
    scores, names = evaluation.scores(fits, asked)
    retrained = Retrained(
        len(asked),
        evaluation.seeds,
        len(sets) * evaluation.seeds,
        subsets=wanted.subsets,
        fraction=wanted.fraction,
    )
    found = list(lds(scores, subsets, truth, evaluation.main).items())
    return EvaluationScores(found, names, asked, with_ceiling(retrained, truth))


def evaluate_loo(evaluation: Evaluation) -> EvaluationScores:
    """Leave-one-out rises by retraining."""
    wanted, setup, n = evaluation.wanted, evaluation.setup, len(evaluation.training)
    if n < _FEWEST:
        raise ConfigError(
            f"there are {n} training examples to leave out, one at a time; a correlation takes {_FEWEST}"
        )
    fits, asked = evaluation.fitted(), evaluation.asked
    random, highest = np.random.default_rng([wanted.seed, 4]), wanted.removals // _HIGHEST
    removed = choose_removals(_own_influence(evaluation, fits), wanted.removals, highest, random)
    scores, names = evaluation.scores(fits, asked)
    left = {f"all but example {row}": np.delete(np.arange(n), row) for row in removed}
    everything, without, models = without_rows(evaluation, left, asked)
    rises = np.stack(list(without.values())) - everything
    actual = rises.mean(1)
    query_ids = setup.query_reader.samples.ids[asked]
    points = pd.DataFrame(
        {
            "train_id": np.repeat(setup.common.samples.ids[setup.training_rows][removed], len(query_ids)),
            "query_id": np.tile(query_ids, len(removed)),
            "predicted": scores[evaluation.main][removed].ravel(),
            "actual": actual.ravel(),
        }
    )
    retrained = Retrained(
        len(asked),
        evaluation.seeds,
        models,
        removals=len(removed),
        highest=min(highest, len(removed)),
    )
    found = list(leave_one_out(scores, removed, actual).items())
    return EvaluationScores(found, names, asked, with_ceiling(retrained, rises), points)


def _own_influence(evaluation: Evaluation, fits: Fits) -> Array:
    """[n]: self-influence by the config's method, or the gradient norm where that would take a solve an
    example.
    """
    method, fitted = fits[evaluation.main]
    if all(one.has_self_influence for one in fitted):
        return self_influences(method, fitted)
    evaluation.run.say(
        f"{evaluation.main} has no cheap self-influence: the removals with the highest gradient norm"
        " are taken in its place"
    )
    return own_controls(evaluation.training)[NORM]


def evaluate_removal(evaluation: Evaluation) -> EvaluationScores:
    """Rises of queries whose strongest proponents are left out."""
    wanted, n = evaluation.wanted, len(evaluation.training)
    if max(wanted.ks) >= n:
        raise ConfigError(
            f"influence.evaluate.ks has {max(wanted.ks)}, and there are {n} training examples",
            hint="leave out fewer than there are",
        )
    count = min(_EXPLAINED, len(evaluation.asked))
    asked = np.sort(np.random.default_rng([wanted.seed, 5]).choice(evaluation.asked, count, replace=False))
    scores, names = evaluation.scores(evaluation.fitted(), asked, only=(RANDOM, NEIGHBOUR))

    def label(name: str, k: int, query: int) -> str:
        return f"all but the {k} strongest of query {asked[query]} by {name}"

    left = {
        label(name, k, query): np.delete(np.arange(n), strongest(matrix, query, k))
        for name, matrix in scores.items()
        for k in wanted.ks
        for query in range(count)
    }
    everything, without, models = without_rows(evaluation, left, asked)
    whole = everything.mean(0)
    rises = {
        name: {
            k: np.array([without[label(name, k, q)].mean(0)[q] - whole[q] for q in range(count)])
            for k in wanted.ks
        }
        for name in scores
    }
    curves = removal(rises, evaluation.main)
    found = [(name, score) for name, curve in curves.items() for score in curve.values()]
    return EvaluationScores(found, names, asked, Retrained(count, evaluation.seeds, models))


EVALUATIONS: dict[EvaluationKind, Callable[[Evaluation], EvaluationScores]] = {
    "lds": evaluate_lds,
    "loo": evaluate_loo,
    "removal": evaluate_removal,
}


# -- what they share -----------------------------------------------------------------------------------------


def without_rows(
    evaluation: Evaluation, left: Mapping[str, Array], queries: Array
) -> tuple[Array, dict[str, Array], int]:
    """([seeds, m]: what models of all rows measure on these queries, name -> the same of the rows that are
    left, how many models). The seeds are the same for all; equal sets of rows are trained once.
    """
    sets = {"all examples": np.arange(len(evaluation.training)), **left}
    first: dict[bytes, str] = {}
    for name, rows in sets.items():
        first.setdefault(rows.tobytes(), name)
    trained = evaluation.retrained(
        {name: sets[name] for name in first.values()},
        queries,
        lambda number, repeat: seed_of(evaluation.wanted.seed, 0, repeat),
    )
    by_set = {name: trained[first[rows.tobytes()]] for name, rows in left.items()}
    return trained["all examples"], by_set, len(trained) * evaluation.seeds


def with_ceiling(retrained: Retrained, outcomes: Array) -> Retrained:
    """With how much of the outcomes [S, R, m] can be predicted, where each was trained several times."""
    found = ceiling(outcomes)
    if found is None:
        return retrained
    return replace(retrained, ceiling=found.best, single_seed=found.single, reliability=found.reliability)


def table_of(kind: EvaluationKind, found: EvaluationScores) -> pd.DataFrame:
    """See EvaluationResult.table."""
    rows = [
        {"method": name, "control": name in found.controls, **columns_of(score)}
        for name, score in found.scores
    ]
    return pd.DataFrame(rows)[["method", "control", *EVALUATION_COLUMNS[kind]]]


def columns_of(score: Score) -> dict[str, float]:
    """The fields of a score as columns, NaN where one is None: an interval is two, such as `ahead_low` and
    `ahead_high`.
    """
    columns = {}
    for each in fields(score):
        value = getattr(score, each.name)
        if each.name.endswith("interval"):
            start = each.name.removesuffix("interval")
            columns[f"{start}low"], columns[f"{start}high"] = value or (np.nan, np.nan)
        elif each.name != "per_query":
            columns[each.name] = np.nan if value is None else value
    return columns


def details_of(found: EvaluationScores, query_ids: Array) -> pd.DataFrame:
    """One row for each score and query."""
    parts = []
    for name, score in found.scores:
        columns = {"method": name, "query_id": query_ids, "query_index": found.asked}
        part = pd.DataFrame(columns | {"value": score.per_query})
        parts.append(part.assign(removed=score.removed) if isinstance(score, RemovalScore) else part)
    return pd.concat(parts, ignore_index=True)
