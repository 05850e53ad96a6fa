"""What predicted amounts are held against: a bound that they cannot pass, and training that goes on without the row."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
import torch

from psgrad.engine.examples import Examples
from psgrad.engine.influence.method import Fitted
from psgrad.engine.influence.removal_check import continued
from psgrad.errors import InfluenceError
from psgrad.results.influence import ALL_INDEX, CheckedRemoval, RemovalCheck
from psgrad.workflows.influence_setup import InfluenceSetup

# Pairs of the largest scores, each of another training example, that are checked.
_PAIRS = 3
# Losses that are never negative, by name.
_NEVER_NEGATIVE = ("cross_entropy", "token_cross_entropy", "bce_with_logits", "mse", "l1", "smooth_l1", "huber")


def marked_beyond_loss(setup: InfluenceSetup, scores: pd.DataFrame, losses: pd.Series, say: Callable[[str], None]) -> pd.DataFrame:
    """The ranked pairs with `beyond_loss`, where the scores predict changes of a loss that is never negative. losses: of the queries, by
    their row."""
    if setup.measurement.name != "loss" or setup.measurement.criterion.name not in _NEVER_NEGATIVE:
        return scores
    known = pd.concat([losses, pd.Series({ALL_INDEX: losses.mean()})])
    limit = scores["query_index"].map(known).to_numpy(float)
    beyond = scores["score"].to_numpy(float) < -limit * (1 + 1e-6)
    if "layer" in scores:
        beyond &= (scores["layer"] == "").to_numpy()
    if beyond.any():
        say(
            f"{int(beyond.sum()):,} of {len(scores):,} ranked scores predict that a query's loss falls by more than it is, and no loss of "
            "this kind is below zero: they are marked, and rank, but are no amounts"
        )
    return scores.assign(beyond_loss=beyond)


def check_removals(
    setup: InfluenceSetup,
    fitted: Sequence[Fitted],
    scores: pd.DataFrame,
    own: np.ndarray | None,
    seconds: float,
    say: Callable[[str], None],
) -> RemovalCheck | None:
    """Of the largest scores, and of the largest self-influence, what training that goes on without the example finds; of several
    checkpoints the mean. None where the config leaves it out, or the method has no inverse to take steps by.

    own: [n] self-influences. seconds: what the steps after the first may take, unless the config has all of them taken.
    """
    wanted, solvers = setup.run.config.influence.check, [each.solver() for each in fitted]
    pairs = _largest(scores)
    if wanted == "never" or any(solver is None for solver in solvers) or not len(pairs):
        return None
    places = np.searchsorted(setup.training_rows, pairs["train_index"]).tolist()
    largest = [] if own is None or not np.isfinite(own).any() else [int(np.nanargmax(own))]
    rows = list(dict.fromkeys([*places, *largest]))
    budget = None if wanted == "always" else seconds / len(fitted)
    decay = getattr(setup.method, "weight_decay", 0.0)
    try:
        found = [continued(solver, rows, decay, seconds=budget) for solver in solvers if solver is not None]
    except InfluenceError as error:
        say(f"no removal was tried by training on: {error.arrived}")
        return None

    steps, converged = min(each.steps for each in found), all(each.converged for each in found)
    if not steps and not converged:
        say("no removal was tried by training on: no step lowers the training loss, or it is not finite")
        return None

    def mean_change(examples: Sequence[Examples], row: int, place: int) -> float:
        changes = [each.changes(some, row)[rows.index(place)] for each, some in zip(found, examples, strict=True)]
        return float(torch.stack(changes).mean())

    removals, queries = [], [moment.queries for moment in setup.moments]
    for pair, place in zip(pairs.itertuples(), places, strict=True):
        query = int(pair.query_index)  # type: ignore[arg-type]
        change = mean_change(queries, int(np.flatnonzero(setup.query_rows == query)[0]), place)
        removals.append(CheckedRemoval(str(pair.train_id), int(setup.training_rows[place]), str(pair.query_id), query, pair.score, change))  # type: ignore[arg-type]
    for place in largest:
        row, change = int(setup.training_rows[place]), mean_change([moment.training for moment in setup.moments], place, place)
        name = str(setup.run.samples.ids[row])
        removals.append(CheckedRemoval(name, row, name, None, float(own[place]) if own is not None else change, change))
    return RemovalCheck(steps, converged, removals, min(each.length for each in found))


def _largest(scores: pd.DataFrame) -> pd.DataFrame:
    """The pairs of the largest scores of either sign, each of another training example."""
    single = scores[scores["query_index"] != ALL_INDEX]
    if "layer" in single:
        single = single[single["layer"] == ""]
    order = single["score"].abs().sort_values(ascending=False, kind="stable").index
    return single.loc[order].drop_duplicates("train_index").head(_PAIRS)
