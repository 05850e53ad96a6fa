"""How far a norm lies from its group's middle, in robust standard deviations: a description, by which nobody is flagged.

On raw norms the rule `z > 3.5` flags a quarter of a clean dataset, on their logarithms it misses flipped labels:
docs/explanation/outliers.md has both.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

LEAST_ROWS = 30
_MEAN_TO_SIGMA = 1.2533  # sqrt(pi / 2): of a normal distribution, sigma is this times the mean absolute deviation


def robust_z(log_norms: Array, labels: Array) -> tuple[Array, dict[str, str]]:
    """([n] (x - median) / (1.4826 MAD) within each group, {group without z: why}).

    `log_norms` [n]; what is not finite has no z and does not count. Where half of a group or more are equal, the MAD is zero, and 1.2533
    times the mean absolute deviation from the median takes its place (as in IBM's modified z score); where that is zero, too, the group is
    'degenerate'. A group of fewer than 30 rows has no z.
    """
    from scipy.stats import median_abs_deviation

    found, without = np.full(len(log_norms), np.nan), {}
    for label in np.unique(labels):
        mine = (labels == label) & np.isfinite(log_norms)
        values = log_norms[mine].astype("float64")
        if len(values) < LEAST_ROWS:
            without[str(label)] = f"fewer than {LEAST_ROWS} rows"
            continue
        away = values - np.median(values)
        scale = float(median_abs_deviation(values, scale="normal")) or _MEAN_TO_SIGMA * float(np.abs(away).mean())
        if scale == 0:
            without[str(label)] = "degenerate"
            continue
        found[mine] = away / scale
    return found, without
