"""Training that goes on from the weights, on the data before a change and on the data after it, for a bounded
time: what the prediction of the change is compared with.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import nn

from psgrad.engine.execution.objective import Criterion
from psgrad.engine.influence.evaluation.jobs import Job, LoadedRows, Members, Recipe
from psgrad.engine.influence.evaluation.retraining import EnsembleTrainer

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class MeasuredChange:
    """How much larger scalars are after training on the changed data than on the data before.

    changes: name -> [s, m] of s seeds and m queries. epochs: that were trained; None for training to the
    minimum of a convex objective. seconds: that all took.
    """

    changes: Mapping[str, Array]
    epochs: int | None
    seconds: float


def measured_change(
    model: nn.Module,
    before: LoadedRows,
    after: LoadedRows,
    queries: LoadedRows,
    scalars: Mapping[str, Criterion],
    criterion: Criterion,
    recipe: Recipe,
    *,
    seeds: int,
    seconds: float,
    tell: Callable[[int, int], None] = lambda done, of: None,
) -> MeasuredChange | None:
    """Train copies of the model on, with each of some seeds on both versions of the data; a seed is the order
    of the rows. None where one epoch, by the time of the first one, would take longer than `seconds`.

    Args:
        scalars: name -> what of (output, target) is measured of the queries. criterion: the training loss.
        recipe: of training; it has as many epochs as the time allows, and at most its own.
        tell: called with how many of the trainings are done.

    Raises InfluenceError and ModelError where the model can't be trained on.
    """
    began = time.perf_counter()
    exact = recipe.optimizer == "newton"
    seeds = 1 if exact else seeds
    if not exact:
        one = replace(recipe, epochs=1)
        _trained(model, before, criterion, one, seeds)  # what is made once is made here
        first = time.perf_counter()
        if 2 * (first - began) < seconds:
            _trained(model, before, criterion, one, seeds)
            now = time.perf_counter()
        else:
            now, first = first, began
        epoch = (now - first) * (1 + len(after) / len(before))
        epochs = min(recipe.epochs, int((seconds - (now - began)) / epoch))
        if epochs < 1:
            return None
        recipe = replace(recipe, epochs=epochs)
    found: list[dict[str, Array]] = []
    for number, rows in enumerate((before, after)):
        tell(number, 2)
        members = _trained(model, rows, criterion, recipe, seeds)
        found.append({name: members.measured(queries, scalar) for name, scalar in scalars.items()})
    tell(2, 2)
    changes = {name: found[1][name] - found[0][name] for name in scalars}
    return MeasuredChange(changes, None if exact else recipe.epochs, time.perf_counter() - began)


def _trained(model: nn.Module, rows: LoadedRows, criterion: Criterion, recipe: Recipe, seeds: int) -> Members:
    trainer = EnsembleTrainer(lambda _: copy.deepcopy(model), rows, criterion, recipe)
    numbers = np.arange(len(rows))
    return trainer([Job(f"the training with seed {seed}", numbers, seed) for seed in range(seeds)])
