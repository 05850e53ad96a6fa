"""Who comes first: samples in the order in which a person should look at them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from psgrad.quality.shares import share_of
from psgrad.results import SAMPLE_COLUMNS

Array = npt.NDArray[Any]

NORMS = ("grad_norm", "log_norm")


def rank_samples(
    frame: pd.DataFrame, review_fraction: float, score: str = "grad_norm", tail: str = "upper", labels: Array | None = None
) -> pd.DataFrame:
    """Add what the scores say about each other: log_norm, rank, percentile, is_outlier_issue, reasons and status.

    `score` is a column, `tail` its suspect end. Rows whose loss or norm is not finite are 'nonfinite', those without a score 'skipped'.
    Both are unranked, and nonfinite rows are always in the review list. The rest of the list are the ceil(review_fraction * ranked rows)
    most suspect, so it is never empty on a healthy model: a list to look at, not a verdict. Samples with a gradient of exactly zero are
    named, but never reviewed for a large norm. Ties are ranked in dataset order; `percentile` is the percentage of ranked rows that are not
    more suspect.

    With `labels` [n], a group a row, a row is compared within its group: percentile is that of the group, and rank goes by the place in the
    group as a share of it, so that each group is in the review list in proportion to its size.

    Columns come back in the order of SAMPLE_COLUMNS, unknown ones last.
    """
    norm = frame["grad_norm"].astype("float64")
    finite = np.isfinite(norm) & np.isfinite(frame["loss"].astype("float64"))
    if "status" in frame:
        finite &= frame["status"] == "ok"
    with np.errstate(divide="ignore"):
        log_norm = norm.where(finite).map(np.log10)
    suspect = (log_norm if score == "log_norm" else frame[score].astype("float64")).where(finite) * (1 if tail == "upper" else -1)
    group = suspect.groupby(np.full(len(frame), "") if labels is None else labels)
    # The place in the group as a share of it; where there is one group the order is that of the score.
    place = (group.rank(ascending=False, method="first") - 0.5) / group.transform("count")
    rank = place.rank(method="first")
    ranked = rank.notna()
    in_review = rank <= math.ceil(share_of(review_fraction, int(ranked.sum())))
    if score in NORMS and tail == "upper":
        in_review &= norm > 0
    end, of = ("largest" if tail == "upper" else "smallest"), ("gradient norms" if score in NORMS else score)
    reasons = np.select(
        [~finite, ~ranked, in_review, norm == 0],
        [
            "loss or gradient is not finite",
            f"not judged: {score} is undefined",
            f"among the {end} {100 * review_fraction:.3g} % of {of}",
            "gradient is exactly zero",
        ],
        default="",
    )
    result = frame.assign(
        log_norm=log_norm,
        rank=rank.astype("Int64"),
        percentile=100 * group.rank(method="max", pct=True),
        is_outlier_issue=in_review | ~finite,
        reasons=reasons,
        status=np.select([~finite, ~ranked], ["nonfinite", "skipped"], default="ok"),
    )
    known = [column for column in SAMPLE_COLUMNS if column in result]
    return result[known + [column for column in result if column not in SAMPLE_COLUMNS]]
