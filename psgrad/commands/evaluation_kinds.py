"""The kinds of evaluation: the linear datamodeling score, with dampings that are chosen by it on subsets and
queries that are not reported; single examples that are left out, one at a time; and the strongest proponents
of each query.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from psgrad.commands.evaluation_parts import Array, EvaluationParts, Fits
from psgrad.commands.influence_setup import errors_of_own_method
from psgrad.config import EvaluationKind, TuningConfig
from psgrad.engine.influence.evaluation.controls import NEIGHBOUR, NORM, RANDOM, controls, own_controls
from psgrad.engine.influence.evaluation.jobs import Job
from psgrad.engine.influence.evaluation.metrics import (
    ceiling,
    choose_removals,
    lds,
    lds_mean,
    leave_one_out,
    random_subsets,
    removal,
    rows_of,
    strongest,
)
from psgrad.engine.influence.evaluation.retraining import seed_of
from psgrad.engine.influence.evaluation.statistics import (
    Interval,
    damped,
    fitted_to,
    has_damping,
    score_matrix,
    self_influences,
)
from psgrad.errors import ConfigError, InfluenceError

Curves = dict[str, dict[float, float]]
# Examples that are left out one at a time, for their effects to be correlated with anything.
_FEWEST = 3


@dataclass
class Found:
    """What an evaluation found; see EvaluationResult."""

    table: pd.DataFrame
    facts: dict[str, Any]
    details: pd.DataFrame
    points: pd.DataFrame = field(default_factory=pd.DataFrame)
    curves: Curves = field(default_factory=dict)


def evaluate_lds(evaluation: EvaluationParts) -> Found:
    """Linear datamodeling scores over retrained subsets."""
    wanted, random = evaluation.wanted, np.random.default_rng([evaluation.wanted.seed, 3])
    tuning, n = wanted.tuning, len(evaluation.training)
    if not 0 < round(wanted.fraction * n) < n:
        raise ConfigError(
            f"influence.evaluate.fraction: {wanted.fraction:g} of {n} training examples are"
            f" {round(wanted.fraction * n)} of them; expected subsets that have some examples, and lack"
            " some",
        )
    fits = fitted_methods(evaluation)
    asked, set_aside = evaluation.asked, np.empty(0, dtype=evaluation.asked.dtype)
    if tuning is not None:
        if tuning.queries >= len(asked):
            raise ConfigError(
                f"influence.evaluate.tuning.queries sets {tuning.queries} of the {len(asked)} queries"
                " aside; expected fewer than there are queries, as those that choose a damping are not"
                " reported",
            )
        chosen = np.sort(random.choice(len(asked), tuning.queries, replace=False))
        set_aside, asked = asked[chosen], np.delete(asked, chosen)
    others = 0 if tuning is None else tuning.subsets
    subsets = random_subsets(n, others + wanted.subsets, wanted.fraction, random)
    jobs = [
        Job(f"subset {number}, seed {repeat}", rows, seed_of(wanted.seed, 1, number, repeat))
        for number, rows in enumerate(rows_of(subsets))
        for repeat in range(evaluation.seeds)
    ]
    outcomes = evaluation.outcomes(jobs, np.concatenate([set_aside, asked]))
    outcomes = outcomes.reshape(len(subsets), evaluation.seeds, -1)  # [S, R, m]
    curves: Curves = {}
    dampings: dict[str, float] = {}
    if tuning is not None:
        curves, dampings = tune(
            evaluation, fits, tuning, subsets[:others], outcomes[:others, :, : len(set_aside)], set_aside
        )
    scores, names = all_scores(evaluation, fits, asked)
    truth, reported = outcomes[others:, :, len(set_aside) :], subsets[others:]
    found = lds(scores, reported, truth, evaluation.main)
    rows = [
        {
            "method": name,
            "control": name in names,
            "mean": score.mean,
            **ends(score.interval),
            "ahead": score.ahead,
            **ends(score.ahead_interval, "ahead_"),
            "undefined": score.undefined,
            "damping": dampings.get(name),
        }
        for name, score in found.items()
    ]
    facts = {
        "subsets": wanted.subsets,
        "fraction": wanted.fraction,
        "seeds": evaluation.seeds,
        "queries": len(asked),
        "models": evaluation.models,
        **ceiling_facts(truth),
    }
    details = per_query(evaluation, asked, {name: score.per_query for name, score in found.items()})
    return Found(frame(rows), facts, details, curves=curves)


def evaluate_loo(evaluation: EvaluationParts) -> Found:
    """Leave-one-out rises by retraining."""
    wanted, setup, n = evaluation.wanted, evaluation.setup, len(evaluation.training)
    if n < _FEWEST:
        raise ConfigError(
            f"there are {n} training examples to leave out, one at a time; expected at least {_FEWEST},"
            " for a correlation",
        )
    fits = fitted_methods(evaluation)
    random = np.random.default_rng([wanted.seed, 4])
    removed = choose_removals(_own_influence(evaluation, fits), wanted.removals, wanted.highest, random)
    scores, names = all_scores(evaluation, fits, evaluation.asked)
    left = {f"all but example {row}": np.delete(np.arange(n), row) for row in removed}
    everything, without = outcomes_of(evaluation, left, evaluation.asked)
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
        "highest": min(wanted.highest, len(removed)),
        "seeds": evaluation.seeds,
        "queries": len(evaluation.asked),
        "models": evaluation.models,
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


def _own_influence(evaluation: EvaluationParts, fits: Fits) -> Array:
    """[n]: self-influence by the config's method, or the gradient norm where that would take a solve an
    example.
    """
    _, fitted = fits[evaluation.main]
    if all(one.has_self_influence for one in fitted):
        return self_influences(evaluation.methods[evaluation.main], fitted, evaluation.average)
    evaluation.notes.append(
        f"{evaluation.main} has no cheap self-influence: the removals with the highest gradient norm"
        " are taken in its place"
    )
    return own_controls(evaluation.training)[NORM]


def evaluate_removal(evaluation: EvaluationParts) -> Found:
    """Rises of queries whose strongest proponents are left out."""
    wanted, n = evaluation.wanted, len(evaluation.training)
    if max(wanted.ks) >= n:
        raise ConfigError(
            f"influence.evaluate.ks has {max(wanted.ks)}, and there are {n} training examples; expected"
            " fewer than there are",
        )
    count = min(wanted.explained, len(evaluation.asked))
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
    everything, without = outcomes_of(evaluation, left, asked)
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
    facts = {"queries": count, "seeds": evaluation.seeds, "models": evaluation.models}
    return Found(frame(rows), facts, pd.concat(details, ignore_index=True))


EVALUATIONS: dict[EvaluationKind, Callable[[EvaluationParts], Found]] = {
    "lds": evaluate_lds,
    "loo": evaluate_loo,
    "removal": evaluate_removal,
}


# -- what they share -----------------------------------------------------------------------------------------


def fitted_methods(evaluation: EvaluationParts) -> Fits:
    """name -> (method, fitted at each checkpoint). A compared method that has no scores is named and left
    out; the config's raises.
    """
    found: Fits = {}
    for name, method in evaluation.methods.items():
        with _or_left_out(evaluation, name):
            found[name] = method, fitted_to(method, evaluation.places())
    return found


@contextmanager
def _or_left_out(evaluation: EvaluationParts, name: str) -> Iterator[None]:
    """A compared method that fails inside is named in the notes; the config's own raises InfluenceError."""
    try:
        with errors_of_own_method(name.partition(" (")[0]):  # without options, as a config names it
            yield
    except InfluenceError as error:
        if name == evaluation.main:
            raise
        evaluation.notes.append(f"left out: {name}, as {error.message}")


