"""Parts of the result of `psgrad influence` about several rows at once: groups and contrasts."""

from __future__ import annotations

from dataclasses import dataclass, field

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
