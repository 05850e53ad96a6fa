"""Who a finding is about: the same digest in every run, whatever row the sample is in and whatever its values are."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd


def finding_fingerprints(rule: str, samples: pd.DataFrame, named: npt.NDArray[np.bool_]) -> list[str]:
    """32 hexadecimal digits for each named row [n bool] of a table with a column `fingerprint`, in row order.

    Samples with the same content have the same fingerprint: these are told apart by their number among their equals, in row order, so
    that each finding is distinct, and is the same in the next run as long as no equal is put before it.
    """
    prints = samples["fingerprint"].astype(str)
    mine = prints[named]
    equals = prints[prints.isin(mine.unique())]
    occurrence = equals.groupby(equals).cumcount()[mine.index]
    return [_digest(rule, each, number) for each, number in zip(mine.tolist(), occurrence.tolist(), strict=True)]


def _digest(rule: str, sample: str, occurrence: int) -> str:
    parts: tuple[Any, ...] = (rule, sample, occurrence) if occurrence else (rule, sample)
    return hashlib.sha256("\n".join(map(str, parts)).encode("utf-8", "surrogatepass")).hexdigest()[:32]