def tune(
    evaluation: EvaluationParts,
    fits: Fits,
    tuning: TuningConfig,
    subsets: Array,
    outcomes: Array,
    asked: Array,
) -> tuple[Curves, dict[str, float]]:
    """(name -> damping -> score, name -> the best damping), of the methods that have one; `fits` has them
    with it afterwards.

    A damping with which the curvature has no inverse is named, and no candidate. A compared method without
    any candidate is left out; the config's raises InfluenceError.
    """
    queries, curves = evaluation.queries(asked), Curves()
    best: dict[str, float] = {}
    for name in [name for name, (method, _) in fits.items() if has_damping(method)]:
        method, fitted = fits[name]
        normalize = evaluation.normalize if name == evaluation.main else None
        curve: dict[float, float] = {}
        for damping in sorted(set(tuning.dampings)):
            try:
                changed, there = damped(method, fitted, evaluation.places(), damping)
                scores = score_matrix(changed, there, queries, normalize, evaluation.average)
                curve[damping] = lds_mean(scores, subsets, outcomes)
            except InfluenceError as error:
                evaluation.notes.append(f"no candidate for {name}: damping {damping:g}, as {error.message}")
        if not curve:
            if name == evaluation.main:
                raise InfluenceError(
                    f"with none of the candidate dampings {name} has scores",
                    hint="add larger ones to influence.evaluate.tuning.dampings",
                )
            del fits[name]
            evaluation.notes.append(
                f"left out: {name}, which has no scores with any of the candidate dampings"
            )
            continue
        curves[name] = curve
        best[name] = max(curve, key=curve.__getitem__)
        fits[name] = damped(method, fitted, evaluation.places(), best[name])
        if len(curve) > 1 and best[name] in (min(curve), max(curve)):
            evaluation.notes.append(
                f"the best damping of {name} is at the end of the candidates: {best[name]:g}"
            )
    return curves, best


