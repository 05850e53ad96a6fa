"""`psgrad influence --evaluate`: do the scores predict what happens when models are trained again?

Each kind trains models on parts of the rows: random subsets (lds), all but one (loo), or all but the
strongest proponents of a query (removal).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from psgrad.commands.influence_retraining import (
    Array,
    Evaluation,
    Fits,
    all_scores,
    evaluation_of,
    fitted_methods,
)
from psgrad.commands.influence_setup import described, set_up_influence
from psgrad.commands.influence_tables import Warnings, without_nonfinite
from psgrad.commands.run_manifest import describe_run, rank_facts_of_steps
from psgrad.config import Config, EvaluationKind
from psgrad.engine.execution.ranks import OneProcess, Processes
from psgrad.engine.influence.evaluation.controls import NEIGHBOUR, NORM, RANDOM, own_controls
from psgrad.engine.influence.evaluation.metrics import (
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
from psgrad.engine.influence.evaluation.statistics import Interval, self_influences
from psgrad.errors import ConfigError
from psgrad.reports.evaluation_plots import evaluation_plots
from psgrad.run import RunFolder
from psgrad.run.results import Say
from psgrad.run.results.influence import EVALUATION_FILE, EvaluationResult, evaluation_content
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
    progress: Say = lambda _: None,
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
    say = Warnings(progress, "evaluation")
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
            notes=[*evaluation.notes, *say.messages],
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
    problems = {
        "weight": "models are trained again without weights",
        "group": "scores of groups are not compared with training again",
    }
    for key, problem in problems.items():
        if getattr(config.data, key) is not None:
            raise ConfigError(f"data.{key}: {problem}", hint=f"leave data.{key} out for --evaluate")


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


# -- the kinds -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """What an evaluation found; see EvaluationResult."""

    table: pd.DataFrame
    facts: dict[str, Any]
    details: pd.DataFrame
    points: pd.DataFrame = field(default_factory=pd.DataFrame)


def evaluate_lds(evaluation: Evaluation) -> Found:
    """Linear datamodeling scores over retrained subsets."""
    wanted, asked, n = evaluation.wanted, evaluation.asked, len(evaluation.training)
    if not 0 < round(wanted.fraction * n) < n:
        raise ConfigError(
            f"influence.evaluate.fraction: {wanted.fraction:g} of {n} training examples are"
            f" {round(wanted.fraction * n)} of them",
            hint="a subset has some of the examples, and lacks some",
        )
    fits = fitted_methods(evaluation)
    subsets = random_subsets(n, wanted.subsets, wanted.fraction, np.random.default_rng([wanted.seed, 3]))
    sets = {f"subset {number}": rows for number, rows in enumerate(rows_of(subsets))}
    outcomes = evaluation.retrained(
        sets, asked, lambda number, repeat: seed_of(wanted.seed, 1, number, repeat)
    )
    truth = np.stack(list(outcomes.values()))  # [S, R, m]
    scores, names = all_scores(evaluation, fits, asked)
    found = lds(scores, subsets, truth, evaluation.main)
    rows = [
        {
            "method": name,
            "control": name in names,
            "mean": score.mean,
            **ends(score.interval),
            "ahead": score.ahead,
            **ends(score.ahead_interval, "ahead_"),
            "undefined": score.undefined,
        }
        for name, score in found.items()
    ]
    facts = {
        "subsets": wanted.subsets,
        "fraction": wanted.fraction,
        "seeds": evaluation.seeds,
        "queries": len(asked),
        "models": len(sets) * evaluation.seeds,
        **ceiling_facts(truth),
    }
    details = per_query(evaluation, asked, {name: score.per_query for name, score in found.items()})
    return Found(frame(rows), facts, details)


def evaluate_loo(evaluation: Evaluation) -> Found:
    """Leave-one-out rises by retraining."""
    wanted, setup, n = evaluation.wanted, evaluation.setup, len(evaluation.training)
    if n < _FEWEST:
        raise ConfigError(
            f"there are {n} training examples to leave out, one at a time; a correlation takes {_FEWEST}"
        )
    fits = fitted_methods(evaluation)
    random, highest = np.random.default_rng([wanted.seed, 4]), wanted.removals // _HIGHEST
    removed = choose_removals(_own_influence(evaluation, fits), wanted.removals, highest, random)
    scores, names = all_scores(evaluation, fits, evaluation.asked)
    left = {f"all but example {row}": np.delete(np.arange(n), row) for row in removed}
    everything, without, models = without_rows(evaluation, left, evaluation.asked)
    rises = np.stack(list(without.values())) - everything
    actual = rises.mean(1)
    found = leave_one_out(scores, removed, actual)
    rows = []
    for name, score in found.items():
        values = asdict(score)
        del values["per_query"]
        interval = ends(values.pop("interval"))
        rows.append({"method": name, "control": name in names, **interval, **values})
    facts = {
        "removals": len(removed),
        "highest": min(highest, len(removed)),
        "seeds": evaluation.seeds,
        "queries": len(evaluation.asked),
        "models": models,
        **ceiling_facts(rises),
    }
    query_ids = setup.query_reader.samples.ids[evaluation.asked]
    points = pd.DataFrame(
        {
            "train_id": np.repeat(setup.run.samples.ids[setup.training_rows][removed], len(query_ids)),
            "query_id": np.tile(query_ids, len(removed)),
            "predicted": scores[evaluation.main][removed].ravel(),
            "actual": actual.ravel(),
        }
    )
    correlations = {name: score.per_query for name, score in found.items()}
    return Found(frame(rows), facts, per_query(evaluation, evaluation.asked, correlations), points)


def _own_influence(evaluation: Evaluation, fits: Fits) -> Array:
    """[n]: self-influence by the config's method, or the gradient norm where that would take a solve an
    example.
    """
    method, fitted = fits[evaluation.main]
    if all(one.has_self_influence for one in fitted):
        return self_influences(method, fitted)
    evaluation.notes.append(
        f"{evaluation.main} has no cheap self-influence: the removals with the highest gradient norm"
        " are taken in its place"
    )
    return own_controls(evaluation.training)[NORM]


def evaluate_removal(evaluation: Evaluation) -> Found:
    """Rises of queries whose strongest proponents are left out."""
    wanted, n = evaluation.wanted, len(evaluation.training)
    if max(wanted.ks) >= n:
        raise ConfigError(
            f"influence.evaluate.ks has {max(wanted.ks)}, and there are {n} training examples",
            hint="leave out fewer than there are",
        )
    count = min(_EXPLAINED, len(evaluation.asked))
    asked = np.sort(np.random.default_rng([wanted.seed, 5]).choice(evaluation.asked, count, replace=False))
    scores, names = all_scores(evaluation, fitted_methods(evaluation), asked, only=(RANDOM, NEIGHBOUR))

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
    rows, details = [], []
    for name, by_count in removal(rises, evaluation.main).items():
        for k, score in by_count.items():
            rows.append(
                {
                    "method": name,
                    "control": name in names,
                    "removed": k,
                    "rise": score.rise,
                    **ends(score.interval),
                    "ahead": score.ahead,
                    **ends(score.ahead_interval, "ahead_"),
                }
            )
            details.append(per_query(evaluation, asked, {name: score.per_query}).assign(removed=k))
    facts = {"queries": count, "seeds": evaluation.seeds, "models": models}
    return Found(frame(rows), facts, pd.concat(details, ignore_index=True))


EVALUATIONS: dict[EvaluationKind, Callable[[Evaluation], Found]] = {
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


def ceiling_facts(outcomes: Array) -> dict[str, float | None]:
    found = ceiling(outcomes)
    if found is None:
        return dict.fromkeys(("ceiling", "single_seed", "reliability"))
    return {"ceiling": found.best, "single_seed": found.single, "reliability": found.reliability}


def ends(interval: Interval | None, start: str = "") -> dict[str, float | None]:
    """An interval as two columns, whose names begin with `start`."""
    low, high = interval or (None, None)
    return {f"{start}low": low, f"{start}high": high}


def per_query(evaluation: Evaluation, asked: Array, values: dict[str, Array]) -> pd.DataFrame:
    """One row for each method and query."""
    ids = evaluation.setup.query_reader.samples.ids[asked]
    parts = [
        pd.DataFrame({"method": name, "query_id": ids, "query_index": asked, "value": column})
        for name, column in values.items()
    ]
    return pd.concat(parts, ignore_index=True)


def frame(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """A table whose missing numbers are NaN."""
    table = pd.DataFrame(rows)
    numbers = [
        column
        for column in table.columns
        if column not in ("method", "control") and table[column].dtype == object
    ]
    return table.astype(dict.fromkeys(numbers, float))
