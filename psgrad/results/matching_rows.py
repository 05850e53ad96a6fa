"""The rows of a table for which a condition holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from psgrad.config.values import names_in_condition
from psgrad.errors import ConfigError
from psgrad.wording import first_line


def rows_where(frame: pd.DataFrame, condition: str, option: str) -> np.ndarray[Any, Any]:
    """[n] bool: for which rows a condition on the columns holds. option: what the condition was given as.

    Raises ConfigError for what is no condition, or can't be answered of these columns.
    """
    try:
        names = names_in_condition(condition, [str(name) for name in frame])
        found = frame[names].eval(" ".join(condition.split()), engine="python")
    except ValueError as error:
        raise ConfigError(f"{option}: {error}") from None
    except Exception as error:  # pandas has many kinds of them for types that can't be compared
        raise ConfigError(
            f"{option}: {condition!r} can't be answered: {first_line(error)}",
            expected=f"values of the columns' own types: {', '.join(f'{n} {frame[n].dtype}' for n in names)}",
        ) from error
    if not isinstance(found, pd.Series) or not pd.api.types.is_bool_dtype(found):
        raise ConfigError(
            f"{option}: {condition!r} is not true or false of each row",
            expected="a comparison of a column with a value, such as loss > 2",
        )
    return found.to_numpy(bool)
