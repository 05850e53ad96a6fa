"""The results of `psgrad influence`: the proponents and opponents of each query."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from psgrad.run.results.analyze import TopSample, disagrees
from psgrad.run.results.influence_details import QuestionTables, TokenPair
from psgrad.run.results.manifest import RunManifest
from psgrad.wording import ShortRepr

Array = np.ndarray[Any, Any]

SIGN = "positive: the training example helps the query; negative: it hurts"

# The queries as a whole: their mean score. A query with this id differs by its index.
ALL_QUERIES = "(all)"
ALL_INDEX = -1

# beyond_loss: whether a score predicts that a loss which is never negative falls by more than it is.
SCORE_COLUMNS = (
    "query_id",
    "query_index",
    "rank",
    "train_id",
    "train_index",
    "score",
    "score_std",
    "rank_stability",
    "beyond_loss",
)
QUERY_COLUMNS = (
    "id",
    "index",
    "target",
    "prediction",
    "confidence",
    "measurement",
    "agreement",
    "status",
)
TRAINING_COLUMNS = (
    "id",
    "index",
    "target",
    "prediction",
    "confidence",
    "loss",
    "grad_norm",
    "self_influence",
    "overall",
    "status",
)


@dataclass(frozen=True)
class CheckedRemoval:
    """A predicted change, and the computed one: the query's measurement, for the worse, without the training
    example.

    query_index: of the queries; None if the change is that of the training example's own loss. found: None
    where training did not go on, as the weights are at no minimum.
    """

    train_id: str
    train_index: int
    query_id: str
    query_index: int | None
    predicted: float
    found: float | None


@dataclass(frozen=True)
class RemovalCheck:
    """Some of the largest predicted changes, beside the result of training on from the given weights.

    steps: how many were taken. converged: whether that reached the minima of the training objectives, which
        is retraining. length: of the steps, as a mean share of full ones, which raise the training loss of
        some models. excess: how much further one step with all rows lowers the training loss than the removal
        of one of these rows does. at_minimum: whether the weights are at a minimum; elsewhere nothing was
        tried.
    """

    steps: int
    converged: bool
    removals: list[CheckedRemoval]
    length: float = 1.0
    excess: float = 0.0
    at_minimum: bool = True

    @property
    def share(self) -> float:
        """Of a full step that the steps make together, at most 1: the part of a prediction that they can
        show.
        """
        return 1.0 if self.converged else min(1.0, self.steps * self.length)

    @property
    def words(self) -> str:
        """The result and its method, in words."""
        if not self.at_minimum:
            times = f"{self.excess:,.0f}" if self.excess >= 10 else f"{self.excess:.2g}"
            return (
                "The weights are at no minimum of the training loss: one more step of the scores' own inverse"
                f" curvature, with all rows, would lower it {times} times as far as the removal of"
                " one of these rows does, and hide what that does. So no training was continued, and the"
                " predicted amounts are no more than a ranking."
            )
        steps = f"for {self.steps} step{'' if self.steps == 1 else 's'} of the full gradient"
        how = "to the minimum" if self.converged else steps
        text = (
            f"Found: training went on from these weights {how}, with all rows and without the one, by the"
            " scores' own inverse curvature; the difference between the two."
        )
        if not self.converged and self.length < 1:
            text += (
                f" Full steps raise the training loss, and those taken had {self.length:.3g} of their length."
            )
        return f"{text}{self._ratio}"

    @property
    def _ratio(self) -> str:
        """How found and predicted changes compare, over the same length."""
        ratios = sorted(
            each.found / (self.share * each.predicted)
            for each in self.removals
            if each.found is not None and self.share * each.predicted
        )
        if not ratios:
            return ""
        low, high = f"{ratios[0]:.2g}", f"{ratios[-1]:.2g}"
        times = low if low == high else f"{low} to {high}"
        length = "" if self.share == 1 else f" for {self.share:.3g} of a step"
        return f" It is {times} times what is predicted{length}."


@dataclass(frozen=True, repr=False)
class InfluenceResult(ShortRepr):
    """What `psgrad influence` found.

    `scores` has one row for each ranked pair, with SCORE_COLUMNS: within a query rank 1 is the strongest
    proponent, -1 the strongest opponent. Rows of `query_index` -1 rank for the queries as a whole, by the
    mean of their scores. Where scores predict a change of a loss that is never negative, `beyond_loss` says
    which predict a fall by more than that loss is. With several checkpoints `score_std` is the score's
    standard deviation over them, and `rank_stability` the share of them in which the example is among that
    query's strongest of its sign by itself.

    `queries` has one row for each query, with QUERY_COLUMNS (`measurement`: its value; `agreement`, with
    several checkpoints: the mean over pairs of them of the correlation of their scores), `training` one a
    training example with TRAINING_COLUMNS (`overall`: the mean of its scores over the queries); columns that
    a run has not are left out. `status` is "ok", or "nonfinite" for rows that are excluded.

    `shown` holds all n scores of the first few queries, query index -> [n] (NaN: excluded), `query_inputs`
    and `training_inputs` the inputs of what is shown, index -> input: see `shown_rows`.

    `unit` says what a score is. `predicts_removal`: whether it is the change on removal of the example, and
    `check` what a few such changes are where training goes on; None where that was not tried. `measurement`
    is what of a query is explained, and `larger_is_worse` its sense. `facts` are what the method says of its
    fit (damping, residual, iterations, spectrum), for each checkpoint; `warnings` are for people. `questions`
    has the answers about groups and contrasts. `tokens` has the ranked pairs of the
    shown queries token by token, with `level: token`. `manifest` is what manifest.json holds.
    """

    scores: pd.DataFrame
    queries: pd.DataFrame
    training: pd.DataFrame
    manifest: RunManifest
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
    check: RemovalCheck | None = None
    larger_is_worse: bool = True
    questions: QuestionTables = field(default_factory=QuestionTables)
    tokens: list[TokenPair] = field(default_factory=list)


def ranked_pairs(
    query_ids: Sequence[Any] | Array,
    query_rows: Sequence[int] | Array,
    train_ids: Array,
    values: Array,
    rows: Array,
    extras: Mapping[str, Array] | None = None,
) -> pd.DataFrame:
    """The strongest pairs of m queries as rows of `InfluenceResult.scores`, query by query: ranks 1, 2, ...,
    then -1, -2, ...

    query_ids, query_rows: [m]. train_ids: [n]. values: [2, k, m], the scores of proponents and opponents,
    strongest first. rows: [2, k, m], the examples' places in the training set, -1 where there are fewer than
    k. extras: further columns of the same pairs, name -> [2, k, m]. `query_id` is text, as ALL_QUERIES is.
    """
    k, m = values.shape[1:]
    rank = np.broadcast_to(np.stack([np.arange(1, k + 1), -np.arange(1, k + 1)])[..., None], (2, k, m))
    query = np.broadcast_to(np.arange(m), (2, k, m))
    # Queries go slowest, then the two sides, then the places.
    given = {"query": query, "rank": rank, "train_index": rows, "score": values, **(extras or {})}
    by_query = {name: array.transpose(2, 0, 1).ravel() for name, array in given.items()}
    there = by_query["train_index"] >= 0
    columns = {name: array[there] for name, array in by_query.items()}
    place = columns.pop("query")
    names = np.asarray([str(each) for each in query_ids], dtype=object)
    pairs = pd.DataFrame(columns).assign(
        query_id=names[place],
        query_index=np.asarray(query_rows, dtype=np.int64)[place],
        train_id=train_ids[columns["train_index"]],
    )
    return pairs[[column for column in SCORE_COLUMNS if column in pairs]]


def harmful_rows(training: pd.DataFrame) -> pd.DataFrame:
    """The training examples that hurt all queries together, the worst first, with `predicted_change`: the sum
    of the scores of a row and of those before it, which is what removing them all predicts to first order.
    """
    rows = training[(training["status"] == "ok") & (training["overall"] < 0)]
    found = rows.sort_values("overall", kind="stable")
    names = [name for name in ("id", "index", "target", "prediction", "loss", "overall") if name in found]
    return found[names].assign(predicted_change=found["overall"].cumsum())


def pairs_of(scores: pd.DataFrame, query_index: int, k: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """A query's k strongest proponents and opponents, strongest first."""
    rows = scores[scores["query_index"] == query_index]
    return rows[rows["rank"] > 0].nsmallest(k, "rank"), rows[rows["rank"] < 0].nlargest(k, "rank")


