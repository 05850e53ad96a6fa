"""Distances between gradients beside all of them by brute force."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from psgrad.engine.measures.builtin.projected_gradients import GradientProjection, NeighbourDistance
from psgrad.engine.measures.measure import Gathered
from tests.engine.measures.own_passes import measured, setting_of

pytestmark = pytest.mark.usefixtures("on_device")

MOST = 5  # columns: no more than parameters, so that nothing is projected


def found_of(
    rows: Tensor,
    options: dict[str, Any] | None = None,
    dimension: int = MOST,
    chunk_size: int = 7,
    **facts: Any,
) -> Gathered:
    """What is found among samples whose gradients are these [n, p]."""
    model = nn.Linear(rows.shape[1], 1, bias=False).to(rows.dtype)
    setting = setting_of(model, lambda output, target: output.sum(), (rows,), None, **facts)
    measures = [GradientProjection(dimension=dimension), NeighbourDistance(**(options or {}))]
    return measured(measures, setting, chunk_size)[1]["neighbour_distance"]


def all_distances(rows: np.ndarray, by_angle: bool) -> np.ndarray:
    """[n, n], infinite where there is none, and from each to itself."""
    table = np.full((len(rows), len(rows)), np.inf)
    for i, one in enumerate(rows):
        for j, other in enumerate(rows):
            if i == j or not np.isfinite([one, other]).all():
                continue
            if not by_angle:
                table[i, j] = math.dist(one, other)
            elif one.any() and other.any():
                table[i, j] = 1 - one @ other / math.sqrt((one @ one) * (other @ other))
    return table


def mean_of_nearest(table: np.ndarray, count: int) -> np.ndarray:
    nearest = [sorted(row[np.isfinite(row)])[:count] for row in table]
    return np.array([np.mean(row) if row else np.nan for row in nearest])


@pytest.mark.long
@given(
    n=st.integers(1, 25),
    p=st.integers(2, MOST),
    count=st.integers(1, 30),
    chunk_size=st.integers(1, 25),
    seed=st.integers(0, 50),
)
@settings(max_examples=30)
def test_neighbour_distance_equals_all_distances(
    n: int, p: int, count: int, chunk_size: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    rows = random.normal(size=(n, p))
    rows[random.random(n) < 0.1] = 0
    rows[random.random(n) < 0.1] = np.nan
    result = found_of(torch.from_numpy(rows), {"neighbours": count, "save": True}, chunk_size=chunk_size)
    for by_angle, column, who in (
        (False, "neighbour_distance", "neighbours"),
        (True, "neighbour_angle_distance", "neighbours_by_angle"),
    ):
        table = all_distances(rows, by_angle)
        np.testing.assert_allclose(
            result.columns[column], mean_of_nearest(table, count), rtol=1e-9, atol=1e-12
        )
        for row, near in enumerate(result.arrays[who].tolist()):
            known = [other for other in near if other >= 0]
            assert len(known) == len(set(known)) == min(count, int(np.isfinite(table[row]).sum()))
            np.testing.assert_allclose(
                table[row][known], np.sort(table[row])[: len(known)], rtol=1e-9, atol=1e-12
            )
    assert torch.equal(result.columns["nearest_neighbour"], result.arrays["neighbours"][:, 0])
    assert torch.equal(result.columns["nearest_by_angle"], result.arrays["neighbours_by_angle"][:, 0])


def test_neighbour_distance_label_share() -> None:
    rows = torch.tensor([[1.0, 0], [1, 0.01], [1, 0.02], [0, 1], [0.01, 1], [0, 0]])
    targets = torch.tensor([0, 0, 1, 1, 1, 0]).cpu()  # as a reader gives them
    result = found_of(rows, {"neighbours": 2}, targets=targets)
    table, count = all_distances(rows.double().numpy(), True), 2
    expected = [
        np.mean(targets.numpy()[np.argsort(row)[:count]] != label)
        for row, label in zip(table[:5], targets[:5].tolist(), strict=True)
    ]
    np.testing.assert_allclose(result.columns["neighbour_label_share"][:5], expected)
    assert result.columns["neighbour_label_share"][5].isnan()
    assert "neighbour_label_share" not in found_of(rows).columns
    all_others = found_of(rows[:5], {"neighbours": 9}, targets=targets[:5]).columns["neighbour_label_share"]
    assert all_others.tolist() == [0.75, 0.75, 0.5, 0.5, 0.5]  # of four


def test_neighbour_distance_duplicates_far_from_origin() -> None:
    rows = torch.full((4, 3), 1e4)
    rows[2:, 0] += 1e-2
    result = found_of(rows, {"neighbours": 1})
    assert result.columns["neighbour_distance"].tolist() == [0, 0, 0, 0]
    assert result.columns["nearest_neighbour"].tolist() == [1, 0, 3, 2]
    far = found_of(rows, {"neighbours": 3}).columns["neighbour_distance"]
    np.testing.assert_allclose(far, 2 / 3 * float(rows[2, 0].double() - 1e4), rtol=1e-12)


@pytest.mark.parametrize(
    "rows", [torch.ones(1, 3), torch.tensor([[1.0, 1], [math.nan, 1]]), torch.full((2, 2), math.inf)]
)
def test_neighbour_distance_single_sample(rows: Tensor) -> None:
    result = found_of(rows, {"save": True})
    assert result.columns["neighbour_distance"].isnan().all()
    assert (result.columns["nearest_neighbour"] == -1).all()
    assert (result.arrays["neighbours"] == -1).all()
    assert result.numbers["median_distance"] is None


def test_neighbour_distance_subsampled_reference() -> None:
    rows, said = torch.randn(60, 3), []
    result = found_of(rows, {"neighbours": 4, "reference": 20}, seed=9, say=said.append)
    chosen = np.sort(np.random.default_rng(9).choice(60, 20, replace=False))
    table = all_distances(rows.double().numpy(), False)
    np.testing.assert_allclose(
        result.columns["neighbour_distance"], mean_of_nearest(table[:, chosen], 4), rtol=1e-6
    )
    assert set(result.columns["nearest_neighbour"].tolist()) <= set(chosen.tolist())
    assert said == ["neighbour_distance: neighbours are looked for among 20 of 60 samples, drawn at random"]
    assert result.numbers["among"] == 20
    found_of(rows, {"reference": 60}, say=said.append)
    assert len(said) == 1


@pytest.mark.parametrize("options", [{"neighbours": 0}, {"reference": 1}])
def test_neighbour_distance_options_invalid_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected at least"):
        NeighbourDistance(**options)
