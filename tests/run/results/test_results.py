"""The ranking: which rows are in the review list, and what happens to rows that are not finite."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from psgrad.quality.judging import rank_samples
from psgrad.run.results import disagrees, top_samples


def _frame(norms: list[float], losses: list[float] | None = None) -> pd.DataFrame:
    n = len(norms)
    return pd.DataFrame(
        {
            "id": [f"s{i}" for i in range(n)],
            "index": range(n),
            "loss": losses or [1.0] * n,
            "grad_norm": norms,
        }
    )


def test_rank_samples_by_norm() -> None:
    ranked = rank_samples(_frame([2.0, 8.0, 4.0, 1.0]), 0.25)
    assert ranked["id"].tolist() == ["s0", "s1", "s2", "s3"]
    assert ranked["rank"].tolist() == [3, 1, 2, 4]
    assert ranked["percentile"].tolist() == [50, 100, 75, 25]
    assert ranked["is_outlier_issue"].tolist() == [False, True, False, False]
    assert ranked["reasons"].tolist() == ["", "among the largest 25 % of gradient norms", "", ""]
    np.testing.assert_allclose(ranked["log_norm"], np.log10([2, 8, 4, 1]))


def test_rank_samples_nonfinite_rows() -> None:
    ranked = rank_samples(_frame([1.0, np.nan, np.inf, 3.0], [1.0, 1.0, 1.0, np.nan]), 0.01)
    assert ranked["status"].tolist() == ["ok", "nonfinite", "nonfinite", "nonfinite"]
    assert ranked["rank"].isna().tolist() == [False, True, True, True]
    assert ranked.loc[0, "rank"] == 1
    assert ranked["percentile"].isna().tolist() == [False, True, True, True]
    assert ranked["is_outlier_issue"].all()
    assert ranked["reasons"].tolist()[1:] == ["loss or gradient is not finite"] * 3


def test_rank_samples_keeps_nonfinite_status() -> None:
    ranked = rank_samples(_frame([1.0, 2.0]).assign(status=["ok", "nonfinite"]), 0.5)
    assert ranked["status"].tolist() == ["ok", "nonfinite"]
    assert ranked.loc[0, "rank"] == 1


def test_rank_samples_ties() -> None:
    ranked = rank_samples(_frame([5.0] * 10), 0.2)
    assert ranked["rank"].tolist() == list(range(1, 11))
    assert ranked["is_outlier_issue"].sum() == 2
    assert (ranked["percentile"] == 100).all()


def test_rank_samples_zero_gradients() -> None:
    ranked = rank_samples(_frame([0.0, 0.0]), 0.5)
    assert ranked["reasons"].tolist() == ["gradient is exactly zero"] * 2
    assert not ranked["is_outlier_issue"].any()
    assert (ranked["log_norm"] == -np.inf).all()


def test_rank_samples_empty_frame() -> None:
    assert len(rank_samples(_frame([]), 0.01)) == 0
    assert rank_samples(_frame([np.nan]), 0.01)["rank"].isna().all()


def test_top_samples() -> None:
    ranked = rank_samples(_frame([2.0, np.nan, 8.0]), 0.01)
    assert top_samples(ranked, 20)["id"].tolist() == ["s2", "s0"]
    assert top_samples(ranked, 1)["id"].tolist() == ["s2"]


@pytest.mark.parametrize("dtype", ["int64", "Int64", "str", "object"])
def test_disagrees_of_classes(dtype: str) -> None:
    frame = _frame([1.0] * 3).assign(target=pd.array([1, 2, 3], dtype="Int64").astype(dtype), confidence=0.5)
    frame["prediction"] = pd.Series([1, 9, 9]).astype(dtype).astype(object).where([True, True, False], None)
    assert disagrees(frame).tolist() == [False, True, False]
    assert not disagrees(frame.drop(columns="prediction")).any()


def test_disagrees_of_real_numbers() -> None:
    assert not disagrees(_frame([1.0, 2.0]).assign(target=[0.1, 0.2], prediction=[0.3, 0.4])).any()
