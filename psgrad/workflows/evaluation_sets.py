"""The evaluations that leave out many rows at once: the groups of the config, one at a time, and the rows
that help or hurt all queries together, as a curve over their number.
"""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pandas as pd
import torch

from psgrad.engine.influence.evaluation.jobs import Job
from psgrad.engine.influence.evaluation.metrics import leave_one_out, removal
from psgrad.engine.influence.evaluation.mislabel import LOSS, RANDOM
from psgrad.engine.influence.evaluation.retraining import seed_of
from psgrad.engine.influence.ranking import OverQueries, over_queries
from psgrad.errors import ConfigError
from psgrad.workflows.evaluation_kinds import (
    Found,
    all_scores,
    ceiling_facts,
    fitted_methods,
    frame,
    per_query,
)
from psgrad.workflows.evaluation_parts import Array, EvaluationParts
from psgrad.workflows.influence_questions import group_sums

# Groups that are left out one at a time, for their effects to be correlated with anything.
_FEWEST = 3
SIDES = {"helpful": 1, "harmful": -1}
SIZE = "rows in the group"


def evaluate_groups(evaluation: EvaluationParts) -> Found:
    """Rises of the queries' measurement without each group of training examples, beside summed scores."""
    setup, wanted = evaluation.setup, evaluation.wanted
    if setup.groups is None:
        raise ConfigError(
            "--evaluate groups leaves out one group at a time, and influence.groups names no column",
            expected="a column of the training data, such as a document or a source",
            next_step="set influence.groups",
        )
    groups = setup.groups[setup.training_rows]
    names, sizes = np.unique(groups, return_counts=True)
    if len(names) < _FEWEST:
        raise ConfigError(
            f"influence.groups: the column {setup.run.config.influence.groups} has {len(names)} groups",
            expected=f"at least {_FEWEST} to leave out, one at a time, for a correlation",
        )
    random = np.random.default_rng([wanted.seed, 7])
    removed = np.sort(random.choice(len(names), min(wanted.removals, len(names)), replace=False))
    scores, controls = all_scores(evaluation, fitted_methods(evaluation), evaluation.asked)
    sums = {name: group_sums(matrix, groups)[1] for name, matrix in scores.items()}
    sums[SIZE] = np.repeat(sizes[:, None].astype(float), len(evaluation.asked), 1)
    everything = np.arange(len(groups))
    left = [("all examples", everything)]
    left += [
        (f"all but the group {names[group]}", np.flatnonzero(groups != names[group])) for group in removed
    ]
    rises = rises_without(evaluation, left)
    actual = rises.mean(1)
    rows = []
    for name, score in leave_one_out(sums, removed, actual).items():
        values = asdict(score)
        low, high = values.pop("interval")
        del values["per_query"]
        rows.append(
            {"method": name, "control": name in {*controls, SIZE}, "low": low, "high": high, **values}
        )
    facts = {
        "groups": len(names),
        "removals": len(removed),
        "seeds": evaluation.seeds,
        "queries": len(evaluation.asked),
        "models": evaluation.models,
        **ceiling_facts(rises),
    }
    points = pd.DataFrame(
        {
            "group": np.repeat(names[removed].astype(str), len(evaluation.asked)),
            "query_id": np.tile(setup.query_reader.samples.ids[evaluation.asked], len(removed)),
            "predicted": sums[evaluation.main][removed].ravel(),
            "actual": actual.ravel(),
        }
    )
    correlations = {name: score.per_query for name, score in leave_one_out(sums, removed, actual).items()}
    return Found(frame(rows), facts, per_query(evaluation, evaluation.asked, correlations), points)


def rises_without(evaluation: EvaluationParts, left: list[tuple[str, Array]]) -> Array:
    """[sets - 1, seeds, m]: how much larger the measurements are of models trained on each of these sets of
    rows than of those trained on the first one, by the same seeds.
    """
    jobs = [
        Job(f"{name}, seed {repeat}", rows, seed_of(evaluation.wanted.seed, 0, repeat))
        for name, rows in left
        for repeat in range(evaluation.seeds)
    ]
    outcomes = evaluation.outcomes(jobs, evaluation.asked).reshape(len(left), evaluation.seeds, -1)
    found: Array = outcomes[1:] - outcomes[0]
    return found


