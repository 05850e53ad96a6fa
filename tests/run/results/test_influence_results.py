"""The tables of an influence run: which rows have which ranks, and how many examples carry how much."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from hypothesis import given
from hypothesis import strategies as st

from psgrad.run.results.influence import (
    ALL_INDEX,
    SCORE_COLUMNS,
    pairs_of,
    ranked_pairs,
    shown_queries,
    shown_rows,
)
from tests.reports.influence_runs import strongest

NAN = float("nan")


def _pairs(scores: list[list[float]], k: int, **options: Any) -> pd.DataFrame:
    array = np.array(scores, dtype=float)
    m, n = array.shape
    return ranked_pairs(
        [f"q{i}" for i in range(m)],
        range(10, 10 + m),
        np.array([f"t{i}" for i in range(n)]),
        *strongest(array, k),
        **options,
    )


@given(
    st.lists(
        st.lists(st.sampled_from([-2.0, -1.0, 0.0, 1.0, 2.0, NAN]), min_size=5, max_size=5),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 7),
)
def test_ranked_pairs_equal_a_sort(scores: list[list[float]], k: int) -> None:
    result = _pairs(scores, k)
    expected = []
    for query, row in enumerate(scores):
        helps = sorted((-score, place) for place, score in enumerate(row) if score > 0)[:k]
        hurts = sorted((score, place) for place, score in enumerate(row) if score < 0)[:k]
        expected += [(10 + query, rank, place, -score) for rank, (score, place) in enumerate(helps, 1)]
        expected += [(10 + query, -rank, place, score) for rank, (score, place) in enumerate(hurts, 1)]
    assert (
        list(result[["query_index", "rank", "train_index", "score"]].itertuples(index=False, name=None))
        == expected
    )
    assert list(result["query_id"]) == [f"q{query - 10}" for query, *_ in expected]
    assert list(result["train_id"]) == [f"t{place}" for _, _, place, _ in expected]


def test_ranked_pairs_extras_and_column_order() -> None:
    values, rows = strongest(np.array([[3.0, -1.0, 2.0]]), 2)
    spread = np.where(rows >= 0, rows / 10, NAN)
    result = ranked_pairs(["q"], [0], np.array([7, 8, 9]), values, rows, {"score_std": spread})
    assert list(result) == [
        column for column in SCORE_COLUMNS if column not in ("rank_stability", "beyond_loss")
    ]
    assert result["score_std"].tolist() == [0.0, 0.2, 0.1]
    assert result["train_id"].tolist() == [7, 9, 8]


def test_ranked_pairs_query_ids_are_text() -> None:
    values, rows = strongest(np.array([[1.0]]), 1)
    assert ranked_pairs([12], [0], np.array([3]), values, rows)["query_id"].tolist() == ["12"]


def test_pairs_of_query() -> None:
    helps, hurts = pairs_of(_pairs([[1.0, -2.0, 3.0]], 2), 10, 1)
    assert helps["train_index"].tolist() == [2]
    assert hurts["score"].tolist() == [-2.0]


def test_shown_queries_order() -> None:
    queries = pd.DataFrame(
        {
            "index": [10, 11, 12, 13, 14],
            "status": ["ok", "nonfinite", "ok", "ok", "ok"],
            "target": [1, 1, 2, 0, 2],
            "prediction": [1, 0, 1, 0, 0],
            "confidence": 0.9,
            "measurement": [0.1, 9.0, 2.0, 2.5, 3.0],
        }
    )
    scores = pd.concat(
        [
            _pairs([[1.0, 0.0, 0.0, -1.0, 0.0], [5.0] * 5, [0.0, 2.0, 1.0, 0.0, 0.0]], 1),
            _pairs([[0.0, 0.0, 0.0, 0.0, 7.0]], 1).assign(query_index=ALL_INDEX),
        ]
    )
    assert shown_queries(queries, 9) == [14, 12, 13, 10]
    assert shown_queries(queries, 9, larger_is_worse=False) == [
        12,
        14,
        10,
        13,
    ]  # of a margin the smallest is the worst
    assert shown_queries(queries.drop(columns="prediction"), 9) == [14, 13, 12, 10]
    chosen = queries[queries["index"].isin([10, 12])]
    assert shown_rows(scores, chosen, 2, 1) == ([12, 10], [0, 1, 3, 4])
    assert shown_rows(scores, chosen, 1, 1) == ([12], [1, 4])
