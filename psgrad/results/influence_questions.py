"""What `psgrad influence` says of several rows at once: groups of training examples, what distinguishes two
queries, and queries that depend on the same training examples.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pandas as pd

GROUP_COLUMNS = ("query_id", "query_index", "rank", "group", "rows", "score")
CONTRAST_COLUMNS = (
    *("first", "second", "rank", "train_id", "train_index"),
    *("score", "score_first", "score_second"),
)
CLUSTER_COLUMNS = ("cluster", "queries", "rank", "train_id", "train_index", "share", "score", "same_sign")
SUMMARY_COLUMNS = ("query_class", "by", "of", "rows", "score")


@dataclass(frozen=True)
class QuestionTables:
    """The answers as tables; one that was not asked for is empty.

    Attributes:
        groups: GROUP_COLUMNS. For all queries together every group, and for each query its strongest: rank 1
            is the group that helps most, -1 the one that hurts most. `score` is the sum over its `rows`.
        contrasts: CONTRAST_COLUMNS. `score` is the score for the first query minus that for the second.
        clusters: CLUSTER_COLUMNS. The training examples that the queries of a cluster have in common.
            `share`: the mean over its queries of the score divided by the root of the query's sum of squares;
            `score`: the mean of the scores; `same_sign`: the share of its queries whose score has this sign.
        of_query: [m] the cluster of each row of the table of queries, from 0; empty without clusters.
        inside, between: the mean cosine of the scores of two queries of one cluster, and of two clusters.
        summary: SUMMARY_COLUMNS. The mean score of a training example of a class, or of a group (`by`), for a
            query of a class; `rows` are the training examples.
    """

    groups: pd.DataFrame = field(default_factory=pd.DataFrame)
    contrasts: pd.DataFrame = field(default_factory=pd.DataFrame)
    clusters: pd.DataFrame = field(default_factory=pd.DataFrame)
    of_query: list[int] = field(default_factory=list)
    inside: float = float("nan")
    between: float = float("nan")
    summary: pd.DataFrame = field(default_factory=pd.DataFrame)

    def files(self) -> dict[str, pd.DataFrame]:
        """The tables that there are, by the names of their files."""
        tables = {"groups": self.groups, "contrasts": self.contrasts, "clusters": self.clusters}
        return {f"{name}.parquet": found for name, found in tables.items() if len(found)}
