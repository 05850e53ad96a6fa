"""The scores of an influence run: training examples stream past, and each query keeps its strongest; and the
answers about several rows at once, groups of training examples and contrasts of two queries, from all scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch

from psgrad.commands.influence_setup import InfluenceSetup, is_on_one_scale
from psgrad.engine.free_memory import free_host_memory
from psgrad.engine.influence.method import Fitted
from psgrad.engine.influence.ranking import (
    CheckpointAgreement,
    JoinedBlock,
    Strongest,
    joined_scores,
    over_queries,
    summed_over_groups,
)
from psgrad.errors import InfluenceError
from psgrad.reports.words import amount
from psgrad.run.results import Progress, ShowProgress
from psgrad.run.results.influence import ALL_INDEX, ALL_QUERIES, ranked_pairs
from psgrad.run.results.influence_details import CONTRAST_COLUMNS, GROUP_COLUMNS, QuestionTables

Array = np.ndarray[Any, Any]

# The share of the free memory for the prepared gradients of a block of queries.
_SHARE = 0.25
# At most this number of copies of all scores, in float64, exist at once: while blocks are joined, and while
# queries are compared.
_COPIES = 4


@dataclass(frozen=True)
class Scores:
    """What is kept of the scores.

    pairs: the ranked pairs of each query and of all together, with SCORE_COLUMNS. overall: [n], the mean
    over the queries that have a score. shown: query row -> all scores, [rows of the training data], NaN where
    a row was excluded. matrix: where all scores were to be kept, scores [n, m], train_index [n] and
    query_index [m]. agreement: [m], of several checkpoints, see `CheckpointAgreement`; empty of one.
    """

    pairs: pd.DataFrame
    overall: Array
    shown: dict[int, Array]
    matrix: dict[str, Array] | None
    agreement: Array


def require_memory(setup: InfluenceSetup, matrix: bool) -> None:
    """Raises InfluenceError where all scores are to be kept and do not fit in memory. matrix: whether they
    are to become a file.
    """
    n, m = len(setup.training_rows), len(setup.query_rows)
    needs = {
        "influence.groups": setup.groups is not None,
        "influence.contrast": bool(setup.contrasts),
        "--matrix": matrix,
    }
    reasons = [name for name, needed in needs.items() if needed]
    each, free = _COPIES * 8 * n, free_host_memory()
    if not reasons or each * m <= free:
        return
    raise InfluenceError(
        f"all {n:,} x {m:,} scores take {amount(each * m)} of memory, and {amount(free)} are free",
        hint=(
            f"{', '.join(reasons)} need them all at once; leave that out, or ask about"
            f" {max(1, free // each):,} of the queries (influence.queries.rows, worst)"
        ),
    )


def rank(
    setup: InfluenceSetup,
    fitted: Sequence[Fitted],
    divisors: Sequence[torch.Tensor] | None,
    shown: Sequence[int],
    matrix: bool,
    progress: ShowProgress,
) -> Scores:
    """Score all training examples for all queries, some queries at a time where their gradients would not fit
    in memory.

    shown: of these queries, named by their rows, all scores are kept; with `matrix` of all.
    """
    n, m, size = len(setup.training_rows), len(setup.query_rows), queries_at_once(setup)
    kept = np.ones(m, bool) if matrix else np.isin(setup.query_rows, shown)
    blocks = []
    for first in range(0, m, size):
        here = slice(first, min(first + size, m))
        asked = [view.queries for view in setup.with_queries(setup.query_rows[here]).views]
        block = _QueryBlock(setup.config.influence.top, kept[here])
        for joined in joined_scores(setup.method, fitted, asked, divisors=divisors):
            block.add(joined)
            progress(Progress(joined.stop, n, "scores", unit="training example"))
        blocks.append(block)
    ids, rows = setup.query_reader.samples.ids[setup.query_rows], setup.query_rows
    pairs, place = [], 0
    for block in blocks:
        here = slice(place, place := place + block.m)
        pairs.append(_pairs(setup, block.strongest, ids[here], rows[here]))
    whole, overall = _of_all_queries(setup, torch.stack([torch.cat(each.sums, 1) for each in blocks]).sum(0))
    columns = torch.cat([torch.cat(block.columns) for block in blocks], 1).numpy()
    by_row = dict(zip(rows[kept].tolist(), columns.T, strict=True))
    agreement = [block.agreement.correlation() for block in blocks] if len(setup.views) > 1 else []
    return Scores(
        pd.concat([*pairs, whole], ignore_index=True),
        overall,
        {row: of_all(setup, column) for row, column in by_row.items() if row in shown},
        {"scores": columns, "train_index": setup.training_rows, "query_index": rows} if matrix else None,
        torch.cat(agreement).numpy() if agreement else np.empty(0),
    )


def queries_at_once(setup: InfluenceSetup) -> int:
    """How many queries' gradients may be held for all checkpoints: each in float64, and once more while it is
    made. Where checkpoints are put on one scale, so are all of their scores.
    """
    training, memory = setup.views[0].training, setup.config.engine.memory
    room = training.free_bytes() * _SHARE if memory == "auto" else memory
    numbers = training.flat.size + (len(setup.training_rows) if is_on_one_scale(setup) else 0)
    return max(1, int(room / (2 * 8 * numbers * len(setup.views))))


class _QueryBlock:
    """What is kept of the scores of m queries while the training examples stream past.

    strongest: of all checkpoints together, then of each, where there are several. columns: the scores of the
    queries that are `kept` [m], part by part. sums: parts of [2, n, 1 + checkpoints], of all checkpoints
    together and of each, see `over_queries`.
    """

    def __init__(self, top: int, kept: Array) -> None:
        self.top, self.kept, self.m = top, torch.from_numpy(kept), len(kept)
        self.strongest: list[Strongest] = []
        self.columns: list[torch.Tensor] = []
        self.sums: list[torch.Tensor] = []
        self.agreement = CheckpointAgreement()

    def add(self, block: JoinedBlock) -> None:
        scores, single = block.scores, [*block.single] if len(block.single) > 1 else []
        if not self.strongest:
            self.strongest = [Strongest(self.top, self.m) for _ in range(1 + len(single))]
        if single:
            self.agreement.add(single)
        self.strongest[0].add(block.start, scores, **({"score_std": block.spread} if single else {}))
        for strongest, own in zip(self.strongest[1:], single, strict=True):
            strongest.add(block.start, own)
        self.sums.append(over_queries(torch.stack([scores, *single], 2).double()))
        self.columns.append(scores[:, self.kept])


def _of_all_queries(setup: InfluenceSetup, sums: torch.Tensor) -> tuple[pd.DataFrame, Array]:
    """(the ranked pairs of all queries together, by the mean of their scores; that mean [n])."""
    means = sums[0] / sums[1]  # NaN for an example without a score
    top, several = setup.config.influence.top, means.shape[1] > 1
    whole = [Strongest(top, 1)]
    whole[0].add(0, means[:, :1], **({"score_std": means[:, 1:].std(1, keepdim=True)} if several else {}))
    whole += [_strongest(own.unsqueeze(1), top) for own in means[:, 1:].unbind(1)]
    return _pairs(setup, whole, [ALL_QUERIES], [ALL_INDEX]), means[:, 0].numpy()


def _strongest(scores: torch.Tensor, count: int) -> Strongest:
    found = Strongest(count, scores.shape[1])
    found.add(0, scores)
    return found


def _pairs(
    setup: InfluenceSetup, kept: list[Strongest], ids: Sequence[str] | Array, rows: Sequence[int] | Array
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
    return ranked_pairs(
        ids,
        rows,
        setup.common.samples.ids,
        whole.values.numpy(),
        np.where(places >= 0, setup.training_rows[places], -1),
        {name: value.numpy() for name, value in more.items()},
    )


def of_all(setup: InfluenceSetup, values: Array) -> Array:
    """[rows of the training data]: the values of those that are ranked, and NaN of the others."""
    column = np.full(len(setup.common.samples), np.nan)
    column[setup.training_rows] = values
    return column


# -- questions about several rows ----------------------------------------------------------------------------


def answered(setup: InfluenceSetup, scores: Array, say: Callable[[str], None]) -> QuestionTables:
    """All that the config asks of the scores [n, m] of the rows that have some."""
    ids, top = setup.query_reader.samples.ids, setup.config.influence.top
    contrasts, groups = [], pd.DataFrame()
    for pair in setup.contrasts:
        places = [np.flatnonzero(setup.query_rows == row) for row in pair]
        if all(map(len, places)):
            both = scores[:, [int(place[0]) for place in places]]
            contrasts.append(_contrast_table(setup, both, ids[list(pair)]))
        else:
            say(f"influence.contrast: {ids[pair[0]]} and {ids[pair[1]]} do not both have scores")
    if setup.groups is not None:
        own = setup.groups[setup.training_rows]
        groups = group_table(scores, own, ids[setup.query_rows], setup.query_rows, top)
    return QuestionTables(groups, pd.concat(contrasts, ignore_index=True) if contrasts else pd.DataFrame())


def group_table(scores: Array, groups: Array, query_ids: Array, query_rows: Array, top: int) -> pd.DataFrame:
    """See QuestionTables.groups. scores: [n, m]; groups: [n], of the rows."""
    names, codes, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    whole = torch.from_numpy(np.ascontiguousarray(scores))
    sums = summed_over_groups(whole, torch.from_numpy(codes.reshape(-1)), len(names))
    value, count = over_queries(sums.unsqueeze(2))[:, :, 0]
    every, each = _strongest((value / count).unsqueeze(1), len(names)), _strongest(sums, top)
    tables = [
        ranked_pairs([ALL_QUERIES], [ALL_INDEX], names, every.values.numpy(), every.rows.numpy()),
        ranked_pairs(query_ids, query_rows, names, each.values.numpy(), each.rows.numpy()),
    ]
    found = pd.concat(tables, ignore_index=True).rename(columns={"train_id": "group"})
    return found.assign(rows=sizes[found["train_index"]])[list(GROUP_COLUMNS)]


def _contrast_table(setup: InfluenceSetup, both: Array, query_ids: Array) -> pd.DataFrame:
    """See QuestionTables.contrasts. both: [n, 2], the scores for the first query and for the second."""
    rows = setup.training_rows
    strongest = _strongest(torch.from_numpy(both[:, :1] - both[:, 1:]), setup.config.influence.top)
    ids = setup.common.samples.ids[rows]
    pairs = ranked_pairs(["-"], [0], ids, strongest.values.numpy(), strongest.rows.numpy())
    places = pairs["train_index"].to_numpy()
    return pairs.assign(
        first=str(query_ids[0]),
        second=str(query_ids[1]),
        score_first=both[places, 0],
        score_second=both[places, 1],
        train_index=rows[places],
    )[list(CONTRAST_COLUMNS)]


# -- scores that are no amounts ------------------------------------------------------------------------------

# Losses that are never negative, by name.
_NEVER_NEGATIVE = (
    *("cross_entropy", "token_cross_entropy", "bce_with_logits"),
    *("mse", "l1", "huber"),
)


def marked_beyond_loss(
    setup: InfluenceSetup, pairs: pd.DataFrame, losses: pd.Series, say: Callable[[str], None]
) -> pd.DataFrame:
    """The ranked pairs with `beyond_loss`, where the scores predict changes of a loss that is never negative.
    losses: of the queries, by their row.
    """
    if setup.measurement.name != "loss" or setup.measurement.criterion.name not in _NEVER_NEGATIVE:
        return pairs
    known = pd.concat([losses, pd.Series({ALL_INDEX: losses.mean()})])
    limit = pairs["query_index"].map(known).to_numpy(float)
    beyond = pairs["score"].to_numpy(float) < -limit * (1 + 1e-6)
    if beyond.any():
        say(
            f"{int(beyond.sum()):,} of {len(pairs):,} ranked scores predict that a query's loss falls by"
            " more than it is, and no loss of this kind is below zero: they are marked, and rank, but are no"
            " amounts"
        )
    return pairs.assign(beyond_loss=beyond)
