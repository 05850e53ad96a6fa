"""Scores of the rows that an approximate search has found: exact ones, of these rows alone; and the share of
the strongest rows that it has found.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch

from psgrad.engine.execution.examples import Examples
from psgrad.engine.influence.index.estimators import FittedRows
from psgrad.engine.influence.index.index_rows import RowSource
from psgrad.engine.influence.index.stored_index import ChosenRows, StoredRows
from psgrad.engine.influence.method import Fitted, Per, ScoreBlock, SelfBlock
from psgrad.engine.influence.ranking import Strongest


class Lists(Protocol):
    """What finds rows: psgrad.run.row_lists.RowLists."""

    def search(self, vectors: np.ndarray, most: int, probes: int) -> np.ndarray: ...


def found_rows(
    lists: Lists, whole: FittedRows, projected: torch.Tensor, most: int, probes: int
) -> np.ndarray:
    """[c], rising: the rows that are found for any of the projected queries [m, k]; for each up to `most` of
    either sign.
    """
    vectors = whole.query_vectors(projected).float().numpy()
    places = np.concatenate([lists.search(sign * vectors, most, probes) for sign in (1, -1)])
    return np.unique(places[places >= 0])


class FoundRows(Fitted):
    """A method on rows, of some rows of an index alone, for queries that are projected already.

    found: [c], rising; they are counted from 0 in blocks.
    """

    def __init__(self, whole: FittedRows, projected: torch.Tensor, found: np.ndarray) -> None:
        assert isinstance(whole.source, StoredRows)
        self.whole, self.projected, self.rows = whole, projected, ChosenRows(whole.source, found)
        self.facts, self.has_self_influence = whole.facts, whole.has_self_influence

    def scores(self, queries: Examples, per: Per = "total") -> Iterator[ScoreBlock]:
        assert len(queries) == len(self.projected), "the queries that were projected"
        return self.whole.scores_of(self.projected, per, rows=self.rows)

    def self_influence(self) -> Iterator[SelfBlock]:
        return self.whole.self_influence()  # of all rows


def vectors_of(whole: FittedRows, rows: RowSource) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(numbers [b], vectors [b, k] float32) of those rows that have a score, block by block. The longest
    vector has a length of about 1, so that 16 bits have a number for each that matters.
    """
    longest = whole.longest()
    for block in rows.blocks():
        places = block.finite.nonzero().flatten()
        vectors = (whole.row_vectors(block)[places] / longest).float().numpy()
        yield (block.start + places).numpy(), vectors


def strongest_rows(whole: FittedRows, projected: torch.Tensor, top: int) -> list[set[int]]:
    """For each projected query [m, k] the rows with its `top` scores of either sign, among all rows."""
    kept = Strongest(top, len(projected))
    for block in whole.scores_of(projected):
        scores = block.scores[""]
        if block.weights is not None:
            scores = scores * block.weights.unsqueeze(1)
        kept.add(block.start, scores)
    rows = kept.rows.flatten(0, 1)
    return [set(column[column >= 0].tolist()) for column in rows.t()]


def recalls(strongest: list[set[int]], found: np.ndarray) -> list[float]:
    """For each query the share of its strongest rows that were found; 1 where it has none.

    Found rows are ranked by their exact scores, so that those among the strongest rank as they do there.
    """
    known = set(found.tolist())
    return [len(rows & known) / len(rows) if rows else 1.0 for rows in strongest]
