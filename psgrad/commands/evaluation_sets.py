"""The evaluations that leave rows out: single examples, one at a time; the
strongest proponents of each query; and the rows that help or hurt all queries together, as a curve over their
number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import TypeVar

import numpy as np
import pandas as pd

from psgrad.commands.evaluation_kinds import (
    Found,
    all_scores,
    ceiling_facts,
    ends,
    fitted_methods,
    frame,
    per_query,
)
from psgrad.commands.evaluation_parts import Array, EvaluationParts, Fits
from psgrad.engine.influence.evaluation.controls import NEIGHBOUR, NORM, RANDOM, own_controls
from psgrad.engine.influence.evaluation.jobs import Job
from psgrad.engine.influence.evaluation.metrics import (
    RemovalScore,
    choose_removals,
    leave_one_out,
    removal,
    strongest,
)
from psgrad.engine.influence.evaluation.retraining import seed_of
from psgrad.engine.influence.evaluation.statistics import self_influences
from psgrad.errors import ConfigError

Key = TypeVar("Key", bound=tuple[object, ...])
# Examples that are left out one at a time, for their effects to be correlated with anything.
_FEWEST = 3


def evaluate_loo(evaluation: EvaluationParts) -> Found:
    """Leave-one-out rises by retraining."""
    wanted, setup, n = evaluation.wanted, evaluation.setup, len(evaluation.training)
    if n < _FEWEST:
        raise ConfigError(
            f"there are {n} training examples to leave out, one at a time",
            expected=f"at least {_FEWEST}, for a correlation",
        )
    fits = fitted_methods(evaluation)
    removed = choose_removals(
        _own_influence(evaluation, fits),
        wanted.removals,
        wanted.highest,
        np.random.default_rng([wanted.seed, 4]),
    )
    scores, controls = all_scores(evaluation, fits, evaluation.asked)
    left = [(f"all but example {row}", np.delete(np.arange(n), row)) for row in removed]
    ids = setup.run.samples.ids[setup.training_rows]
    outcomes = _outcomes_of(evaluation, [("all examples", np.arange(n)), *left], evaluation.asked)
    rises = outcomes[1:] - outcomes[0]
    actual = rises.mean(1)
    found = leave_one_out(scores, removed, actual)
    rows = []
    for name, score in found.items():
        values = asdict(score)
        del values["per_query"]
        interval = ends(values.pop("interval"))
        rows.append({"method": name, "control": name in controls, **interval, **values})
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
            "train_id": np.repeat(ids[removed], len(query_ids)),
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
            f"influence.evaluate.ks has {max(wanted.ks)}, and there are {n} training examples",
            expected="fewer than there are",
        )
    count = min(wanted.explained, len(evaluation.asked))
    asked = np.sort(np.random.default_rng([wanted.seed, 5]).choice(evaluation.asked, count, replace=False))
    scores, names = all_scores(evaluation, fitted_methods(evaluation), asked, only=(RANDOM, NEIGHBOUR))
    left = {
        (name, k, query): np.delete(np.arange(n), strongest(matrix, query, k))
        for name, matrix in scores.items()
        for k in wanted.ks
        for query in range(count)
    }
    found, place = _outcomes_of_sets(evaluation, left, "of removed examples", asked)
    outcomes = found.mean(1)
    rises = {
        name: {
            k: np.array([outcomes[place[name, k, q], q] - outcomes[0, q] for q in range(count)])
            for k in wanted.ks
        }
        for name in scores
    }
    rows, details = [], []
    for name, k, score in _removal_scores(rises, evaluation.main):
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


def _outcomes_of(evaluation: EvaluationParts, sets: Iterable[tuple[str, Array]], queries: Array) -> Array:
    """[sets, seeds, m]: what models of each set of rows (name, rows) measure on these queries; the seeds are
    the same for all sets.
    """
    jobs = [
        Job(f"{name}, seed {repeat}", rows, seed_of(evaluation.wanted.seed, 0, repeat))
        for name, rows in sets
        for repeat in range(evaluation.seeds)
    ]
    return evaluation.outcomes(jobs, queries).reshape(-1, evaluation.seeds, len(queries))


def _outcomes_of_sets(
    evaluation: EvaluationParts, left: Mapping[Key, Array], words: str, queries: Array
) -> tuple[Array, dict[Key, int]]:
    """(`_outcomes_of` all rows, and of each set of rows that are left; the place of each key's set). Methods
    agree on many a set: each is trained once. words: what sets are called in messages.
    """
    everything = np.arange(len(evaluation.training))
    sets = {rows.tobytes(): rows for rows in (everything, *left.values())}
    order = {key: place for place, key in enumerate(sets)}
    named = [(f"set {place} {words}", rows) for place, rows in enumerate(sets.values())]
    return _outcomes_of(evaluation, named, queries), {
        key: order[rows.tobytes()] for key, rows in left.items()
    }


def _removal_scores(
    rises: Mapping[str, Mapping[int, Array]], main: str
) -> Iterator[tuple[str, int, RemovalScore]]:
    """Name, number of removed examples, score: one after another. See `removal`."""
    for name, curve in removal(rises, main).items():
        for count, score in curve.items():
            yield name, count, score
