"""The issue table: one row a sample, and for each type of issue whether the sample has it and a score from 0
to 1, where low is bad, as cleanlab's Datalab names them; and a summary, one row a type.

It is made of the finished table of samples and of the measures of the run alone. What a run has no column for
is left out of the table, and the summary says what would give it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from psgrad.run.results import has_classes

Array = npt.NDArray[Any]

RARE = 0.1  # a class is rare below this part of an equal share
WEAK = 0.75  # a group is weak whose mean confidence is below this part of that of all samples
NEAR = 0.05  # samples are near duplicates whose distance is below this part of the median nearest one
NOT_IID = 0.01  # the p-value of an order that is not one of independent draws
_NEIGHBOURS, _PERMUTATIONS, _FEWEST = 10, 199, 30
_MOST = 50_000  # samples whose neighbours are searched
_NEEDS = (
    f"needs the measure projected_gradients, {_FEWEST} to {_MOST:,} samples, and no gradient that is zero"
)


@dataclass(frozen=True)
class IssueTable:
    """samples: a row a sample, in the order of the run. summary: a row a type: `issue`, `found` samples with
    it, `score` (of the dataset, low is bad, where there is one), `made_of` what it was made of, or what would
    give it.
    """

    samples: pd.DataFrame
    summary: pd.DataFrame


@dataclass(frozen=True)
class _Issue:
    """One type of issue of n samples. flags, scores: None where the run has nothing to tell it by."""

    name: str
    made_of: str
    flags: Array | None = None
    scores: Array | None = None
    further: Mapping[str, Array] | None = None
    of_dataset: float | None = None


def issue_table(samples: pd.DataFrame, projected: Array | None = None) -> IssueTable:
    """The issues of a finished run.

    Args:
        samples: its table of samples.
        projected: [n, k], the projected gradients of the samples, where the run has them.
    """
    issues = [
        _label(samples),
        _outlier(samples),
        _near_duplicate(samples, projected),
        _non_iid(projected),
        _class_imbalance(samples),
        _underperforming_group(samples),
        _null(samples),
    ]
    columns: dict[str, Any] = {"id": samples["id"], "index": samples["index"]}
    for issue in issues:
        if issue.flags is not None:
            columns |= {f"is_{issue.name}_issue": issue.flags, f"{issue.name}_score": issue.scores}
            columns |= issue.further or {}
    summary = pd.DataFrame(
        {
            "issue": [issue.name for issue in issues],
            "found": [None if issue.flags is None else int(issue.flags.sum()) for issue in issues],
            "score": [issue.of_dataset for issue in issues],
            "made_of": [issue.made_of for issue in issues],
        }
    ).astype({"found": "Int64", "score": "float64"})
    return IssueTable(pd.DataFrame(columns), summary)


def _label(samples: pd.DataFrame) -> _Issue:
    """By the probability that the model gives to the label, over the checkpoints of the training where the
    run has them: confident learning's rule (Northcutt et al. 2021) with a sample's own probability alone. It
    is an issue where the model prefers another class, and the label's probability is below its class's mean.
    """
    if not has_classes(samples):
        return _Issue("label", "needs a loss over classes")
    given, predicted = samples["target"], samples["prediction"]
    if "mean_confidence" in samples and "correctness" in samples:
        confidence, prefers_other = samples["mean_confidence"], samples["correctness"] < 0.5
        made_of = "probabilities of the label over the training's checkpoints"
    else:
        confidence, prefers_other = np.exp(-samples["loss"]), predicted.ne(given) & predicted.notna()
        made_of = (
            "this one model, which has seen its labels: wrong ones that it has learnt are not found; the"
            " measure trajectory over analyze.checkpoints finds them"
        )
    usual = confidence.groupby(given).transform("mean")
    flags = prefers_other & (confidence < usual)
    further = {"given_label": given.to_numpy(), "predicted_label": predicted.to_numpy()}
    return _Issue("label", made_of, flags.to_numpy(bool), _clipped(confidence), further)


def _outlier(samples: pd.DataFrame) -> _Issue:
    """As the run has judged; the score is the p-value, or the share of samples with a larger norm."""
    flags = samples["is_outlier_issue"].to_numpy(bool)
    if "p_value" in samples and samples["p_value"].notna().any():
        return _Issue("outlier", "the reference of the run: p-values", flags, _clipped(samples["p_value"]))
    scores = 1 - samples["grad_norm"].rank(pct=True)
    return _Issue("outlier", "the review list: ranks of gradient norms", flags, _clipped(scores))


def _near_duplicate(samples: pd.DataFrame, projected: Array | None) -> _Issue:
    """Samples whose gradients nearly agree, in sets; the score is the distance to the nearest one beside the
    median of these distances. Duplicates with different labels have unlike gradients, and are not found.
    """
    name = "near_duplicate"
    points = _directions(projected)
    if points is None:
        return _Issue(name, _NEEDS)
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components
    from sklearn.neighbors import NearestNeighbors

    search = NearestNeighbors(n_neighbors=min(_NEIGHBOURS, len(points) - 1) + 1).fit(points)
    distances, neighbours = search.kneighbors(points)
    nearest, limit = distances[:, 1], NEAR * float(np.median(distances[:, 1]))
    rows, places = np.nonzero(distances[:, 1:] <= limit)
    pairs = coo_array((np.ones(len(rows)), (rows, neighbours[rows, places + 1])), (len(points),) * 2)
    _, sets = connected_components(pairs, directed=False)
    flags = np.bincount(sets)[sets] > 1
    numbers = np.full(len(points), -1)
    numbers[flags] = np.unique(sets[flags], return_inverse=True)[1]
    scores = _clipped(nearest / max(float(np.median(nearest)), np.finfo(float).tiny))
    return _Issue(name, "projected gradients", flags, scores, {"near_duplicate_set": numbers})


def _non_iid(projected: Array | None) -> _Issue:
    """Whether samples that lie near each other in the dataset have like gradients: a permutation test of the
    mean distance in the order between a sample and its neighbours, exact for independent draws.
    """
    points = _directions(projected)
    if points is None:
        return _Issue("non_iid", _NEEDS)
    from sklearn.neighbors import NearestNeighbors

    neighbours = NearestNeighbors(n_neighbors=min(_NEIGHBOURS, len(points) - 1) + 1).fit(points)
    found = neighbours.kneighbors(points, return_distance=False)[:, 1:]
    draw, places = np.random.default_rng(0), np.arange(len(points))

    def apart(order: Array) -> Array:
        distances: Array = np.abs(order[found] - order[:, None]).mean(1)
        return distances

    own = apart(places)
    permuted = np.array([apart(draw.permutation(places)).mean() for _ in range(_PERMUTATIONS)])
    p_value = (1 + int((permuted <= own.mean()).sum())) / (1 + _PERMUTATIONS)
    scores = _clipped(own / permuted.mean())
    flags = np.zeros(len(points), bool) if p_value >= NOT_IID else scores < 0.5
    return _Issue("non_iid", "the order of like gradients: a permutation test", flags, scores, None, p_value)


def _class_imbalance(samples: pd.DataFrame) -> _Issue:
    """Samples of classes with less than a tenth of an equal share; their score is it, that of others is 1."""
    if not has_classes(samples):
        return _Issue("class_imbalance", "needs a loss over classes")
    shares = samples["target"].map(samples["target"].value_counts(normalize=True))
    equal = 1 / max(samples["target"].nunique(), 1)
    flags = (shares < RARE * equal).to_numpy(bool)
    scores = np.where(flags, shares, 1.0)
    return _Issue("class_imbalance", "the labels", flags, _clipped(scores), None, float(shares.min() / equal))


def _underperforming_group(samples: pd.DataFrame) -> _Issue:
    """Samples of groups whose mean exp(-loss) is far below that of all; the score is the ratio."""
    name = "underperforming_group"
    if "group" not in samples or samples["group"].nunique() < 2:
        return _Issue(name, "needs analyze.outliers.group_by")
    confidence, groups = np.exp(-samples["loss"].clip(lower=0)), samples["group"]
    ratio = confidence.groupby(groups).transform("mean") / confidence.mean()
    big = groups.map(groups.value_counts()).astype(float) >= _FEWEST
    flags = ((ratio < WEAK) & big).to_numpy(bool)
    return _Issue(name, "the groups of the run", flags, np.where(flags, _clipped(ratio), 1.0))


def _null(samples: pd.DataFrame) -> _Issue:
    """Samples that can't be read, or whose loss or gradient is not finite."""
    flags = samples["status"].isin(["nonfinite", "skipped"]).to_numpy(bool)
    return _Issue("null", "the status of samples", flags, np.where(flags, 0.0, 1.0))


def _directions(projected: Array | None) -> Array | None:
    """The gradients over their lengths; None where there are none, too few or too many, or one is zero or not
    finite.
    """
    if projected is None or not _FEWEST <= len(projected) <= _MOST:
        return None
    lengths = np.linalg.norm(projected, axis=1, keepdims=True)
    return projected / lengths if np.isfinite(lengths).all() and (lengths > 0).all() else None


def _clipped(scores: Any) -> Array:
    clipped: Array = np.clip(np.nan_to_num(np.asarray(scores, dtype=float), nan=0.0), 0.0, 1.0)
    return clipped
