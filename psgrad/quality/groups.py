"""Groups within which samples are compared: by class, by length or by a column, with small groups joined."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from psgrad.config import nearest
from psgrad.errors import ConfigError

Labels = npt.NDArray[Any]


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
        raise ConfigError(*_no_column(by, [str(name) for name in frame]))
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


def _no_column(by: str, columns: list[str]) -> tuple[str]:
    if by == "class":
        return ("analyze.outliers.group_by: class, and the samples have no target",)
    if by == "length":
        return (
            (
                "analyze.outliers.group_by: length, and the loss has no positions that could be counted;"
                " token_cross_entropy has"
            ),
        )
    close = nearest(by, columns)
    return (
        f"analyze.outliers.group_by: there is no column {by!r}"
        + (f"; did you mean {close}?" if close else f"; known are class, length, {', '.join(columns)}"),
    )
