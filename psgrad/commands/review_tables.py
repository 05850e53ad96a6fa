"""What a review asks of the queries, and the tables of what it found."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch

from psgrad.commands.influence_setup import InfluenceSetup
from psgrad.commands.review_check import slope_of
from psgrad.commands.review_prediction import Prediction, Scalar
from psgrad.config import MeasurementConfig
from psgrad.data.measurements import resolve_measurement
from psgrad.data.reader import CheckedReader
from psgrad.engine.influence.evaluation.continued_training import MeasuredChange
from psgrad.quality.changed_rows import NO_ROW, Suspicion
from psgrad.run.results.review import SUSPECT, GroupChange, Trust

Array = npt.NDArray[Any]
Sets = list[tuple[str, str, Array]]

_SETS = 50  # of more classes, or groups, the first are predicted


def scalars_of(setup: InfluenceSetup) -> dict[str, Scalar]:
    """What is predicted of a query's (output, target), larger being worse: the loss; and of classes whether
    the prediction is wrong, and minus the margin, by which rows are judged.
    """
    criterion = setup.common.criterion
    scalars: dict[str, Scalar] = {"loss": criterion.function}
    if criterion.kind in ("class", "binary") and criterion.name != "nll":
        margin = resolve_measurement(MeasurementConfig(name="margin"), criterion, setup.config.base)
        scalars |= {"wrong": partial(_wrong, criterion.kind), "margin": margin.criterion.function}
    return scalars


def _wrong(kind: str, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    right = output.argmax() == target if kind == "class" else ((output > 0) == (target > 0.5)).all()
    return 1 - right.to(output.dtype)


def query_sets(setup: InfluenceSetup) -> Sets:
    """(level, name, [m] bool) of all queries, of each class and of each group: whose means are predicted."""
    config, rows, names = setup.config, setup.query_rows, setup.config.data.class_names
    sets: Sets = [("overall", "", np.ones(len(rows), bool))]
    targets = (
        setup.query_reader.targets_at(rows) if setup.common.criterion.kind in ("class", "binary") else None
    )
    if targets is not None:
        for value in np.unique(targets).tolist()[:_SETS]:
            name = names[int(value)] if names and 0 <= value < len(names) else f"{value:g}"
            sets.append(("class", name, targets == value))
    if config.review.group is not None:
        queries = config.influence.queries
        assert queries is not None  # see `review`
        assert queries.own_data is not None
        units = setup.common.other_samples(queries.own_data, config.review.group, weighted=False).units
        assert units is not None
        sets += [
            ("group", str(name), units[rows] == name) for name in np.unique(units[rows]).tolist()[:_SETS]
        ]
    return sets


def factor_of(trust: Trust, found: Prediction, measured: MeasuredChange | None, scalar: str) -> float:
    """What predictions of a scalar are multiplied by: 1 where they are amounts, or nothing was measured."""
    if not trust.scaled or measured is None:
        return 1.0
    return slope_of(found.changes[scalar], measured.changes[scalar].mean(0)) or 0.0


def totals_of(
    sets: Sets, found: Prediction, trust: Trust, measured: MeasuredChange | None
) -> tuple[GroupChange, ...]:
    """What the change does to the mean of each set of queries."""
    factors = {name: factor_of(trust, found, measured, name) for name in found.now}

    def of(name: str, chosen: Array) -> tuple[float | None, float | None, float | None]:
        """(now, predicted, measured) of a scalar; None where there is none."""
        if name not in found.now:
            return None, None, None
        then = None if measured is None else float(measured.changes[name].mean(0)[chosen].mean())
        return (
            float(found.now[name][chosen].mean()),
            float(found.changes[name][chosen].mean()) * factors[name],
            then,
        )

    totals = []
    for level, title, chosen in sets:
        now, change, then = of("loss", chosen)
        margin, wrong = of("margin", chosen), of("wrong", chosen)
        assert now is not None  # of the loss there is all
        assert change is not None
        error = found.margin_of_error("loss", chosen) * abs(factors["loss"])
        # Predictions of single queries that are no amounts do not say which of them go wrong.
        after = wrong[2] if wrong[2] is not None else wrong[1] if trust.exact else None
        totals.append(
            GroupChange(
                level,
                title,
                int(chosen.sum()),
                now,
                change,
                None if np.isnan(error) else change - error,
                None if np.isnan(error) else change + error,
                then,
                margin_now=_minus(margin[0]),
                margin_predicted=_minus(margin[1]),
                margin_measured=_minus(margin[2]),
                accuracy_now=None if wrong[0] is None else 1 - wrong[0],
                accuracy_then=None if wrong[0] is None or after is None else 1 - wrong[0] - after,
            )
        )
    return tuple(totals)


def _minus(value: float | None) -> float | None:
    return None if value is None else -value


def queries_table(
    setup: InfluenceSetup, found: Prediction, trust: Trust, measured: MeasuredChange | None
) -> pd.DataFrame:
    """review.parquet; see `ReviewResult`."""
    factor = factor_of(trust, found, measured, "loss")
    change, error = found.changes["loss"] * factor, found.errors("loss") * abs(factor)
    columns = {
        "query_id": setup.query_reader.samples.ids[setup.query_rows],
        "loss": found.now["loss"],
        "predicted_change": change,
        "low": change - error,
        "high": change + error,
    }
    if measured is not None:
        columns["measured_change"] = measured.changes["loss"].mean(0)
    if "margin" in found.now:
        columns["label"] = setup.query_reader.targets_at(setup.query_rows)
        columns["margin"] = -found.now["margin"]
        columns["predicted_change_margin"] = -found.changes["margin"] * factor_of(
            trust, found, measured, "margin"
        )
        if measured is not None:
            columns["measured_change_margin"] = -measured.changes["margin"].mean(0)
    return pd.DataFrame(columns)


def changes_table(
    setup: InfluenceSetup,
    before: CheckedReader,
    table: pd.DataFrame,
    found: Prediction,
    factor: float,
    suspects: Suspicion | None,
) -> pd.DataFrame:
    """changes.parquet: the rows that look wrong by themselves first, then by their effects, the worst first;
    see `ReviewResult`. factor: of effects.

    The loss tells false rows of a model that knows better, whose effects hide behind each other's.
    """
    after, old = table["after"].to_numpy(), table["before"].to_numpy()
    now, was = after != NO_ROW, old != NO_ROW

    def of_rows(parts: Array) -> Array:
        """[rows of the table, d] of the added and then the removed rows [k, d]: a changed row is both."""
        whole = np.zeros((len(table), parts.shape[1]))
        whole[now] += parts[: now.sum()]
        whole[was] += parts[now.sum() :]
        return whole

    ids = np.where(now, "", "").astype(object)
    ids[was] = before.samples.ids[old[was]].astype(str)
    ids[now] = setup.common.samples.ids[after[now]].astype(str)
    changes = table.assign(predicted_effect=of_rows(found.effects)[:, 0] * factor)
    changes.insert(0, "id", ids)
    single, queries = of_rows(found.effects_on_worst), setup.query_reader.samples.ids[setup.query_rows]
    changes["worst_query"] = [str(queries[found.worst[place]]) for place in single.argmax(1)]
    changes["suspect"], changes["reasons"] = np.nan, ""
    if suspects is not None:
        changes.loc[now, "suspect"] = suspects.scores
        changes.loc[now, "reasons"] = suspects.reasons
    suspect = changes["suspect"] >= SUSPECT
    order = np.lexsort((-changes["predicted_effect"], ~suspect))
    return changes.iloc[order].reset_index(drop=True)
