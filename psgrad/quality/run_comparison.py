"""The differences between two tables of samples, matched by fingerprint in any order of rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from psgrad.run.results.findings import CHANGE_COLUMNS

MAX_GROUPS = 100


def matched(a: pd.DataFrame, b: pd.DataFrame, score: str, tail: str, group: str | None) -> pd.DataFrame:
    """A row for each sample of either table: fingerprint, id, group, and for both runs row, score, listed,
    percentile.

    Equal samples are matched in row order. `percentile_a` and `percentile_b` are among the samples with a
    score in both, 100 the most suspect, and `moved` is the difference.
    """
    left = _keyed(a, score, "_a", None if group is None or group in b else group)
    right = _keyed(b, score, "_b", group if group is not None and group in b else None)
    keys = ["fingerprint", "equal"]
    if not left["equal"].any() and not right["equal"].any():
        # Which is twice as fast.
        keys, left, right = keys[:1], left.drop(columns="equal"), right.drop(columns="equal")
    both = left.merge(right, on=keys, how="outer", sort=False)
    both["id"] = both["id_b"].where(both["row_b"].notna(), both["id_a"])
    both = both.drop(columns=["id_a", "id_b", *keys[1:]])
    sign = 1 if tail == "upper" else -1
    scored = both["score_a"].notna() & both["score_b"].notna()
    for run in ("a", "b"):
        suspect = sign * both[f"score_{run}"].where(scored)
        both[f"percentile_{run}"] = 100 * suspect.rank(method="average", pct=True)
    return both.assign(moved=both["percentile_b"] - both["percentile_a"])


def counts_of(both: pd.DataFrame) -> dict[str, int]:
    """How many samples there are of each kind; see `Comparison`."""
    in_a, in_b = both["row_a"].notna(), both["row_b"].notna()
    return {
        "samples_a": int(in_a.sum()),
        "samples_b": int(in_b.sum()),
        "common": int((in_a & in_b).sum()),
        "came": int((~in_a).sum()),
        "went": int((~in_b).sum()),
        "rose": int((both["moved"] > 0).sum()),
        "fell": int((both["moved"] < 0).sum()),
        "entered": int(_entered(both).sum()),
        "left": int(_left(both).sum()),
    }


def changes_of(both: pd.DataFrame, tail: str, top: int) -> pd.DataFrame:
    """The first few of each change: samples that moved furthest, or came and went as the most suspect."""
    suspect = (both[["score_a", "score_b"]] * (1 if tail == "upper" else -1)).fillna(-np.inf)
    parts = {
        "came": suspect["score_b"][both["row_a"].isna()],
        "went": suspect["score_a"][both["row_b"].isna()],
        "rose": both["moved"][both["moved"] > 0],
        "fell": -both["moved"][both["moved"] < 0],
    }
    marked = both.assign(list=np.select([_entered(both), _left(both)], ["entered", "left"], default=""))
    chosen = [marked.loc[size.nlargest(top).index].assign(change=change) for change, size in parts.items()]
    return pd.concat(chosen, ignore_index=True)[list(CHANGE_COLUMNS)]


def spearman(a: pd.Series[Any], b: pd.Series[Any]) -> float | None:
    """Spearman's correlation over the rows with two finite values; None for fewer than two, or for ties."""
    values = pd.DataFrame({"a": a.to_numpy("float64"), "b": b.to_numpy("float64")})
    values = values.loc[np.isfinite(values.to_numpy()).all(axis=1)]
    if len(values) < 2 or (values.nunique() < 2).any():
        return None
    return float(values.corr(method="spearman").to_numpy()[0, 1])


def groups_of(both: pd.DataFrame) -> pd.DataFrame:
    """A row a group, the least alike first; nothing for one group, or for more than MAX_GROUPS."""
    columns = ["group", "samples", "spearman", "median_a", "median_b", "entered", "left"]
    common = both[both["row_a"].notna() & both["row_b"].notna()]
    if "group" not in common or not 2 <= common["group"].nunique() <= MAX_GROUPS:
        return pd.DataFrame(columns=columns)
    rows = [
        (
            str(name),
            len(part),
            spearman(part["score_a"], part["score_b"]),
            part["score_a"].median(),
            part["score_b"].median(),
            int(_entered(part).sum()),
            int(_left(part).sum()),
        )
        for name, part in common.groupby("group", observed=True)
    ]
    return pd.DataFrame(rows, columns=columns).sort_values(
        "spearman", kind="stable", na_position="last", ignore_index=True
    )


def _keyed(samples: pd.DataFrame, score: str, suffix: str, group: str | None) -> pd.DataFrame:
    prints = samples["fingerprint"].astype(object)
    equal: Any = np.zeros(len(samples), dtype=np.int64)
    if prints.duplicated().any():
        equal = prints.groupby(prints).cumcount().to_numpy()
    values = samples[score].to_numpy("float64", na_value=np.nan)
    finite = np.isfinite(values) & (samples["status"].to_numpy(object) != "nonfinite")
    columns = {
        "fingerprint": prints,
        "equal": equal,
        f"id{suffix}": samples["id"].astype(object),
        f"row{suffix}": samples["index"].astype("float64"),
        f"score{suffix}": np.where(finite, values, np.nan),
        f"listed{suffix}": samples["is_outlier_issue"].to_numpy(bool),
    }
    if group is None:
        return pd.DataFrame(columns)
    labels = samples[group]
    # A class is 3, and not 3.0 if samples that came or went have none.
    whole = pd.api.types.is_integer_dtype(labels)
    return pd.DataFrame({**columns, "group": labels.astype("Int64") if whole else labels})


def _entered(both: pd.DataFrame) -> pd.Series[bool]:
    return (both["listed_b"] == True) & (both["listed_a"] == False)  # noqa: E712 (missing where the sample is in one run alone)


def _left(both: pd.DataFrame) -> pd.Series[bool]:
    return (both["listed_a"] == True) & (both["listed_b"] == False)  # noqa: E712
