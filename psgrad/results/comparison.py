"""How two runs differ: which samples came, went, rose and fell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pandas as pd

from psgrad.results.short_repr import ShortRepr

CHANGE_COLUMNS = (
    "change",
    "id",
    "row_a",
    "row_b",
    "score_a",
    "score_b",
    "percentile_a",
    "percentile_b",
    "moved",
    "list",
    "fingerprint",
)


@dataclass(frozen=True, repr=False)
class Comparison(ShortRepr):
    """Two runs of `psgrad analyze`, A and B.

    Attributes:
        a, b: the run folders. score: the column that is compared; `tail`, its suspect end.
        counts: 'samples_a', 'samples_b'; 'common', in both; 'came', in B alone; 'went', in A alone; of the common 'rose' and 'fell', whose
            percentile is higher or lower in B; 'entered' and 'left', that B lists and A does not, and the other way round.
        spearman: rank correlation of the score over the common samples that have one in both; None for fewer than two, or equal scores.
        changes: a row a sample with CHANGE_COLUMNS, of each `change` (came, went, rose, fell) the first few: those that moved furthest,
            and those that rank first in their run. Percentiles are among the common samples, 100 the most suspect; `moved` is their
            difference, in percentage points; `list` says whether the sample entered or left the review list, or the outliers.
        groups: a row a group of the common samples: group, samples, spearman, median_a, median_b, entered, left; empty without groups.
        common: score_a and score_b of the common samples, for the plot.
        warnings: what makes the two hard to compare.
    """

    a: str
    b: str
    score: str
    tail: str
    counts: Mapping[str, int]
    spearman: float | None
    changes: pd.DataFrame
    groups: pd.DataFrame
    common: pd.DataFrame
    warnings: tuple[str, ...] = ()
