"""The strongest of scores that pass by in blocks are those of the whole matrix, sorted."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from psgrad.engine.influence.method import ScoreBlock, SelfBlock
from psgrad.engine.influence.methods.gradient_products import GradientDot, TracIn
from psgrad.engine.influence.ranking import Strongest, aligned, divisor


def sorted_in_full(scores: np.ndarray, k: int, sign: int) -> list[list[tuple[int, float]]]:
    """Of each column the (row, score) of one sign, strongest first, the earlier of equal ones first."""
    result = []
    for column in scores.T:
        rows = [row for row in range(len(column)) if np.isfinite(column[row]) and sign * column[row] > 0]
        result.append([(row, column[row]) for row in sorted(rows, key=lambda row: -sign * column[row])][:k])
    return result


@given(
    st.integers(1, 30),
    st.integers(1, 4),
    st.integers(1, 8),
    st.integers(1, 12),
    st.integers(0, 2**32 - 1),
    st.sampled_from([2, 5, 1000]),
)
def test_ranking_in_blocks(n: int, m: int, k: int, size: int, seed: int, distinct: int) -> None:
    random = np.random.default_rng(seed)
    scores = random.integers(-distinct, distinct + 1, (n, m)).astype(np.float64)  # few distinct values: ties
    scores[random.random((n, m)) < 0.1] = np.nan
    strongest = Strongest(k, m)
    for start in range(0, n, size):
        part = torch.from_numpy(scores[start : start + size])
        strongest.add(start, part, double=2 * part)
    for side, sign in ((0, 1), (1, -1)):
        for query, expected in enumerate(sorted_in_full(scores, k, sign)):
            rows, values = strongest.rows[side, :, query].tolist(), strongest.values[side, :, query].tolist()
            there = [(row, value) for row, value in zip(rows, values, strict=True) if row >= 0]
            assert there == expected
            assert rows[len(there) :] == [-1] * (len(rows) - len(there))
            assert strongest.extras["double"][side, : len(there), query].tolist() == [
                2 * value for _, value in expected
            ]


def blocks_of(scores: torch.Tensor, sizes: list[int]) -> list[ScoreBlock]:
    starts = np.cumsum([0, *sizes])
    return [
        ScoreBlock(a, b, scores[a:b], scores[a:b, 0])
        for a, b in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)
    ]


def test_ranking_streams_with_different_chunks() -> None:
    first, second = torch.randn(10, 2), torch.randn(10, 2)
    joined = list(aligned([iter(blocks_of(first, [3, 7])), iter(blocks_of(second, [4, 4, 2]))]))
    assert [(pair[0].start, pair[0].stop, pair[1].start, pair[1].stop) for pair in joined] == [
        (0, 3, 0, 3),
        (3, 4, 3, 4),
        (4, 8, 4, 8),
        (8, 10, 8, 10),
    ]
    for place, whole in enumerate((first, second)):
        assert torch.equal(torch.cat([pair[place].scores for pair in joined]), whole)
        assert torch.equal(torch.cat([pair[place].weights for pair in joined]), whole[:, 0])


def test_ranking_over_checkpoints() -> None:
    scores = [torch.randn(5, 3, dtype=torch.float64) for _ in range(3)]
    blocks = [ScoreBlock(0, 5, each) for each in scores]
    assert torch.allclose(GradientDot().across(blocks), sum(scores) / 3)
    assert torch.allclose(TracIn().across(blocks), sum(scores))


def test_ranking_averages_matrix_and_weights() -> None:
    scores, weights = torch.randn(2, 5, 3, dtype=torch.float64), torch.rand(2, 5, dtype=torch.float64)
    blocks = [ScoreBlock(0, 5, s, w) for s, w in zip(scores, weights, strict=True)]
    assert torch.allclose(GradientDot().across(blocks), scores.mean(0) * weights.mean(0).unsqueeze(1))


@pytest.mark.parametrize(
    ("normalize", "expected"), [("self_influence", [2.0, float("nan")]), ("preconditioned_norm", [3.0, 5.0])]
)
def test_ranking_relative_influence(normalize: str, expected: list[float]) -> None:
    block = SelfBlock(0, 2, torch.tensor([4.0, -1.0]).double(), torch.tensor([3.0, 5.0]).double())
    assert torch.allclose(divisor(iter([block]), normalize), torch.tensor(expected).double(), equal_nan=True)
