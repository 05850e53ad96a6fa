"""What measures gathered over a whole dataset, beside the columns of the table of samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from psgrad.results.short_repr import ShortRepr


@dataclass(frozen=True, repr=False)
class MeasureResult(ShortRepr):
    """One measure's answer.

    Attributes:
        name, title, formula, unit: for headings; source: paper and page.
        meanings: column of the table of samples -> what it says, with its unit.
        numbers: of the dataset, by name (plain JSON values). tables: by name. arrays: by name.
    """

    name: str
    title: str
    formula: str
    unit: str
    source: str = ""
    meanings: Mapping[str, str] = field(default_factory=dict)
    numbers: Mapping[str, Any] = field(default_factory=dict)
    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    arrays: Mapping[str, np.ndarray[Any, Any]] = field(default_factory=dict)
