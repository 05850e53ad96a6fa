"""Whether two runs found the same."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

# Sums over all samples are added in another order.
CLOSE = 1e-12
# How a measure was computed, in words, with the price that this many threads pay.
WAY = "way"


def assert_same_runs(one: Path, other: Path, rounded: Sequence[str] = ()) -> None:
    """The columns of both runs are the same bits; numbers over all samples differ by rounding in float64.

    rounded: columns that compare a sample with all, and may differ like these numbers.
    """
    columns, others = (pd.read_parquet(run / "samples.parquet") for run in (one, other))
    pd.testing.assert_frame_equal(
        columns.drop(columns=list(rounded)), others.drop(columns=list(rounded)), check_exact=True
    )
    compared = [frame[list(rounded)] for frame in (columns, others)]
    pd.testing.assert_frame_equal(*compared, rtol=CLOSE, atol=CLOSE)
    _assert_close(*(json.loads((run / "measures.json").read_text()) for run in (one, other)))
    tables = [one / "parameters.parquet", *sorted((one / "measures").glob("*.parquet"))]
    for table in tables:
        pd.testing.assert_frame_equal(
            pd.read_parquet(table), pd.read_parquet(other / table.relative_to(one)), rtol=CLOSE, atol=CLOSE
        )
    verdicts = [run / "findings.jsonl" for run in (one, other)]
    assert verdicts[0].read_bytes() == verdicts[1].read_bytes()


def _assert_close(one: Any, other: Any) -> None:
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one.keys() - {WAY}:
            _assert_close(one[key], other[key])
    elif isinstance(one, list):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            _assert_close(left, right)
    elif isinstance(one, float):  # two that are not numbers are the same
        np.testing.assert_allclose(other, one, rtol=CLOSE, atol=CLOSE)
    else:
        assert one == other