def all_scores(
    evaluation: EvaluationParts, fits: Fits, asked: Array, only: Iterable[str] | None = None
) -> tuple[dict[str, Array], set[str]]:
    """(name -> [n, m] of the methods and the controls, the names of the controls)."""
    queries = evaluation.queries(asked)
    scores = {}
    for name, (method, fitted) in fits.items():
        normalize = evaluation.normalize if name == evaluation.main else None
        with _or_left_out(evaluation, name):
            scores[name] = score_matrix(method, fitted, queries, normalize, evaluation.average)
    beside, notes = controls(evaluation.training, queries[0], evaluation.wanted.seed)
    beside = {name: matrix for name, matrix in beside.items() if only is None or name in only}
    evaluation.notes += [note for note in notes if note not in evaluation.notes]
    return {**scores, **beside}, set(beside)


def outcomes_of(
    evaluation: EvaluationParts, left: Mapping[str, Array], queries: Array
) -> tuple[Array, dict[str, Array]]:
    """([seeds, m]: what models of all rows measure on these queries, larger being worse; name -> the same for
    the rows that are left). The seeds are the same for all; equal sets of rows are trained once.
    """
    sets = {"all examples": np.arange(len(evaluation.training)), **left}
    first: dict[bytes, str] = {}
    for name, rows in sets.items():
        first.setdefault(rows.tobytes(), name)
    jobs = [
        Job(f"{name}, seed {repeat}", sets[name], seed_of(evaluation.wanted.seed, 0, repeat))
        for name in first.values()
        for repeat in range(evaluation.seeds)
    ]
    outcomes = evaluation.outcomes(jobs, queries).reshape(-1, evaluation.seeds, len(queries))
    found = dict(zip(first, outcomes, strict=True))
    return outcomes[0], {name: found[rows.tobytes()] for name, rows in left.items()}


def ceiling_facts(outcomes: Array) -> dict[str, float | None]:
    found = ceiling(outcomes)
    if found is None:
        return dict.fromkeys(("ceiling", "single_seed", "reliability"))
    return {"ceiling": found.best, "single_seed": found.single, "reliability": found.reliability}


def ends(interval: Interval | None, start: str = "") -> dict[str, float | None]:
    """An interval as two columns, whose names begin with `start`."""
    low, high = interval or (None, None)
    return {f"{start}low": low, f"{start}high": high}


def per_query(evaluation: EvaluationParts, asked: Array, values: dict[str, Array]) -> pd.DataFrame:
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
