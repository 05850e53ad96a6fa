"""What the amounts of an influence run rest on: the weight decay of training, which is estimated where the
config names none; and the check of the largest amounts, by training that goes on without the row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import torch

from psgrad.commands.influence_setup import InfluenceSetup
from psgrad.engine.execution.examples import Examples
from psgrad.engine.influence.continued import Budget, continued
from psgrad.engine.influence.method import Fitted, Method
from psgrad.engine.influence.weight_decay import DecayEstimate, estimated_decay
from psgrad.errors import InfluenceError
from psgrad.reports.words import duration
from psgrad.run.results.influence import ALL_INDEX, CheckedRemoval, RemovalCheck

# Pairs of the largest scores, each of another training example, that are checked.
_PAIRS = 3
# Seconds that the check may take where the config leaves it open.
_SECONDS = 15.0


def with_weight_decay(
    setup: InfluenceSetup, row_norms: np.ndarray, say: Callable[[str], None]
) -> InfluenceSetup:
    """The setup with the estimated weight decay as the method's, where the config names none and the weights
    are at a minimum with it. A weight decay that the config names stays; if the estimate is another, that is
    said.

    row_norms: [n], of the training examples' gradients at the last checkpoint.
    """
    method, named = setup.method, setup.config.influence.method.options.get("weight_decay")
    if not _takes_decay(method):
        return setup
    estimate = estimated_decay(setup.views[-1].training, torch.from_numpy(row_norms))
    if not estimate.certain:
        return setup
    if named is None:
        say(f"weights are at a minimum with {_words(estimate)}: used")
        changed: Any = method
        return replace(setup, method=replace(changed, weight_decay=estimate.value))
    if estimate.differs_from(float(named)):
        say(
            f"weights are at a minimum with {_words(estimate)}, and the config names {float(named):g}, which"
            " is used; leave it out to use the other one"
        )
    return setup


def _takes_decay(method: Method) -> bool:
    """Whether a method has a weight decay, which is none unless its options name it."""
    return is_dataclass(method) and any(
        each.name == "weight_decay" and each.default == 0 for each in fields(method)
    )


def _words(estimate: DecayEstimate) -> str:
    return (
        f"weight_decay {estimate.value:#.3g} (the gradient of the mean loss is -{estimate.value:#.3g} times"
        f" the weights, cosine {estimate.cosine:.3f})"
    )


def check_removals(
    setup: InfluenceSetup,
    fitted: Sequence[Fitted],
    scores: pd.DataFrame,
    own: np.ndarray | None,
    say: Callable[[str], None],
    tell: Callable[[int, int], None],
) -> RemovalCheck | None:
    """For the largest scores, and the largest self-influence, the effect of training on without the example;
    for several checkpoints the mean. None where the config leaves it out, the method has no inverse to take
    steps by, or the time does not allow it.

    own: [n] self-influences. tell: see `Budget`.
    """
    wanted, pairs = setup.config.influence.check, _largest(scores)
    solvers = [solver for each in fitted if (solver := each.solver()) is not None]
    if wanted == "never" or len(solvers) < len(fitted) or not len(pairs):
        return None
    places = np.searchsorted(setup.training_rows, pairs["train_index"]).tolist()
    largest = [] if own is None or not np.isfinite(own).any() else [int(np.nanargmax(own))]
    rows = list(dict.fromkeys([*places, *largest]))
    limit = math.inf if wanted == "always" else _SECONDS / len(fitted)
    decay = getattr(setup.method, "weight_decay", 0.0)
    try:
        found = [
            continued(solver, rows, decay, budget=Budget(solver.training.seconds, limit, tell))
            for solver in solvers
        ]
    except InfluenceError as error:
        say(f"{_UNTRIED}: {error.message}")
        return None
    steps, converged = min(each.steps for each in found), all(each.converged for each in found)
    at_minimum = all(each.at_minimum for each in found)
    if at_minimum and not steps and not converged:
        seconds = sum(each.seconds or 0.0 for each in found)
        say(_TOO_LONG.format(duration(seconds)) if seconds else f"{_UNTRIED}: {_NO_STEP}")
        return None

    def change(examples: Sequence[Examples], row: int, place: int) -> float | None:
        """The mean over checkpoints; None where training did not go on."""
        if not at_minimum:
            return None
        changes = [
            each.changes(some, row)[rows.index(place)] for each, some in zip(found, examples, strict=True)
        ]
        return float(torch.stack(changes).mean())

    ids, numbers = setup.common.samples.ids, setup.training_rows
    queries, training = [view.queries for view in setup.views], [view.training for view in setup.views]
    removals = []
    for pair, place in zip(pairs.to_dict("records"), places, strict=True):
        query = int(pair["query_index"])
        after = change(queries, int(np.flatnonzero(setup.query_rows == query)[0]), place)
        removals.append(
            CheckedRemoval(
                str(pair["train_id"]),
                int(numbers[place]),
                str(pair["query_id"]),
                query,
                float(pair["score"]),
                after,
            )
        )
    for place in largest:
        assert own is not None
        name, row = str(ids[numbers[place]]), int(numbers[place])
        removals.append(
            CheckedRemoval(name, row, name, None, float(own[place]), change(training, place, place))
        )
    return RemovalCheck(
        steps,
        converged,
        removals,
        min(each.length for each in found),
        max(each.excess for each in found),
        at_minimum,
    )


_UNTRIED = "no removal was tried by training on"
_NO_STEP = "no step lowers the training loss, or it is not finite"
_TOO_LONG = (
    f"{_UNTRIED}: one step is predicted to take {{}}; influence.check: always takes all of them, and never"
    " leaves them out"
)


def _largest(scores: pd.DataFrame) -> pd.DataFrame:
    """The pairs of the largest scores of either sign, each of another training example."""
    single = scores[scores["query_index"] != ALL_INDEX]
    order = single["score"].abs().sort_values(ascending=False, kind="stable").index
    return single.loc[order].drop_duplicates("train_index").head(_PAIRS)
