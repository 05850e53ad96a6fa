"""The differences between two tables of samples, matched by fingerprint in any order of rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from psgrad.run.results.check import CHANGE_COLUMNS


def matched(a: pd.DataFrame, b: pd.DataFrame, score: str, tail: str) -> pd.DataFrame:
    """A row for each sample of either table: fingerprint, id, and for both runs row, score, listed,
    percentile.

    Equal samples are matched in row order. `percentile_a` and `percentile_b` are among the samples with a
    score in both, 100 the most suspect, and `moved` is the difference. `list` is 'entered' for a sample that
    B lists and A does not, 'left' for the other way round, else empty.
    """
    both = _keyed(a, score, "_a").merge(_keyed(b, score, "_b"), on=["fingerprint", "equal"], how="outer")
    both["id"] = both["id_b"].where(both["row_b"].notna(), both["id_a"])
    scored = both["score_a"].notna() & both["score_b"].notna()
    for run in ("a", "b"):
        suspect = both[f"score_{run}"].where(scored) * (1 if tail == "upper" else -1)
        both[f"percentile_{run}"] = 100 * suspect.rank(method="average", pct=True)
    # Missing, where the sample is in one run alone, is neither True nor False.
    was, now = both["listed_a"], both["listed_b"]
    entered, left = now.eq(True) & was.eq(False), was.eq(True) & now.eq(False)
    return both.assign(
        moved=both["percentile_b"] - both["percentile_a"],
        list=np.select([entered, left], ["entered", "left"], default=""),
    )


def counts_of(both: pd.DataFrame) -> dict[str, int]:
    """How many samples there are of each kind; see `Comparison`."""
    in_a, in_b = both["row_a"].notna(), both["row_b"].notna()
    chosen = {
        "samples_a": in_a,
        "samples_b": in_b,
        "common": in_a & in_b,
        "came": ~in_a,
        "went": ~in_b,
        "rose": both["moved"] > 0,
        "fell": both["moved"] < 0,
        "entered": both["list"] == "entered",
        "left": both["list"] == "left",
    }
    return {name: int(rows.sum()) for name, rows in chosen.items()}


def changes_of(both: pd.DataFrame, tail: str, top: int) -> pd.DataFrame:
    """The first few of each change: samples that moved furthest, or came and went as the most suspect."""
    suspect = (both[["score_a", "score_b"]] * (1 if tail == "upper" else -1)).fillna(-np.inf)
    parts = {
        "came": suspect["score_b"][both["row_a"].isna()],
        "went": suspect["score_a"][both["row_b"].isna()],
        "rose": both["moved"][both["moved"] > 0],
        "fell": -both["moved"][both["moved"] < 0],
    }
    chosen = [both.loc[size.nlargest(top).index].assign(change=change) for change, size in parts.items()]
    return pd.concat(chosen, ignore_index=True)[list(CHANGE_COLUMNS)]


def spearman(a: pd.Series[Any], b: pd.Series[Any]) -> float | None:
    """Spearman's correlation over the rows with two finite values; None for fewer than two, or for ties."""
    values = pd.DataFrame({"a": a.to_numpy("float64"), "b": b.to_numpy("float64")})
    values = values.loc[np.isfinite(values.to_numpy()).all(axis=1)]
    if len(values) < 2 or (values.nunique() < 2).any():
        return None
    return float(values.corr(method="spearman").to_numpy()[0, 1])


def _keyed(samples: pd.DataFrame, score: str, suffix: str) -> pd.DataFrame:
    """The columns that are compared. equal: which of several samples with one fingerprint."""
    prints = samples["fingerprint"].astype(object)
    values = samples[score].to_numpy("float64", na_value=np.nan)
    finite = np.isfinite(values) & (samples["status"].to_numpy(object) != "nonfinite")
    return pd.DataFrame(
        {
            "fingerprint": prints,
            "equal": prints.groupby(prints).cumcount(),
            f"id{suffix}": samples["id"].astype(object),
            f"row{suffix}": samples["index"].astype("float64"),
            f"score{suffix}": np.where(finite, values, np.nan),
            f"listed{suffix}": samples["is_outlier_issue"].to_numpy(bool),
        }
    )