def evaluate_curve(evaluation: EvaluationParts) -> Found:
    """Rises of the queries without the k rows that help, or hurt, all of them together the most; and without
    as many random rows.
    """
    wanted, n = evaluation.wanted, len(evaluation.training)
    counts = wanted.removed_of(n)
    if counts[-1] >= n:
        raise ConfigError(
            f"influence.evaluate.remove asks for {counts[-1]:,} rows, and there are {n:,} training examples",
            expected="fewer than there are",
        )
    how = evaluation.setup.run.config.influence.over_queries
    scores, controls = all_scores(evaluation, fitted_methods(evaluation), evaluation.asked, only=(LOSS,))
    joined = {name: _joined(matrix, how) for name, matrix in scores.items()}
    # Of the control, rows of large loss are taken for those that hurt.
    joined |= {name: -values for name, values in joined.items() if name in controls}
    everything = np.arange(n)
    left: dict[tuple[str, str, int], Array] = {}
    for name, values in joined.items():
        for side, sign in SIDES.items():
            order = np.argsort(-sign * np.nan_to_num(values, nan=-sign * np.inf), kind="stable")
            left |= {(name, side, k): np.sort(order[k:]) for k in counts}
    draws = {k: np.random.default_rng([wanted.seed, 8, k]) for k in counts}
    places = list(map(str, range(wanted.seeds)))  # as many random sets as there are seeds
    random = {
        (RANDOM, place, k): np.sort(draws[k].choice(everything, n - k, replace=False))
        for place in places
        for k in counts
    }
    rises = _rises_of_sets(evaluation, everything, {**left, **random})
    for k in counts:
        drawn = np.mean([rises[RANDOM, place, k] for place in places], axis=0)
        rises |= {(RANDOM, side, k): drawn for side in SIDES}
    predicted = {
        key: float(np.nansum(np.delete(joined[key[0]], rows)))
        for key, rows in left.items()
        if how == "mean" and evaluation.predicts_removal(key[0])
    }
    rows_found, details = [], []
    for side in SIDES:
        of_side = {name: {k: rises[name, side, k] for k in counts} for name in (*joined, RANDOM)}
        for name, curve in removal(of_side, evaluation.main).items():
            for k, score in curve.items():
                ahead = (None, None) if score.ahead_interval is None else score.ahead_interval
                own = name not in controls and name != RANDOM
                rows_found.append(
                    {
                        "method": name,
                        "control": not own,
                        "side": side,
                        "removed": k,
                        "rise": score.rise,
                        "low": score.interval[0],
                        "high": score.interval[1],
                        "predicted": predicted.get((name, side, k)),
                        "ahead": score.ahead,
                        "ahead_low": ahead[0],
                        "ahead_high": ahead[1],
                    }
                )
                each = per_query(evaluation, evaluation.asked, {name: score.per_query})
                details.append(each.assign(side=side, removed=k))
    facts = {
        "queries": len(evaluation.asked),
        "seeds": evaluation.seeds,
        "models": evaluation.models,
        "rows": n,
    }
    return Found(frame(rows_found), facts, pd.concat(details, ignore_index=True))


def _joined(scores: Array, how: OverQueries) -> Array:
    """[n]: scores [n, m] of all queries together."""
    value, count = over_queries(torch.from_numpy(scores).unsqueeze(2), how)
    found: Array = (value / count)[:, 0].numpy()
    return found


def _rises_of_sets(
    evaluation: EvaluationParts, everything: Array, left: dict[tuple[str, str, int], Array]
) -> dict[tuple[str, str, int], Array]:
    """key -> [m], the mean over the seeds. Methods agree on many a set: each is trained once."""
    sets = {everything.tobytes(): everything, **{rows.tobytes(): rows for rows in left.values()}}
    order = {key: place - 1 for place, key in enumerate(sets)}
    named = [(f"set {place} of rows that are left", rows) for place, rows in enumerate(sets.values())]
    found = rises_without(evaluation, named).mean(1)
    return {key: found[order[rows.tobytes()]] for key, rows in left.items()}
