"""The four evaluations: what is retrained for each, and what scores are compared with it.

Dampings that are chosen by the linear datamodeling score, on subsets and queries that are not reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from psgrad.config import TuningConfig
from psgrad.engine.influence.evaluation.jobs import Job
from psgrad.engine.influence.evaluation.metrics import (
    ceiling,
    choose_removals,
    half_subsets,
    lds,
    lds_mean,
    leave_one_out,
    removal,
    rows_of,
    strongest,
)
from psgrad.engine.influence.evaluation.mislabel import NEIGHBOUR, NORM, RANDOM, controls, own_controls
from psgrad.engine.influence.evaluation.retraining import seed_of
from psgrad.engine.influence.evaluation.statistics import (
    damped,
    fitted_to,
    has_damping,
    score_matrix,
    self_influences,
)
from psgrad.errors import ConfigError, InfluenceError
from psgrad.workflows.evaluation_parts import Array, EvaluationParts, Fits, spec_of
from psgrad.workflows.influence_setup import errors_of_own_method

Curves = dict[str, dict[float, float]]


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
    curves: Curves = {}
    best: dict[str, float] = {}
    for name in [name for name, (method, _) in fits.items() if has_damping(method)]:
        curve = _curve(evaluation, name, fits, tuning, subsets, outcomes, asked)
        if not curve:
            if name == evaluation.main:
                raise InfluenceError(
                    f"with none of the candidate dampings {name} has scores",
                    next_step="add larger ones to influence.evaluate.tuning.dampings",
                )
            del fits[name]
            evaluation.notes.append(
                f"left out: {name}, which has no scores with any of the candidate dampings"
            )
            continue
        curves[name] = curve
        best[name] = max(curve, key=lambda damping: curve[damping])
        method, fitted = fits[name]
        fits[name] = damped(method, fitted, evaluation.places(), best[name])
        if len(curve) > 1 and best[name] in (min(curve), max(curve)):
            evaluation.notes.append(
                f"the best damping of {name} is at the end of the candidates: {best[name]:g}"
            )
    return curves, best


def _curve(
    evaluation: EvaluationParts,
    name: str,
    fits: Fits,
    tuning: TuningConfig,
    subsets: Array,
    outcomes: Array,
    asked: Array,
) -> dict[float, float]:
    """damping -> score of one method."""
    (method, fitted), queries = fits[name], evaluation.queries(asked)
    normalize, curve = evaluation.normalize if name == evaluation.main else None, {}
    average = evaluation.average
    for damping in sorted(set(tuning.dampings)):
        try:
            changed, there = damped(method, fitted, evaluation.places(), damping)
            curve[damping] = lds_mean(
                score_matrix(changed, there, queries, normalize, average), subsets, outcomes
            )
        except InfluenceError as error:
            evaluation.notes.append(f"no candidate for {name}: damping {damping:g}, as {error.arrived}")
    return curve


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
            f" {round(wanted.fraction * n)} of them",
            expected="subsets that have some examples, and lack some",
        )
    fits = fitted_methods(evaluation)
    asked, set_aside = evaluation.asked, np.empty(0, dtype=evaluation.asked.dtype)
    if tuning is not None:
        if tuning.queries >= len(asked):
            raise ConfigError(
                f"influence.evaluate.tuning.queries sets {tuning.queries} of the {len(asked)} queries aside",
                expected="fewer than there are queries, as those that choose a damping are not reported",
            )
        chosen = np.sort(random.choice(len(asked), tuning.queries, replace=False))
        set_aside, asked = asked[chosen], np.delete(asked, chosen)
    others = 0 if tuning is None else tuning.subsets
    subsets = half_subsets(n, others + wanted.subsets, wanted.fraction, random)
    outcomes = subset_outcomes(evaluation, subsets, np.concatenate([set_aside, asked]))
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
            "low": score.interval[0],
            "high": score.interval[1],
            "ahead": score.ahead,
            "ahead_low": None if score.ahead_interval is None else score.ahead_interval[0],
            "ahead_high": None if score.ahead_interval is None else score.ahead_interval[1],
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
    return Found(
        frame(rows),
        facts,
        per_query(evaluation, asked, {name: score.per_query for name, score in found.items()}),
        curves=curves,
    )


def evaluate_loo(evaluation: EvaluationParts) -> Found:
    """Leave-one-out rises by retraining."""
    wanted, n = evaluation.wanted, len(evaluation.training)
    if n < _FEWEST:
        raise ConfigError(
            f"there are {n} training examples to leave out, one at a time",
            expected=f"at least {_FEWEST}, for a correlation",
        )
    fits = fitted_methods(evaluation)
    removed = choose_removals(
        own_influence(evaluation, fits),
        wanted.removals,
        wanted.highest,
        np.random.default_rng([wanted.seed, 4]),
    )
    everything = np.arange(n)
    left = [
        ("all examples", everything),
        *((f"all but example {row}", np.delete(everything, row)) for row in removed),
    ]
    jobs = [
        Job(f"{name}, seed {repeat}", rows, seed_of(wanted.seed, 0, repeat))
        for name, rows in left
        for repeat in range(evaluation.seeds)
    ]
    outcomes = evaluation.outcomes(jobs, evaluation.asked).reshape(len(left), evaluation.seeds, -1)
    rises = outcomes[1:] - outcomes[0]
    scores, names = all_scores(evaluation, fits, evaluation.asked)
    actual = rises.mean(1)
    found = leave_one_out(scores, removed, actual)
    rows = []
    for name, score in found.items():
        values = asdict(score)
        low, high = values.pop("interval")
        del values["per_query"]
        rows.append({"method": name, "control": name in names, "low": low, "high": high, **values})
    facts = {
        "removals": len(removed),
        "highest": min(wanted.highest, len(removed)),
        "seeds": evaluation.seeds,
        "queries": len(evaluation.asked),
        "models": evaluation.models,
        **ceiling_facts(rises),
    }
    ids, query_ids = (
        evaluation.setup.run.samples.ids[evaluation.setup.training_rows],
        evaluation.setup.query_reader.samples.ids,
    )
    points = pd.DataFrame(
        {
            "train_id": np.repeat(ids[removed], len(evaluation.asked)),
            "query_id": np.tile(query_ids[evaluation.asked], len(removed)),
            "predicted": scores[evaluation.main][removed].ravel(),
            "actual": actual.ravel(),
        }
    )
    return Found(
        frame(rows),
        facts,
        per_query(evaluation, evaluation.asked, {name: score.per_query for name, score in found.items()}),
        points,
    )


def evaluate_removal(evaluation: EvaluationParts) -> Found:
    """Rises of queries whose strongest proponents are left out."""
    wanted, n = evaluation.wanted, len(evaluation.training)
    if max(wanted.ks) >= n:
        raise ConfigError(
            f"influence.evaluate.ks has {max(wanted.ks)}, and there are {n} training examples",
            expected="fewer than there are",
        )
    count = min(wanted.explained, len(evaluation.asked))
    asked = np.sort(np.random.default_rng([wanted.seed, 5]).choice(evaluation.asked, count, replace=False))
    scores, names = all_scores(evaluation, fitted_methods(evaluation), asked, only=(RANDOM, NEIGHBOUR))
    everything = np.arange(n)
    # Methods agree on many a set: each is trained once.
    sets: dict[bytes, Array] = {everything.tobytes(): everything}
    place: dict[tuple[str, int, int], int] = {}
    order: dict[bytes, int] = {everything.tobytes(): 0}
    for name, matrix in scores.items():
        for k in wanted.ks:
            for query in range(count):
                rows = np.delete(everything, strongest(matrix, query, k))
                key = rows.tobytes()
                sets.setdefault(key, rows)
                place[name, k, query] = order.setdefault(key, len(order))
    jobs = [
        Job(f"set {number} of removed examples, seed {repeat}", rows, seed_of(wanted.seed, 0, repeat))
        for number, rows in enumerate(sets.values())
        for repeat in range(evaluation.seeds)
    ]
    outcomes = evaluation.outcomes(jobs, asked).reshape(len(sets), evaluation.seeds, -1).mean(1)
    rises = {
        name: {
            k: np.array([outcomes[place[name, k, q], q] - outcomes[0, q] for q in range(count)])
            for k in wanted.ks
        }
        for name in scores
    }
    rows_found, details = [], []
    for name, curve in removal(rises, evaluation.main).items():
        for k, score in curve.items():
            ahead = (None, None) if score.ahead_interval is None else score.ahead_interval
            rows_found.append(
                {
                    "method": name,
                    "control": name in names,
                    "removed": k,
                    "rise": score.rise,
                    "low": score.interval[0],
                    "high": score.interval[1],
                    "ahead": score.ahead,
                    "ahead_low": ahead[0],
                    "ahead_high": ahead[1],
                }
            )
            details.append(per_query(evaluation, asked, {name: score.per_query}).assign(removed=k))
    facts = {"queries": count, "seeds": evaluation.seeds, "models": evaluation.models}
    return Found(frame(rows_found), facts, pd.concat(details, ignore_index=True))


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
        with errors_of_own_method(spec_of(name)):
            yield
    except InfluenceError as error:
        if name == evaluation.main:
            raise
        evaluation.notes.append(f"left out: {name}, as {error.arrived}")


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


def subset_outcomes(evaluation: EvaluationParts, subsets: Array, queries: Array) -> Array:
    """[S, R, m]: what the models of each subset and seed measure."""
    jobs = [
        Job(f"subset {number}, seed {repeat}", rows, seed_of(evaluation.wanted.seed, 1, number, repeat))
        for number, rows in enumerate(rows_of(subsets))
        for repeat in range(evaluation.seeds)
    ]
    return evaluation.outcomes(jobs, queries).reshape(len(subsets), evaluation.seeds, -1)


def own_influence(evaluation: EvaluationParts, fits: Fits) -> Array:
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


def ceiling_facts(outcomes: Array) -> dict[str, float | None]:
    found = ceiling(outcomes)
    if found is None:
        return {"ceiling": None, "single_seed": None, "reliability": None}
    return {"ceiling": found.best, "single_seed": found.single, "reliability": found.reliability}


def per_query(evaluation: EvaluationParts, asked: Array, values: dict[str, Array]) -> pd.DataFrame:
    """One row a method and query."""
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
        if column not in ("method", "control", "side") and table[column].dtype == object
    ]
    return table.astype(dict.fromkeys(numbers, float))
