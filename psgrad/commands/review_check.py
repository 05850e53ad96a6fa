"""The check of a review: training goes on with and without the change, and what that does to the queries is
compared with the prediction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from psgrad.commands.influence_inputs import CalledModel
from psgrad.commands.influence_setup import InfluenceSetup
from psgrad.commands.review_prediction import Prediction, Scalar
from psgrad.data.reader import CheckedReader
from psgrad.engine.influence.evaluation.continued_training import MeasuredChange, measured_change
from psgrad.engine.influence.evaluation.jobs import LoadedRows, Recipe
from psgrad.errors import InfluenceError, ModelError
from psgrad.run.results import Progress
from psgrad.run.results.review import Trust
from psgrad.run.run import Run

_SEEDS = 4  # trainings of each version of the data
_NEWTON_UP_TO = 5000  # parameters


def training_on(
    setup: InfluenceSetup,
    before: CheckedReader,
    found: Prediction,
    scalars: Mapping[str, Scalar],
    changed: bool,
    run: Run[Any],
) -> tuple[MeasuredChange | None, Trust]:
    """(what training that goes on measures, how far it agrees with the prediction)."""
    config, view = setup.config, setup.views[-1]
    index = config.influence.index
    trust = Trust(
        "margin" if "margin" in scalars else "loss",
        found.affine and found.amounts,
        found.steps,
        index=None if index is None else str(index.path),
    )
    limit, train = config.review.seconds, config.influence.evaluate.train
    recipe = Recipe(**train.model_dump(exclude={"function"}))
    if trust.exact and found.weight_decay > 0 and view.training.flat.size <= _NEWTON_UP_TO:
        recipe = Recipe(optimizer="newton", weight_decay=found.weight_decay, tolerance=1e-6)
    why_not = "" if limit else "review.seconds is 0"
    if not changed:
        why_not = "nothing changed"
    elif setup.common.samples.weighted:
        why_not = "rows have weights, which the trainer does not know"
    if why_not:
        return None, replace(trust, why_not=why_not)
    whole = replace(view.training, rows=before)
    try:
        measured = measured_change(
            CalledModel(view.training.objective.model, setup.common.forward),
            LoadedRows.of(whole),
            LoadedRows.of(view.training),
            LoadedRows.of(view.queries),
            scalars,
            setup.common.criterion.function,
            recipe,
            seeds=_SEEDS,
            seconds=limit,
            tell=lambda done, of: run.progress(Progress(done, of, "check", unit="training")),
        )
    except (InfluenceError, ModelError) as error:
        return None, replace(trust, why_not=error.message)
    if measured is None:
        return None, replace(trust, why_not=f"an epoch takes longer than review.seconds, {limit:g}")
    one, other = found.changes[trust.scalar], measured.changes[trust.scalar].mean(0)
    ranked = np.ptp(one) > 0 and np.ptp(other) > 0
    slope = slope_of(one, other)
    return measured, replace(
        trust,
        tried=True,
        epochs=measured.epochs,
        seconds=measured.seconds,
        agreement=float(spearmanr(one, other).statistic) if ranked else None,
        slope=slope,
        scaled=not trust.exact and slope is not None,
    )


def slope_of(predicted: np.ndarray[Any, Any], measured: np.ndarray[Any, Any]) -> float | None:
    """What was measured for each unit that was predicted, by least squares; None for no prediction."""
    square = float(predicted @ predicted)
    return float(predicted @ measured) / square if square > 0 else None
