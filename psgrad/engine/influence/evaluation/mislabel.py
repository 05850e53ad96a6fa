"""Mislabelled examples: how well scores find labels that were flipped on purpose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

# The share of the rows that somebody looks at.
REVIEWED = 0.1
FOLDS = 5


@dataclass(frozen=True)
class Detection:
    """Of one score, for one set of flips: the area under the ROC curve, average precision, and the share of the flips that is found among
    the first tenth of the rows. undefined: rows without a score, which come last."""

    auc: float
    average_precision: float
    recall: float
    undefined: int


@dataclass(frozen=True)
class MislabelScore:
    """Means over the sets of flips, and standard deviations over them (NaN for one set)."""

    auc: float
    auc_deviation: float
    average_precision: float
    average_precision_deviation: float
    recall: float
    recall_deviation: float
    undefined: int


def flip(labels: Array, share: float, random: np.random.Generator) -> tuple[Array, Array]:
    """(labels with a share of them flipped, which rows were [n] bool): each to another of the classes that occur, equally likely."""
    classes = np.unique(labels)
    chosen = random.choice(len(labels), round(share * len(labels)), replace=False)
    place = np.searchsorted(classes, labels[chosen])
    given = labels.copy()
    given[chosen] = classes[(place + random.integers(1, len(classes), len(chosen))) % len(classes)]
    flipped = np.zeros(len(labels), dtype=bool)
    flipped[chosen] = True
    return given, flipped


def detect(score: Array, flipped: Array) -> Detection:
    """How well a score [n], large where a label is suspicious, finds the flipped rows [n] bool."""
    from sklearn.metrics import average_precision_score, roc_auc_score

    known = ~np.isnan(score)
    # By rank: sklearn takes no infinite scores, and a missing one comes after all others.
    _, rank = np.unique(np.where(known, score, -np.inf), return_inverse=True)
    first = np.argsort(-rank, kind="stable")[: max(1, round(REVIEWED * len(score)))]
    return Detection(
        float(roc_auc_score(flipped, rank)),
        float(average_precision_score(flipped, rank)),
        float(flipped[first].sum() / flipped.sum()),
        int((~known).sum()),
    )


def over_flips(found: Sequence[Detection]) -> MislabelScore:
    """Means and standard deviations of several sets of flips."""

    def both(values: list[float]) -> tuple[float, float]:
        return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else float("nan")

    return MislabelScore(
        *both([one.auc for one in found]),
        *both([one.average_precision for one in found]),
        *both([one.recall for one in found]),
        max(one.undefined for one in found),
    )


def folds(rows: int, random: np.random.Generator, count: int = FOLDS) -> list[Array]:
    """The rows that each of the cross-validated models does not see, which together are all."""
    return [np.sort(part) for part in np.array_split(random.permutation(rows), count)]


def suspicion(outputs: Array, labels: Array) -> dict[str, Array]:
    """Scores from logits [n, classes] and labels [n], each larger where a label looks wrong.

    self_confidence: 1 - p of the label (cleanlab's, turned round). el2n: |p - onehot(label)| (Paul, Ganguli and Dziugaite 2021).
    margin: the largest other logit minus the label's.
    """
    from scipy.special import softmax

    probabilities = softmax(outputs, axis=1)
    own = np.arange(len(labels)), labels
    error = probabilities.copy()
    error[own] -= 1
    others = outputs.copy()
    others[own] = -np.inf
    return {
        "1 - p(label)": 1 - probabilities[own],
        "EL2N": np.linalg.norm(error, axis=1),
        "margin": others.max(1) - outputs[own],
    }
