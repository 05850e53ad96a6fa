"""Projected gradients beside dense algebra in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from psgrad.engine.measures.builtin import projected_gradients
from psgrad.engine.measures.builtin.projected_gradients import GradientProjection
from psgrad.engine.measures.measure import Setting
from psgrad.errors import MeasureError
from tests.engine.measures.own_passes import measured, setting_of


def gradients_are(rows: Tensor, **facts: Any) -> Setting:
    """Samples whose gradients are these [n, p]."""
    model = nn.Linear(rows.shape[1], 1, bias=False).to(rows.dtype)
    return setting_of(model, lambda output, target: output.sum(), (rows,), None, **facts)


def decaying(n: int, p: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """[n, p], of variances 1, 1/4, 1/9, ..., around a mean that is not zero."""
    drawn = torch.randn(n, p, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (drawn / torch.arange(1, p + 1) + 0.5).to(dtype)


def test_projected_gradients_few_parameters_not_projected() -> None:
    rows = torch.randn(9, 5)
    result, gathered = measured([GradientProjection(dimension=5)], gradients_are(rows))
    assert torch.equal(result["projected_gradients"], rows)
    assert gathered["projected_gradients"].numbers["kind"] == "none"
    assert gathered["projected_gradients"].numbers["square_norm_error"] == pytest.approx(0, abs=1e-6)


def test_projected_gradients_inner_products_error() -> None:
    rows = torch.randn(300, 2000)
    result, gathered = measured(
        [GradientProjection(dimension=64)], gradients_are(rows, seed=3), chunk_size=100
    )
    projected, numbers = result["projected_gradients"].double(), gathered["projected_gradients"].numbers
    squares = projected.square().sum(1) / rows.double().square().sum(1)
    assert numbers["square_norm_error"] == pytest.approx(
        float((squares - 1).square().mean().sqrt()), rel=1e-4
    )
    assert numbers["expected_square_norm_error"] == pytest.approx(math.sqrt(2 / 64))
    assert 0.7 < numbers["square_norm_error"] / numbers["expected_square_norm_error"] < 1.3
    apart = (projected @ projected.t() - rows.double() @ rows.double().t()).fill_diagonal_(0) / 2000
    assert float(apart.square().mean().sqrt()) == pytest.approx(64**-0.5, rel=0.2)


@given(
    n=st.integers(1, 20), p=st.integers(1, 40), chunk_size=st.integers(1, 20), dimension=st.integers(1, 30)
)
@settings(max_examples=15)
def test_projected_gradients_independent_of_chunks(n: int, p: int, chunk_size: int, dimension: int) -> None:
    setting = gradients_are(decaying(n, p), seed=n)
    one = measured([GradientProjection(dimension=dimension)], setting, chunk_size)[0]["projected_gradients"]
    other = measured([GradientProjection(dimension=dimension)], setting, n)[0]["projected_gradients"]
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_projected_gradients_seed_and_save() -> None:
    rows = torch.randn(4, 50)
    one, other = (
        measured([GradientProjection(dimension=8, save=True)], gradients_are(rows, seed=seed))[1][
            "projected_gradients"
        ]
        for seed in (0, 1)
    )
    assert not torch.equal(one.arrays["projected_gradients"], other.arrays["projected_gradients"])
    assert (
        measured([GradientProjection(dimension=8)], gradients_are(rows))[1]["projected_gradients"].arrays
        == {}
    )


def test_projected_gradients_beyond_memory_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(projected_gradients, "free_host_memory", lambda: 16 * 10 * 32)
    setting = gradients_are(torch.randn(10, 300))
    with pytest.raises(MeasureError, match="up to 32 columns") as caught:
        measured([GradientProjection(dimension=64)], setting)
    assert "set dimension: 32 or less" in str(caught.value)
    measured([GradientProjection(dimension=32)], setting)
    monkeypatch.setattr(projected_gradients, "free_host_memory", lambda: 10)
    with pytest.raises(MeasureError, match="fewer samples"):
        measured([GradientProjection(dimension=64)], setting)


def test_projected_gradients_dimension_invalid_is_refused() -> None:
    with pytest.raises(ValueError, match="got 0 as dimension"):
        GradientProjection(dimension=0)
