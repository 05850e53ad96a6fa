"""Groups within which samples are compared: by class, by length or by a column, with small groups joined; and
robust standard deviations within each group.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from psgrad.config import did_you_mean
from psgrad.errors import ConfigError

Labels = npt.NDArray[Any]
Array = npt.NDArray[Any]


# In brackets, so that they are no group of the data.
ALL, OTHER, MISSING = "all", "(other)", "(missing)"


def labels_of(frame: pd.DataFrame, by: str | None) -> Labels:
    """[n] text: the group of each row, before small groups are joined.

    `by` is None (all rows are one group), 'class' (the target), 'length' (in classes of 2 to 3, 4 to 7, 8 to
    15, ...: the same in every run), or a column. Raises ConfigError for a column that is not there, or that
    holds real numbers.
    """
    if by is None:
        return np.full(len(frame), ALL, dtype=object)
    column = {"class": "target"}.get(by, by)
    if column not in frame:
        raise ConfigError(_no_column(by, [str(name) for name in frame]))
    values = frame[column]
    if not all(np.ndim(value) == 0 for value in values.head(100)):
        raise ConfigError(
            f"analyze.outliers.group_by: {by} has more than one value a sample",
            expected="a column of one value a sample",
        )
    if pd.api.types.is_float_dtype(values) and not (values.dropna() % 1 == 0).all():
        raise ConfigError(
            f"analyze.outliers.group_by: {by} holds real numbers, and samples of one group have one value",
            expected="whole numbers or texts, each of which occurs often",
        )
    if by == "length":
        return _length_classes(values)
    whole = pd.api.types.is_float_dtype(values)
    return np.array(
        [MISSING if pd.isna(value) else str(int(value) if whole else value) for value in values], dtype=object
    )


def join_small(labels: Labels, counted: Labels, least: int) -> tuple[Labels, set[str]]:
    """(the labels, with '(other)' for groups with fewer than `least` rows among `counted`; the joined
    groups).

    Small groups are joined with each other, not with everything: a sound sample of a rare kind, unlike the
    rest, would stand out among all.
    """
    sizes = pd.Series(counted, dtype=object).value_counts()
    small = {str(label) for label in {*labels.tolist(), *counted.tolist()} if sizes.get(label, 0) < least}
    return np.array([OTHER if label in small else label for label in labels], dtype=object), small


def _length_classes(values: pd.Series[Any]) -> Labels:
    lowest = 2 ** np.floor(np.log2(np.maximum(values.fillna(0).to_numpy("float64"), 1))).astype("int64")
    names = {low: f"{low} to {2 * low - 1}" if low > 1 else "0 to 1" for low in np.unique(lowest).tolist()}
    return np.array([names[low] for low in lowest.tolist()], dtype=object)


def _no_column(by: str, columns: list[str]) -> str:
    if by == "class":
        return "analyze.outliers.group_by: class, and the samples have no target"
    if by == "length":
        return (
            "analyze.outliers.group_by: length, and the loss has no positions that could be counted;"
            " token_cross_entropy has"
        )
    known = f"; known are class, length, {', '.join(columns)}"
    return f"analyze.outliers.group_by: there is no column {by!r}{did_you_mean(by, columns) or known}"


LEAST_ROWS = 30
# sqrt(pi / 2): of a normal distribution, sigma is this times the mean absolute deviation
_MEAN_TO_SIGMA = 1.2533


def robust_z(log_norms: Array, labels: Array) -> tuple[Array, dict[str, str]]:
    """([n] (x - median) / (1.4826 MAD) within each group, {group without z: why}).

    `log_norms` [n]; what is not finite has no z and does not count. Where half of a group or more are equal,
    the MAD is zero, and 1.2533 times the mean absolute deviation from the median takes its place (as in IBM's
    modified z score); where that is zero, too, the group is 'degenerate'. A group of fewer than 30 rows has
    no z.

    On raw norms the rule `z > 3.5` flags a quarter of a clean dataset, on their logarithms it misses flipped
    labels: docs/explanation/outliers.md has both.
    """
    from scipy.stats import median_abs_deviation

    z, without = np.full(len(log_norms), np.nan), {}
    for label in np.unique(labels):
        mine = (labels == label) & np.isfinite(log_norms)
        values = log_norms[mine].astype("float64")
        if len(values) < LEAST_ROWS:
            without[str(label)] = f"fewer than {LEAST_ROWS} rows"
            continue
        away = values - np.median(values)
        scale = float(median_abs_deviation(values, scale="normal")) or _MEAN_TO_SIGMA * float(
            np.abs(away).mean()
        )
        if scale == 0:
            without[str(label)] = "degenerate"
            continue
        z[mine] = away / scale
    return z, without
