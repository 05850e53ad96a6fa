"""What changed between two versions of a training set, row by row; and which added rows look wrong by
themselves, before anything is trained on them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from psgrad.quality.conformal import p_values
from psgrad.quality.issues import Leaks, near_rows, usual_distance
from psgrad.run.results.review import SUSPECT

Array = npt.NDArray[Any]

FEWEST = 199
"""Queries from which on a p-value, times two, can be as small as 1 - SUSPECT."""
NO_ROW = -1


@dataclass(frozen=True)
class RowContents:
    """The rows of one version of a dataset. ids: [n], None where rows have none. whole: [n], a digest of each
    row. parts: name -> a digest of that part of each row (input, label, weight).
    """

    ids: Array | None
    whole: Array
    parts: Mapping[str, Array]


def changed_rows(before: RowContents, after: RowContents) -> pd.DataFrame:
    """One row for each row that was added, removed or changed: `kind`, `before` and `after`, its rows in the
    two versions (NO_ROW for none), and `what` of a changed row changed. Sorted by the row after, then before.

    Rows are matched by their ids; without ids by their content, so that a changed row is an added and a
    removed one. Rows that only moved are not changed.
    """
    keys = [[str(key) for key in (each.whole if each.ids is None else each.ids)] for each in (before, after)]
    places = [_places(each) for each in keys]
    found: list[tuple[str, int, int, str]] = []
    for key in dict.fromkeys([*keys[1], *keys[0]]):
        old, new = (each.get(key, []) for each in places)
        common = min(len(old), len(new))
        for one, other in zip(old[:common], new[:common], strict=True):
            if before.whole[one] != after.whole[other]:
                changed = [
                    name for name in before.parts if before.parts[name][one] != after.parts[name][other]
                ]
                found.append(("changed", one, other, " and ".join(changed)))
        found += [("removed", one, NO_ROW, "") for one in old[common:]]
        found += [("added", NO_ROW, other, "") for other in new[common:]]
    table = pd.DataFrame(found, columns=["kind", "before", "after", "what"])
    table = table.astype({"before": np.int64, "after": np.int64})
    order = np.lexsort((table["before"], table["after"].replace(NO_ROW, np.iinfo(np.int64).max)))
    return table.iloc[order].reset_index(drop=True)


def _places(keys: Sequence[str]) -> dict[str, list[int]]:
    places: dict[str, list[int]] = defaultdict(list)
    for place, key in enumerate(keys):
        places[key].append(place)
    return dict(places)


@dataclass(frozen=True)
class Measured:
    """Rows as the model sees them: ids [n], their losses and gradient norms, targets and predictions (None
    where the loss has no classes), and features [n, k] of their inputs (None where inputs can't be compared).
    """

    ids: Array
    losses: Array
    norms: Array
    targets: Array | None = None
    predictions: Array | None = None
    features: Array | None = None


@dataclass(frozen=True)
class Suspicion:
    """scores: [a] from 0 to 1, 1 - the p-value of a sound row that is as unusual. reasons: [a] texts."""

    scores: Array
    reasons: list[str]


def suspicion(added: Measured, queries: Measured, training: Measured, leaks: Leaks) -> Suspicion:
    """How wrong added rows look by themselves.

    The loss and the gradient norm are compared with those of the queries, which the model has not been
    trained on either: conformal p-values, the smaller one times two. A row that is in the queries is a leak,
    whatever its loss; one whose input nearly equals a training row's of another label contradicts it.

    leaks: of the queries among the added rows.
    """
    smallest = np.minimum(p_values(added.losses, queries.losses), p_values(added.norms, queries.norms))
    scores = np.where(np.isnan(smallest), 1.0, 1 - np.minimum(2 * smallest, 1))
    reasons: list[list[str]] = [[] for _ in scores]
    for row in np.flatnonzero(scores >= SUSPECT).tolist():
        if np.isnan(smallest[row]):
            reasons[row].append("its loss or gradient is not finite")
        else:
            reasons[row].append(_unusual(added, queries, row))
    for row in np.flatnonzero(leaks.of != "").tolist():
        scores[row] = 1.0
        reasons[row].append(f"nearly equals the query {leaks.of[row]}: evaluation data leak")
    found, known, usual = added.features, training.features, queries.features
    labels, others = added.targets, training.targets
    if labels is None or others is None or found is None or known is None or usual is None:
        places = np.full(len(scores), -1)
    else:
        places, _ = near_rows(found, known, usual_distance(usual))
        places[labels == others[places]] = -1
    for row in np.flatnonzero(places >= 0).tolist():
        scores[row] = 1.0
        reasons[row].append(f"nearly equals the training row {training.ids[places[row]]} of another label")
    return Suspicion(scores, ["; ".join(each) for each in reasons])


def _unusual(added: Measured, queries: Measured, row: int) -> str:
    loss, norm = added.losses[row], added.norms[row]
    above = [
        f"{name} {value:.3g} is above that of {(of < value).mean():.1%} of the queries"
        for name, value, of in (("loss", loss, queries.losses), ("gradient norm", norm, queries.norms))
        if (of >= value).mean() <= 1 - SUSPECT
    ]
    words = "; ".join(above)
    if added.predictions is None or added.targets is None or added.predictions[row] == added.targets[row]:
        return words
    return f"{words}; the model predicts {added.predictions[row]:g}, the label is {added.targets[row]:g}"
