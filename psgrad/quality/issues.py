"""The issue table: one row a sample, and for each type of issue whether the sample has it and a score from 0
to 1, where low is bad, as cleanlab's Datalab names them; and a summary, one row a type.

It is made of the finished table of samples and of the measures of the run alone. What a run has no column for
is left out of the table, and the summary says what would give it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from psgrad.quality.findings import LEAK_OF
from psgrad.run.results import has_classes

Array = npt.NDArray[Any]

RARE = 0.1  # a class is rare below this part of an equal share
WEAK = 0.75  # a group is weak whose mean confidence is below this part of that of all samples
NEAR = 0.05  # rows nearly agree whose distance is below this part of the usual distance to the nearest one
MOST = 50_000  # rows whose neighbours are searched
NOT_IID = 0.01  # the p-value of an order that is not one of independent draws
_NEIGHBOURS, _PERMUTATIONS, _FEWEST = 10, 199, 30
_NEEDS = f"needs the measure projected_gradients, {_FEWEST} to {MOST:,} samples, and no gradient that is zero"


@dataclass(frozen=True)
class IssueTable:
    """samples: a row a sample, in the order of the run. summary: a row a type: `issue`, `found` samples with
    it, `score` (of the dataset, low is bad, where there is one), `made_of` what it was made of, or what would
    give it.
    """

    samples: pd.DataFrame
    summary: pd.DataFrame


@dataclass(frozen=True)
class Leaks:
    """of: [n] the id of the evaluation row whose input each sample nearly equals; empty where there is none.
    distances: [n] to the nearest evaluation row, in usual distances of these.
    """

    of: Array
    distances: Array


def leaks_of(features: Array, evaluation: Array, ids: Array) -> Leaks:
    """By the features of the samples [n, k] and of the evaluation rows [m, k], whose ids these are."""
    usual = usual_distance(evaluation)
    places, distances = near_rows(features, evaluation, usual)
    of = np.append(ids.astype(str), "")[places].astype(object)
    return Leaks(of, distances / usual if usual else np.where(places < 0, np.inf, 0.0))


def copies_of(prints: Sequence[str], evaluation: Sequence[str], ids: Array) -> Leaks:
    """By digests of the inputs of the samples and of the evaluation rows, whose ids these are; nothing is a
    copy of an empty one.
    """
    known = dict(zip(evaluation, ids.astype(str).tolist(), strict=True)) | {"": ""}
    of = np.array([known.get(each, "") for each in prints], dtype=object)
    return Leaks(of, np.where(of != "", 0.0, np.inf))


@dataclass(frozen=True)
class _Issue:
    """One type of issue of n samples. flags, scores: None where the run has nothing to tell it by."""

    name: str
    made_of: str
    flags: Array | None = None
    scores: Array | None = None
    further: Mapping[str, Array] | None = None
    of_dataset: float | None = None


def issue_table(
    samples: pd.DataFrame,
    projected: Array | None = None,
    features: Array | None = None,
    losses: Array | None = None,
    probabilities: Array | None = None,
    leaks: Leaks | None = None,
) -> IssueTable:
    """The issues of a finished run.

    Args:
        samples: its table of samples.
        projected: [n, k], the projected gradients of the samples, where the run has them.
        features: [n, f] of their inputs, which no label is part of.
        losses: [n, t] at each checkpoint of the training, where the run has them.
        probabilities: [n, classes], of each class out of sample, where the data has them.
        leaks: of evaluation data, where the config names some.
    """
    issues = [
        _label(samples, losses, probabilities),
        _outlier(samples),
        _near_duplicate(samples, projected, features),
        _non_iid(projected),
        _class_imbalance(samples),
        _underperforming_group(samples),
        _null(samples),
        *([] if leaks is None else [_leak(leaks)]),
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


def _label(samples: pd.DataFrame, losses: Array | None, probabilities: Array | None) -> _Issue:
    """By probabilities out of sample, else over the checkpoints of the training, else by the one model."""
    if not has_classes(samples):
        return _Issue("label", "needs a loss over classes")
    given, predicted = samples["target"], samples["prediction"].to_numpy()
    if probabilities is not None:
        flags, scores = _by_probabilities(given.to_numpy(int), probabilities)
        predicted, made_of = probabilities.argmax(1), "probabilities out of sample, by confident learning"
    elif losses is not None and "correctness" in samples:
        flags, scores = _by_checkpoints(samples["correctness"].to_numpy(float), losses)
        made_of = "losses and predictions over the training's checkpoints"
    else:
        confidence = np.exp(-samples["loss"])
        usual = confidence.groupby(given).transform("mean")
        prefers_other = (samples["prediction"].ne(given) & samples["prediction"].notna()).to_numpy(bool)
        flags, scores = prefers_other & (confidence < usual).to_numpy(bool), confidence.to_numpy(float)
        made_of = (
            "this one model, which has seen its labels: wrong ones that it has learnt are not found; the"
            " measure trajectory over analyze.checkpoints finds them, or analyze.probabilities"
        )
    further = {"given_label": given.to_numpy(), "predicted_label": predicted}
    return _Issue("label", made_of, flags, _clipped(scores), further)


def _by_probabilities(given: Array, probabilities: Array) -> tuple[Array, Array]:
    """(flags, scores) [n] by confident learning (Northcutt, Jiang, Chuang 2021, section 3.1): a class is
    likely whose probability is at least its mean over the samples with that label. It is an issue where the
    likeliest one of these, and of all, is not the label. The score is the label's probability.
    """
    classes = range(probabilities.shape[1])
    usual = np.array(
        [probabilities[given == each, each].sum() / max((given == each).sum(), 1) for each in classes]
    )
    usual[~np.isin(classes, given)] = np.inf
    likely = np.where(probabilities >= usual, probabilities, -1.0)
    known = np.isin(given, classes)
    others = (likely.argmax(1) != given) & (probabilities.argmax(1) != given)
    own = probabilities[np.arange(len(given)), np.where(known, given, 0)]
    return known & others & (likely.max(1) >= 0), np.where(known, own, 1.0)


def _by_checkpoints(correctness: Array, losses: Array) -> tuple[Array, Array]:
    """(flags, scores) [n]: it is an issue where most checkpoints predict another class, and the root of the
    mean loss, a deviance residual, is in the upper one of two groups, by Otsu's threshold (1979).

    The score is the mean of two numbers: the share of checkpoints that predict the label, and the label's
    geometric mean probability.
    """
    mean = np.nan_to_num(losses.astype(float), nan=np.inf).clip(min=0).mean(1)
    residual = np.sqrt(mean)
    ordered = np.sort(residual[np.isfinite(residual)])
    limit = np.inf
    if len(ordered) > 1 and ordered[0] < ordered[-1]:
        below = np.arange(1, len(ordered))
        sums = ordered.cumsum()[:-1]
        apart = sums / below - (ordered.sum() - sums) / below[::-1]
        place = int((below * below[::-1] * apart**2).argmax())
        limit = (ordered[place] + ordered[place + 1]) / 2
    return (correctness < 0.5) & (residual > limit), (correctness + np.exp(-mean)) / 2


def _outlier(samples: pd.DataFrame) -> _Issue:
    """As the run has judged; the score is the p-value, or the share of samples with a larger norm."""
    flags = samples["is_outlier_issue"].to_numpy(bool)
    if "p_value" in samples and samples["p_value"].notna().any():
        return _Issue("outlier", "the reference of the run: p-values", flags, _clipped(samples["p_value"]))
    scores = 1 - samples["grad_norm"].rank(pct=True)
    return _Issue("outlier", "the review list: ranks of gradient norms", flags, _clipped(scores))


def _near_duplicate(samples: pd.DataFrame, projected: Array | None, features: Array | None) -> _Issue:
    """Samples whose gradients or inputs nearly agree, in sets, those with different labels first. The score
    is the distance to the nearest one beside the median of these distances; 0 where labels differ.

    Gradients find what is alike to the model. Those of different labels are unlike: inputs find these.
    """
    name, points = "near_duplicate", _directions(projected)
    if points is None:
        return _Issue(name, _NEEDS)
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components
    from sklearn.neighbors import NearestNeighbors

    n, scores, ends = len(points), np.ones(len(points)), []
    usable = features is not None and np.isfinite(features).all() and np.ptp(features, axis=0).any()
    for each in [points, features] if usable else [points]:
        search = NearestNeighbors(n_neighbors=min(_NEIGHBOURS, n - 1) + 1).fit(each)
        distances, neighbours = search.kneighbors(each)
        usual = float(np.median(distances[:, 1]))
        rows, places = np.nonzero(distances[:, 1:] <= NEAR * usual)
        ends.append((rows, neighbours[rows, places + 1]))
        scores = np.minimum(scores, distances[:, 1] / max(usual, np.finfo(float).tiny))
    rows, others = (np.concatenate(each) for each in zip(*ends, strict=True))
    pairs = coo_array((np.ones(len(rows)), (rows, others)), (n, n))
    _, sets = connected_components(pairs, directed=False)
    flags = np.bincount(sets)[sets] > 1
    differ, made_of = np.zeros(n, bool), "projected gradients and inputs" if usable else "projected gradients"
    if has_classes(samples):
        differ = (samples["target"].groupby(sets).transform("nunique") > 1).to_numpy(bool)
        made_of += f"; {int(differ.sum()):,} samples are in sets with different labels"
    numbers = np.full(n, -1)
    order = pd.DataFrame({"alike": ~differ, "set": sets})[flags]
    numbers[flags] = order.groupby(["alike", "set"]).ngroup()
    further = {"near_duplicate_set": numbers, "near_duplicate_labels_differ": differ}
    return _Issue(name, made_of, flags, _clipped(np.where(differ, 0.0, scores)), further)


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


def _leak(leaks: Leaks) -> _Issue:
    """The score is the distance to the nearest evaluation row beside the usual distance between these."""
    flags, words = leaks.of != "", "inputs of the evaluation data, influence.queries"
    if not np.isfinite(leaks.distances[~flags]).any() and not flags.all():
        words += ": copies alone, as near duplicates can't be searched"
    scores = np.where(flags, 0.0, _clipped(leaks.distances))
    return _Issue("leak", words, flags, scores, {LEAK_OF: leaks.of})


def usual_distance(points: Array) -> float:
    """The median distance of a finite point [n, k] to the nearest other one; 0 for a single one."""
    points = points[np.isfinite(points).all(1)]
    if len(points) < 2:
        return 0.0
    from sklearn.neighbors import NearestNeighbors

    return float(np.median(NearestNeighbors(n_neighbors=2).fit(points).kneighbors(points)[0][:, 1]))


def near_rows(points: Array, others: Array, usual: float) -> tuple[Array, Array]:
    """([n] the place of the nearest of the others, -1 where it is not near, [n] its distance, infinite where
    there is none). usual: the distance, of which a part is near. What is not finite is near to nothing.
    """
    finite, known = (np.flatnonzero(np.isfinite(each).all(1)) for each in (points, others))
    places, distances = np.full(len(points), -1), np.full(len(points), np.inf)
    if len(finite) and len(known):
        from sklearn.neighbors import NearestNeighbors

        near = max(NEAR * usual, np.finfo(np.float32).eps * float(np.abs(others[known]).max()))
        found, at = NearestNeighbors(n_neighbors=1).fit(others[known]).kneighbors(points[finite])
        distances[finite] = found[:, 0]
        places[finite] = np.where(found[:, 0] <= near, known[at[:, 0]], -1)
    return places, distances


def _directions(projected: Array | None) -> Array | None:
    """The gradients over their lengths; None where there are none, too few or too many, or one is zero or not
    finite.
    """
    if projected is None or not _FEWEST <= len(projected) <= MOST:
        return None
    lengths = np.linalg.norm(projected, axis=1, keepdims=True)
    return projected / lengths if np.isfinite(lengths).all() and (lengths > 0).all() else None


def _clipped(scores: Any) -> Array:
    clipped: Array = np.clip(np.nan_to_num(np.asarray(scores, dtype=float), nan=0.0), 0.0, 1.0)
    return clipped
