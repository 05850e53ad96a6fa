"""Conformal p-values against trusted samples, and the false discovery rate: Bates et al., Testing for
outliers with conformal p-values, Annals of Statistics 2023 (arXiv 2104.08279).

A p-value here is valid where the sample, if it is no outlier, and the reference are exchangeable: drawn from
the same source, measured by the same model, and both trained on or both held out. Nothing is assumed about
how scores are distributed. P-values that share one reference depend on each other, in the way (PRDS) under
which Benjamini and Hochberg's procedure still holds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def p_values(scores: Array, reference: Array, tail: str = "upper") -> Array:
    """For each score the share of the reference, and itself, that is at least as suspect: (1 + #{reference >=
    score}) / (n + 1).

    `scores` [m], `reference` [n]; `tail` is the suspect end. Ties count as at least as suspect, and so does
    what is NaN in the reference: a p-value can only become larger by them. A score that is NaN has no
    p-value: NaN.
    """
    sign = 1.0 if tail == "upper" else -1.0
    suspect, trusted = sign * np.asarray(scores, "float64"), sign * np.asarray(reference, "float64")
    missing = np.isnan(trusted)
    ordered = np.sort(trusted[~missing])
    at_least = len(trusted) - np.searchsorted(ordered, suspect, side="left")
    return np.where(np.isnan(suspect), np.nan, (1 + at_least) / (len(trusted) + 1))


def grouped_p_values(
    scores: Array, labels: Array, reference: Array, reference_labels: Array, tail: str = "upper"
) -> Array:
    """`p_values` of each score against the reference rows with its own label alone (Mondrian): valid within
    every group, too.

    A label that the reference does not have gives the p-value 1.
    """
    result = np.full(len(scores), np.nan)
    for label in np.unique(labels):
        mine = labels == label
        result[mine] = p_values(scores[mine], reference[reference_labels == label], tail)
    return result


def q_values(p: Array) -> Array:
    """The smallest false discovery rate at which each p-value is flagged, by Benjamini and Hochberg; NaN
    stays NaN, and is no test.
    """
    from scipy.stats import false_discovery_control

    tested = ~np.isnan(p)
    result = np.full(len(p), np.nan)
    if tested.any():
        result[tested] = false_discovery_control(p[tested])
    return result


@dataclass(frozen=True)
class Resolution:
    """What a reference of this size can decide.

    Attributes:
        smallest: how many samples must be flagged at once at the least; fewer outliers than that can't be
            flagged. None: none can ever be.
        smallest_p: group -> its smallest possible p-value, 1 / (n + 1).
        smallest_of: group -> how many samples, of all groups together, must be flagged for one of this group
            to be among them; None: never.
    """

    smallest: int | None
    smallest_p: Mapping[str, float]
    smallest_of: Mapping[str, int | None]


def resolution(tested: Mapping[str, int], reference: Mapping[str, int], fdr: float) -> Resolution:
    """The limit that follows from sizes alone, before any score is seen.

    `tested` and `reference` are group -> how many; groups without tests don't matter. Of N tests k are
    flagged when their p-values are at most q k / N, and none is below 1 / (n + 1): so k >= N / (q (n + 1)).
    """
    count = sum(tested.values())
    floor = {group: 1 / (reference.get(group, 0) + 1) for group, tests in tested.items() if tests}
    # (smallest p-value, how many must be flagged) where the groups with such p-values have that many samples
    possible = []
    for p in sorted(set(floor.values())):
        needed = max(1, math.ceil(count * p / fdr * (1 - 1e-12)))
        if needed <= sum(tests for group, tests in tested.items() if tests and floor[group] <= p):
            possible.append((p, needed))
    smallest_of = {
        group: min((needed for other, needed in possible if other >= p), default=None)
        for group, p in floor.items()
    }
    return Resolution(min((needed for _, needed in possible), default=None), floor, smallest_of)