def shown_queries(queries: pd.DataFrame, count: int, larger_is_worse: bool = True) -> list[int]:
    """The rows of the queries that are reported by themselves: those that the model gets wrong before the
    others, and of both the worst by their measurement first. Queries without scores are not among them.

    larger_is_worse: of the measurement.
    """
    scored = queries[queries["status"] == "ok"]
    worst = scored["measurement"] * (-1 if larger_is_worse else 1) if "measurement" in scored else 0
    order = scored.assign(right=~disagrees(scored), worst=worst)
    order = order.sort_values(["right", "worst"], kind="stable")
    return [int(index) for index in order["index"].head(count)]


def shown_rows(
    scores: pd.DataFrame, queries: pd.DataFrame, query_count: int, k: int, larger_is_worse: bool = True
) -> tuple[list[int], list[int]]:
    """Which queries and which training examples have their inputs in a report: those of `shown_queries`, the
    k strongest of each and of all.
    """
    first = shown_queries(queries, query_count, larger_is_worse)
    pairs = [side for query in (ALL_INDEX, *first) for side in pairs_of(scores, query, k)]
    return first, sorted({int(row) for side in pairs for row in side["train_index"]})


@dataclass(frozen=True)
class IndexResult:
    """What `psgrad influence index` built: rows of `columns` numbers for each of `checkpoints`, `size` bytes
    in `folder`.

    timings: seconds of each phase.
    """

    folder: Path
    rows: int
    columns: int
    checkpoints: int
    size: int
    timings: dict[str, float]
