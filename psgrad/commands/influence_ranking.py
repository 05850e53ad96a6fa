"""From fitted methods to ranked pairs: training examples stream past, and each query keeps its strongest.
Scores that predict more than a loss can fall by are marked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import torch

from psgrad.commands.influence_setup import InfluenceSetup, is_on_one_scale
from psgrad.engine.execution.loading import Read
from psgrad.engine.influence.method import Fitted
from psgrad.engine.influence.ranking import (
    CheckpointAgreement,
    JoinedBlock,
    Strongest,
    joined_scores,
    over_queries,
)
from psgrad.run.results import Progress
from psgrad.run.results.influence import ALL_INDEX, ALL_QUERIES, ranked_pairs

# The share of the free memory for the prepared gradients of a block of queries.
_SHARE = 0.25


@dataclass(frozen=True)
class QueryRankings:
    """What is kept of the scores.

    pairs: the ranked pairs of each query, with SCORE_COLUMNS; scores: the same with those of all queries
    together. overall: [n], the mean over the queries that have a score. shown: query row -> all scores, [rows
    of the training data], NaN where a row was excluded. matrix: where all scores were to be kept, scores
    [n, m], train_index [n] and query_index [m]. agreement: [m], of several checkpoints, see
    `CheckpointAgreement`; empty of one.
    """

    pairs: pd.DataFrame
    scores: pd.DataFrame
    overall: np.ndarray
    shown: dict[int, np.ndarray]
    matrix: dict[str, np.ndarray] | None
    agreement: np.ndarray


def rank(
    setup: InfluenceSetup,
    fitted: Sequence[Fitted],
    divisors: Sequence[torch.Tensor] | None,
    shown: Sequence[int],
    matrix: bool,
    progress: Callable[[Progress], None],
) -> QueryRankings:
    """Score all training examples for all queries, some queries at a time where their gradients would not fit
    in memory.

    shown: of these queries, named by their rows, all scores are kept.
    """
    wanted, n, m = setup.run.config.influence, len(setup.training_rows), len(setup.query_rows)
    size = queries_at_once(setup)
    blocks = []
    kept = range(m) if matrix else np.flatnonzero(np.isin(setup.query_rows, shown)).tolist()
    for first in range(0, m, size):
        places = range(first, min(first + size, m))
        asked = [
            replace(view.queries, read=_some(view.queries.read, first), count=len(places))
            for view in setup.views
        ]
        block = _QueryBlock(wanted.top, [place - first for place in kept if place in places])
        for joined in joined_scores(setup.method, fitted, asked, divisors=divisors):
            block.add(joined)
            progress(Progress(joined.stop, n, "scores", unit="training example"))
        blocks.append(block)
    return _assembled(setup, blocks, shown, matrix)


def queries_at_once(setup: InfluenceSetup) -> int:
    """How many queries' gradients may be held for all checkpoints: each in float64, and once more while it is
    made. Where checkpoints are put on one scale, so are all of their scores.
    """
    training, wanted = setup.views[0].training, setup.run.config
    room = training.free_bytes() * _SHARE if wanted.engine.memory == "auto" else wanted.engine.memory
    numbers = training.flat.size
    if is_on_one_scale(setup):
        numbers += len(setup.training_rows)
    return max(1, int(room / (2 * 8 * numbers * len(setup.views))))


def _some(read: Read, first: int) -> Read:
    return lambda start, stop: read(first + start, first + stop)


class _QueryBlock:
    """What is kept of the scores of m queries while the training examples stream past.

    strongest: of all checkpoints together, then of each. columns: the scores of the queries at the places
    `wanted`, part by part. sums: parts of [2, n, 1 + checkpoints], of all checkpoints together and of each,
    see `over_queries`.
    """

    def __init__(self, top: int, wanted: list[int]) -> None:
        self.top, self.wanted, self.m = top, wanted, 0
        self.strongest: list[Strongest] = []
        self.columns: list[torch.Tensor] = []
        self.sums: list[torch.Tensor] = []
        self.agreement = CheckpointAgreement()

    def add(self, block: JoinedBlock) -> None:
        scores, single = block.scores[""], [each[""] for each in block.single]
        single = single if len(single) > 1 else []
        self.m = scores.shape[1]
        if not self.strongest:
            self.strongest = [Strongest(self.top, self.m) for _ in range(1 + len(single))]
        if single:
            self.agreement.add(single)
        self.strongest[0].add(block.start, scores, **({"score_std": block.spread("")} if single else {}))
        for strongest, own in zip(self.strongest[1:], single, strict=True):
            strongest.add(block.start, own)
        self.sums.append(over_queries(torch.stack([scores, *single], 2).double()))
        self.columns.append(scores[:, self.wanted])


def _assembled(
    setup: InfluenceSetup, blocks: list[_QueryBlock], shown: Sequence[int], matrix: bool
) -> QueryRankings:
    ids, rows = setup.run.samples.ids, setup.training_rows
    query_ids = setup.query_reader.samples.ids[setup.query_rows]
    parts, place = [], 0
    for block in blocks:
        here = slice(place, place + block.m)
        parts.append(_pairs(block.strongest, query_ids[here], setup.query_rows[here], ids, rows))
        place += block.m
    sums = torch.stack([torch.cat(block.sums, 1) for block in blocks]).sum(0)
    pairs = pd.concat(parts, ignore_index=True)
    scores, overall = with_all_queries(setup, pairs, sums)
    columns = torch.cat([torch.cat(block.columns) for block in blocks], 1).numpy()
    of = setup.query_rows if matrix else setup.query_rows[np.isin(setup.query_rows, shown)]
    first = {
        row: of_all(column, rows, len(ids))
        for row, column in zip(of.tolist(), columns.T, strict=True)
        if row in shown
    }
    everything = {"scores": columns, "train_index": rows, "query_index": setup.query_rows} if matrix else None
    agreement = np.empty(0)
    if len(setup.views) > 1:
        agreement = torch.cat([block.agreement.correlation() for block in blocks]).numpy()
    return QueryRankings(pairs, scores, overall, first, everything, agreement)


def with_all_queries(
    setup: InfluenceSetup, pairs: pd.DataFrame, sums: torch.Tensor
) -> tuple[pd.DataFrame, np.ndarray]:
    """(the pairs with those of all queries together, by the mean of their scores; that mean [n])."""
    total, count = sums
    means = total / count  # NaN for an example without a score
    whole = [Strongest(setup.run.config.influence.top, 1) for _ in range(means.shape[1])]
    spread = {"score_std": means[:, 1:].std(1, keepdim=True)} if len(whole) > 1 else {}
    whole[0].add(0, means[:, :1], **spread)
    for number, each in enumerate(whole[1:], 1):
        each.add(0, means[:, number : number + 1])
    together = _pairs(whole, [ALL_QUERIES], [ALL_INDEX], setup.run.samples.ids, setup.training_rows)
    return pd.concat([pairs, together], ignore_index=True), means[:, 0].numpy()


def of_all(values: np.ndarray, rows: np.ndarray, count: int) -> np.ndarray:
    """[count]: the values of these rows, and NaN of the others."""
    column = np.full(count, np.nan)
    column[rows] = values
    return column


def _pairs(
    kept: list[Strongest],
    query_ids: Sequence[str] | np.ndarray,
    query_rows: Sequence[int] | np.ndarray,
    ids: np.ndarray,
    rows: np.ndarray,
) -> pd.DataFrame:
    """The rows of the table for some queries. kept: of all checkpoints together, then of each, where there
    are several.
    """
    whole, single = kept[0], kept[1:]
    more = dict(whole.extras)
    if single:
        there = torch.stack([(whole.rows.unsqueeze(2) == each.rows.unsqueeze(1)).any(2) for each in single])
        more["rank_stability"] = there.double().mean(0)
    places = whole.rows.numpy()
    extras = {name: value.numpy() for name, value in more.items()}
    return ranked_pairs(
        query_ids,
        query_rows,
        ids,
        whole.values.numpy(),
        np.where(places >= 0, rows[places], -1),
        extras,
    )


# Losses that are never negative, by name.
_NEVER_NEGATIVE = (
    "cross_entropy",
    "token_cross_entropy",
    "bce_with_logits",
    "mse",
    "l1",
    "huber",
)


def marked_beyond_loss(
    setup: InfluenceSetup, scores: pd.DataFrame, losses: pd.Series, say: Callable[[str], None]
) -> pd.DataFrame:
    """The ranked pairs with `beyond_loss`, where the scores predict changes of a loss that is never negative.
    losses: of the queries, by their row.
    """
    if setup.measurement.name != "loss" or setup.measurement.criterion.name not in _NEVER_NEGATIVE:
        return scores
    known = pd.concat([losses, pd.Series({ALL_INDEX: losses.mean()})])
    limit = scores["query_index"].map(known).to_numpy(float)
    beyond = scores["score"].to_numpy(float) < -limit * (1 + 1e-6)
    if beyond.any():
        say(
            f"{int(beyond.sum()):,} of {len(scores):,} ranked scores predict that a query's loss falls by"
            " more than it is, and no loss of this kind is below zero: they are marked, and rank, but are no"
            " amounts"
        )
    return scores.assign(beyond_loss=beyond)
