"""From fitted methods to ranked pairs: training examples stream past, and each query keeps its strongest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
import torch

from psgrad.engine.gradients.loading import Read
from psgrad.engine.gradients.memory import free_memory
from psgrad.engine.influence.method import Fitted, with_total
from psgrad.engine.influence.ranking import Strongest
from psgrad.engine.influence.scoring import JoinedBlock, joined_scores
from psgrad.results import Progress
from psgrad.results.influence import ALL_INDEX, ALL_QUERIES, ranked_pairs
from psgrad.workflows.influence_setup import InfluenceSetup

# What the prepared gradients of a block of queries may take, as a share of the memory that is free.
_SHARE = 0.25


@dataclass(frozen=True)
class Rankings:
    """What is kept of the scores.

    scores: ranked pairs, with SCORE_COLUMNS. overall: [n], the mean over the queries that have a score. shown: query row -> all scores,
    [rows of the training data], NaN where a row was excluded. matrix: where it was wanted, scores [n, m], train_index [n] and
    query_index [m].
    """

    scores: pd.DataFrame
    overall: np.ndarray
    shown: dict[int, np.ndarray]
    matrix: dict[str, np.ndarray] | None


def rank(
    setup: InfluenceSetup,
    fitted: Sequence[Fitted],
    divisors: Sequence[torch.Tensor] | None,
    shown: Sequence[int],
    matrix: bool,
    progress: Callable[[Progress], None],
) -> Rankings:
    """Score all training examples for all queries, some queries at a time where their gradients would not fit in memory.

    shown: of these queries, named by their rows, all scores are kept.
    """
    wanted, n, m = setup.run.config.influence, len(setup.training_rows), len(setup.query_rows)
    size = queries_at_once(setup)
    blocks = []
    kept = range(m) if matrix else np.flatnonzero(np.isin(setup.query_rows, shown)).tolist()
    for first in range(0, m, size):
        places = range(first, min(first + size, m))
        asked = [replace(moment.queries, read=_some(moment.queries.read, first), count=len(places)) for moment in setup.moments]
        block = _Block(wanted.top, [place - first for place in kept if place in places])
        for joined in joined_scores(setup.method, fitted, asked, "total" if wanted.layers == "none" else wanted.layers, divisors):
            totals = tuple(map(with_total, joined.single))
            block.add(replace(joined, scores=with_total(joined.scores), single=totals))
            progress(Progress(joined.stop, n, "scores", unit="training example"))
        blocks.append(block)
    return _assembled(setup, blocks, shown, matrix)


def queries_at_once(setup: InfluenceSetup) -> int:
    """How many queries' gradients may be held for all checkpoints: each in float64, and once more while it is made."""
    training, budget = setup.moments[0].training, setup.run.config.engine.memory
    room = free_memory(training.device) * _SHARE if budget == "auto" else budget
    return max(1, int(room / (2 * 8 * training.flat.size * len(setup.moments))))


def _some(read: Read, first: int) -> Read:
    return lambda start, stop: read(first + start, first + stop)


class _Block:
    """What is kept of the scores of m queries while the training examples stream past.

    strongest: label -> of all checkpoints together, then of each. columns: the scores of the queries at the places `wanted`, part by part.
    sums: label -> parts of [2, n, 1 + checkpoints], of all checkpoints together and of each: the sum over these queries of the scores that
    are not NaN, and how many are not.
    """

    def __init__(self, top: int, wanted: list[int]) -> None:
        self.top, self.wanted, self.m = top, wanted, 0
        self.strongest: dict[str, list[Strongest]] = {}
        self.columns: list[torch.Tensor] = []
        self.sums: dict[str, list[torch.Tensor]] = {}

    def add(self, block: JoinedBlock) -> None:
        for label, scores in block.scores.items():
            self.m = scores.shape[1]
            single = [each[label] for each in block.single] if len(block.single) > 1 else []
            kept = self.strongest.setdefault(label, [Strongest(self.top, self.m) for _ in range(1 + len(single))])
            kept[0].add(block.start, scores, **({"score_std": block.spread(label)} if single else {}))
            for strongest, own in zip(kept[1:], single, strict=True):
                strongest.add(block.start, own)
            whole = torch.stack([scores, *single], 2).double()
            self.sums.setdefault(label, []).append(torch.stack([whole.nansum(1), (~whole.isnan()).sum(1)]))
        self.columns.append(next(iter(block.scores.values()))[:, self.wanted])


def _assembled(setup: InfluenceSetup, blocks: list[_Block], shown: Sequence[int], matrix: bool) -> Rankings:
    ids, rows = setup.run.samples.ids, setup.training_rows
    query_ids = setup.query_reader.samples.ids[setup.query_rows]
    labels, named = list(blocks[0].strongest), setup.run.config.influence.layers != "none"
    parts, overall = [], np.zeros(len(rows))
    for label in labels:
        place = 0
        for block in blocks:
            here = slice(place, place + block.m)
            parts.append(_pairs(block.strongest[label], query_ids[here], setup.query_rows[here], ids, rows, label if named else None))
            place += block.m
        sums, counts = torch.stack([torch.cat(block.sums[label], 1) for block in blocks]).sum(0)
        means = sums / counts  # NaN for an example without a score
        whole = [Strongest(blocks[0].top, 1) for _ in range(means.shape[1])]
        whole[0].add(0, means[:, :1], **({"score_std": means[:, 1:].std(1, keepdim=True)} if len(whole) > 1 else {}))
        for number, each in enumerate(whole[1:], 1):
            each.add(0, means[:, number : number + 1])
        parts.append(_pairs(whole, [ALL_QUERIES], [ALL_INDEX], ids, rows, label if named else None))
        if label == labels[0]:
            overall = means[:, 0].numpy()
    columns = torch.cat([torch.cat(block.columns) for block in blocks], 1).numpy()
    of = setup.query_rows if matrix else setup.query_rows[np.isin(setup.query_rows, shown)]
    first = {row: _spread(setup, column) for row, column in zip(of.tolist(), columns.T, strict=True) if row in shown}
    everything = {"scores": columns, "train_index": rows, "query_index": setup.query_rows} if matrix else None
    return Rankings(pd.concat(parts, ignore_index=True), overall, first, everything)


def _spread(setup: InfluenceSetup, values: np.ndarray) -> np.ndarray:
    """One number for every row of the training data, NaN for those that were excluded."""
    column = np.full(len(setup.run.samples), np.nan)
    column[setup.training_rows] = values
    return column


def _pairs(
    kept: list[Strongest],
    query_ids: Sequence[str] | np.ndarray,
    query_rows: Sequence[int] | np.ndarray,
    ids: np.ndarray,
    rows: np.ndarray,
    layer: str | None,
) -> pd.DataFrame:
    """The rows of the table for some queries. kept: of all checkpoints together, then of each, where there are several."""
    whole, single = kept[0], kept[1:]
    more = dict(whole.extras)
    if single:
        there = torch.stack([(whole.rows.unsqueeze(2) == each.rows.unsqueeze(1)).any(2) for each in single])
        more["rank_stability"] = there.double().mean(0)
    places = whole.rows.numpy()
    extras = {name: value.numpy() for name, value in more.items()}
    return ranked_pairs(query_ids, query_rows, ids, whole.values.numpy(), np.where(places >= 0, rows[places], -1), extras, layer)
