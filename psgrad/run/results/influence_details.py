"""Parts of the result of `psgrad influence`: answers about several rows at once, and scores of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

GROUP_COLUMNS = ("query_id", "query_index", "rank", "group", "rows", "score")
CONTRAST_COLUMNS = (
    *("first", "second", "rank", "train_id", "train_index"),
    *("score", "score_first", "score_second"),
)


@dataclass(frozen=True)
class QuestionTables:
    """The answers as tables; one that was not asked for is empty.

    Attributes:
        groups: GROUP_COLUMNS. For all queries together every group, and for each query its strongest: rank 1
            is the group that helps most, -1 the one that hurts most. `score` is the sum over its `rows`.
        contrasts: CONTRAST_COLUMNS. `score` is the score for the first query minus that for the second.
    """

    groups: pd.DataFrame = field(default_factory=pd.DataFrame)
    contrasts: pd.DataFrame = field(default_factory=pd.DataFrame)

    def files(self) -> dict[str, pd.DataFrame]:
        """The tables that there are, by the names of their files."""
        tables = {"groups": self.groups, "contrasts": self.contrasts}
        return {f"{name}.parquet": found for name, found in tables.items() if len(found)}


Array = np.ndarray[Any, Any]

TOKEN_COLUMNS = (
    *("query_id", "query_index", "train_id", "train_index"),
    *("query_token", "train_token", "query_text", "train_text", "score"),
)


@dataclass(frozen=True)
class TokenText:
    """The tokens of one sample.

    ids: [t]. places: [k], which of them have a loss of their own. pieces: [t] the text of each; empty where
    the dataset knows none, or inputs are not to be shown.
    """

    ids: Array
    places: Array
    pieces: Sequence[str] = ()

    def texts(self) -> list[str]:
        """[k]: the text of the tokens that have a loss."""
        return [self.pieces[place] if len(self.pieces) else "" for place in self.places]

    def spread(self, values: Array) -> Array:
        """[t]: values [k] at their tokens, 0 elsewhere."""
        found = np.zeros(len(self.ids))
        found[self.places] = values
        return found


@dataclass(frozen=True)
class TokenPair:
    """A query and a training example, token by token. scores: [k, l], of the query's tokens that were asked
    about, and of the training example's; over all of the query's tokens they add up to the score of the two.
    """

    query_id: str
    query_index: int
    train_id: str
    train_index: int
    query: TokenText
    train: TokenText
    scores: Array

    def table(self) -> pd.DataFrame:
        """TOKEN_COLUMNS; a row a pair of tokens, the strongest first."""
        rows, columns = np.indices(self.scores.shape).reshape(2, -1)
        found = pd.DataFrame(
            {
                "query_token": self.query.places[rows],
                "train_token": self.train.places[columns],
                "query_text": np.array(self.query.texts(), dtype=object)[rows],
                "train_text": np.array(self.train.texts(), dtype=object)[columns],
                "score": self.scores[rows, columns],
            }
        ).assign(
            query_id=self.query_id,
            query_index=self.query_index,
            train_id=self.train_id,
            train_index=self.train_index,
        )
        order = found["score"].abs().sort_values(ascending=False, kind="stable").index
        return found.loc[order, list(TOKEN_COLUMNS)]
