"""The linear datamodeling score: how well sums of scores rank what models retrained on subsets say of a query.

Park, Georgiev, Ilyas, Leclerc and Madry, "TRAK" (2023), section 2; Ilyas et al., "Datamodels" (2022).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import numpy as np

from psgrad.engine.influence.evaluation.resampling import Interval, drawn_counts, interval_of, spearman, spearman_of_resamples

Array = np.ndarray[Any, Any]

_MOST_SPLITS = 20


@dataclass(frozen=True)
class LDSScore:
    """Of one method.

    Attributes:
        mean: over all queries, of the rank correlation over subsets; one that is not defined counts as 0.
        interval: of the mean, by resampling the subsets, which all queries share.
        undefined: queries without a correlation: their scores are not finite, or the same for all subsets.
        per_query: [m], NaN where undefined.
        ahead, ahead_interval: how far the main method is ahead, and the interval of this paired difference; None for the main one.
    """

    mean: float
    interval: Interval
    undefined: int
    per_query: Array = field(repr=False)
    ahead: float | None = None
    ahead_interval: Interval | None = None


@dataclass(frozen=True)
class Ceiling:
    """What the noise of retraining leaves to be foretold.

    single: the rank correlation of the outcomes of one seed with another's, over the same subsets. reliability: that of the mean over the
    seeds with such a mean of other seeds (Spearman-Brown). best: its square root, what the true expected outcome would score.
    """

    single: float
    reliability: float
    best: float


def subset_sums(scores: Array, subsets: Array) -> Array:
    """[S, m]: the sum of the scores [n, m] of each subset's rows; subsets [S, n] bool."""
    found: Array = subsets.astype(np.float64) @ scores
    return found


def lds_mean(scores: Array, subsets: Array, outcomes: Array) -> float:
    """The score alone; see `lds`."""
    return float(np.nan_to_num(spearman(subset_sums(scores, subsets), -outcomes.mean(1))).mean())


def lds(scores: Mapping[str, Array], subsets: Array, outcomes: Array, main: str, seed: int = 0) -> dict[str, LDSScore]:
    """The score of each method.

    Args:
        scores: name -> [n, m], positive where a row helps a query. subsets: [S, n] bool, the rows that models were trained on.
        outcomes: [S, R, m], the queries' measurements, larger being worse, of R seeds.
        main: the method that the others are compared with.
        seed: of the resamples.
    """
    truth = -outcomes.mean(1)
    sums = {name: subset_sums(matrix, subsets) for name, matrix in scores.items()}
    resampled = spearman_of_resamples(sums, truth, drawn_counts(len(subsets), seed))
    per_query = {name: spearman(predicted, truth) for name, predicted in sums.items()}
    means = {name: float(np.nan_to_num(values).mean()) for name, values in per_query.items()}
    return {
        name: LDSScore(
            means[name],
            interval_of(means[name], resampled[name], limit=1),
            int(np.isnan(values).sum()),
            values,
            None if name == main else means[main] - means[name],
            None if name == main else interval_of(means[main] - means[name], resampled[main] - resampled[name]),
        )
        for name, values in per_query.items()
    }


def ceiling(outcomes: Array) -> Ceiling | None:
    """Of outcomes [S, R, m]; None where there is one seed only."""
    seeds = outcomes.shape[1]
    if seeds < 2:
        return None
    single = _agreement(outcomes, 1)
    size = seeds // 2
    ratio = seeds / size
    halves = _agreement(outcomes, size)
    reliability = ratio * halves / (1 + (ratio - 1) * halves)
    return Ceiling(single, reliability, float(np.sqrt(max(reliability, 0.0))))


def _agreement(outcomes: Array, size: int) -> float:
    """The mean rank correlation of disjoint groups of so many seeds."""
    seeds = range(outcomes.shape[1])
    pairs = [
        (one, other) for one in combinations(seeds, size) for other in combinations(seeds, size) if one < other and not {*one} & {*other}
    ]
    # Evenly from all there are, so that many seeds don't take many minutes.
    pairs = pairs[:: -(-len(pairs) // _MOST_SPLITS)]
    found = [np.nan_to_num(spearman(outcomes[:, one].mean(1), outcomes[:, other].mean(1))).mean() for one, other in pairs]
    return float(np.mean(found))


def half_subsets(rows: int, count: int, fraction: float, random: np.random.Generator) -> Array:
    """[count, rows] bool: subsets with a share of the rows each, all of one size."""
    size = round(fraction * rows)
    found = np.zeros((count, rows), dtype=bool)
    for subset in found:
        subset[random.choice(rows, size, replace=False)] = True
    return found


def rows_of(subsets: Array) -> Sequence[Array]:
    """The row numbers of each subset."""
    return [np.flatnonzero(subset) for subset in subsets]
