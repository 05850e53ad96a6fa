"""What `psgrad influence` yields: which training examples help and hurt each query, and what its tables say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from psgrad.results.analyze import TopSample

Array = np.ndarray[Any, Any]

SIGN = "positive: the training example helps the query; negative: it hurts"

# The queries as a whole: their mean score. A query of this name is told apart by its index.
ALL_QUERIES = "(all)"
ALL_INDEX = -1

SCORE_COLUMNS = ("query_id", "query_index", "layer", "rank", "train_id", "train_index", "score", "score_std", "rank_stability")
QUERY_COLUMNS = ("id", "index", "target", "prediction", "confidence", "measurement", "status")
TRAINING_COLUMNS = ("id", "index", "target", "prediction", "confidence", "loss", "grad_norm", "self_influence", "overall", "status")


@dataclass(frozen=True)
class Strongest:
    """The k strongest training examples of one sign, for each of m queries.

    scores: [m, k]. rows: [m, k], the examples' places in the training set; a place below 0 is none. more: further columns [m, k] of the
    same pairs (`score_std`, `rank_stability`). The order along k is of no matter.
    """

    scores: Array
    rows: Array
    more: Mapping[str, Array] = field(default_factory=dict)


@dataclass(frozen=True)
class InfluenceResult:
    """What `psgrad influence` found.

    `scores` has one row a ranked pair, with SCORE_COLUMNS: within a query (and a `layer`, where layers were asked for; "" is all of them)
    rank 1 is the strongest proponent, -1 the strongest opponent. Rows of `query_index` -1 rank for the queries as a whole, by the mean of
    their scores. With several checkpoints `score_std` is the score's standard deviation over them, and `rank_stability` the share of
    them in which the example is among that query's strongest of its sign by itself.

    `queries` has one row a query with QUERY_COLUMNS (`measurement`: its value), `training` one a training example with TRAINING_COLUMNS
    (`overall`: the mean of its scores over the queries); columns that a run has not are left out. `status` is "ok", or "nonfinite" for
    rows that are excluded.

    `shown` holds all n scores of the first few queries, query index -> [n] (NaN: excluded), `query_inputs` and `training_inputs` the
    inputs of what is shown, index -> input: see `shown_rows`.

    `unit` says what a score is. `predicts_removal`: whether it is the change on removal of the example. `measurement` is what of a query
    is explained. `facts` are what the method says of its fit (damping, residual, iterations, spectrum), for each checkpoint; `warnings` are
    for people. `manifest` is what manifest.json holds; the reports read the keys that `AnalyzeResult` names.
    """

    scores: pd.DataFrame
    queries: pd.DataFrame
    training: pd.DataFrame
    manifest: dict[str, Any]
    folder: Path
    method: str
    unit: str
    predicts_removal: bool
    measurement: str = "loss"
    shown: dict[int, Array] = field(default_factory=dict)
    query_inputs: dict[int, TopSample] = field(default_factory=dict)
    training_inputs: dict[int, TopSample] = field(default_factory=dict)
    facts: list[dict[str, Any]] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    class_names: list[str] | None = None


def ranked_pairs(
    query_ids: Sequence[Any] | Array,
    query_rows: Sequence[int] | Array,
    train_ids: Array,
    proponents: Strongest,
    opponents: Strongest,
    layer: str | None = None,
) -> pd.DataFrame:
    """The strongest pairs of m queries as rows of `InfluenceResult.scores`, query by query: ranks 1, 2, ..., then -1, -2, ...

    query_ids, query_rows: [m]. train_ids: [n]. Only scores above zero make proponents, only those below make opponents, so that there may
    be fewer than k of either; equal scores are ranked in the order of the training set. `query_id` is text, as ALL_QUERIES is.
    """
    parts = [_side(proponents, 1), _side(opponents, -1)]
    pairs = pd.concat(parts, ignore_index=True).sort_values("query", kind="stable", ignore_index=True)
    places = pairs.pop("query").to_numpy()
    pairs["query_id"] = np.asarray([str(each) for each in query_ids], dtype=object)[places]
    pairs["query_index"] = np.asarray(query_rows, dtype=np.int64)[places]
    pairs["train_id"] = np.asarray(train_ids)[pairs["train_index"].to_numpy()]
    if layer is not None:
        pairs["layer"] = layer
    return pairs[[column for column in SCORE_COLUMNS if column in pairs]]


def _side(strongest: Strongest, sign: int) -> pd.DataFrame:
    scores, rows = np.asarray(strongest.scores, dtype=float), np.asarray(strongest.rows, dtype=np.int64)
    order = np.lexsort((rows, -sign * scores))
    scores, rows = np.take_along_axis(scores, order, 1), np.take_along_axis(rows, order, 1)
    with np.errstate(invalid="ignore"):
        there = (rows >= 0) & (sign * scores > 0)
    query = np.nonzero(there)[0]
    columns = {"query": query, "rank": sign * np.cumsum(there, axis=1)[there], "train_index": rows[there], "score": scores[there]}
    more = {name: np.take_along_axis(np.asarray(values, dtype=float), order, 1)[there] for name, values in strongest.more.items()}
    return pd.DataFrame(columns | more)


def strongest_of(scores: Array, k: int) -> tuple[Strongest, Strongest]:
    """The k strongest proponents and opponents in full scores [m, n], where NaN is none."""
    found = []
    for sign in (1, -1):
        signed = np.where(np.isnan(scores), np.inf, -sign * scores)
        rows = np.argsort(signed, axis=1, kind="stable")[:, :k]
        found.append(Strongest(np.take_along_axis(scores, rows, 1), rows))
    return found[0], found[1]


def pairs_of(scores: pd.DataFrame, query_index: int, k: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """A query's k strongest proponents and opponents over all layers, strongest first."""
    rows = scores[scores["query_index"] == query_index]
    if "layer" in rows:
        rows = rows[rows["layer"] == ""]
    proponents, opponents = rows[rows["rank"] > 0].nsmallest(k, "rank"), rows[rows["rank"] < 0].nlargest(k, "rank")
    return proponents, opponents


def shown_queries(queries: pd.DataFrame, count: int) -> list[int]:
    """The places of the first few queries that have scores."""
    return [int(index) for index in queries.loc[queries["status"] == "ok", "index"].head(count)]


def shown_rows(scores: pd.DataFrame, queries: pd.DataFrame, query_count: int, k: int) -> tuple[list[int], list[int]]:
    """Which queries and which training examples a report shows the inputs of: the first queries, the k strongest of each and of all."""
    first = shown_queries(queries, query_count)
    pairs = [side for query in (ALL_INDEX, *first) for side in pairs_of(scores, query, k)]
    return first, sorted({int(row) for side in pairs for row in side["train_index"]})


def cumulative_influence(scores: Array) -> Array:
    """The share of the positive total that the 1, 2, ... strongest proponents carry; empty where no score is positive."""
    positive = np.sort(scores[scores > 0])[::-1]
    sums = np.cumsum(positive, dtype=np.float64)
    return sums / sums[-1] if len(sums) else sums


def carriers(scores: Array, share: float) -> int:
    """How many of the strongest proponents carry this share of the positive total; 0 where there is none."""
    curve = cumulative_influence(scores)
    return min(int(np.searchsorted(curve, share)) + 1, len(curve))
