"""The gradient noise scale beside its definition on draws of known mean and covariance, and its interval in
simulations.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from psgrad.engine.measures.builtin.dataset import (
    NoiseScale,
    estimates,
    interval,
    jackknife_values,
    resampled_estimates,
)
from tests.engine.measures.passes import Rows, measured

pytestmark = pytest.mark.usefixtures("on_device")

SPREADS = torch.tensor([2.0, 1.0, 0.5, 0.5, 0.25], dtype=torch.float64)


def drawn(n: int, mean: Tensor, seed: int) -> Tensor:
    """[n, 5] normal, with these standard deviations."""
    return mean + SPREADS * torch.randn(
        n, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )


def numbers_of(gradients: Tensor, **options: Any) -> dict[str, Any]:
    """The loss of a sample is its inner product with the parameters, so that its gradient is the input."""
    model = nn.Linear(gradients.shape[1], 1, bias=False).double()
    rows = Rows(model, gradients, None, lambda output, target: output.sum(), "custom", None)
    result: dict[str, Any] = dict(
        measured(rows, lambda: [NoiseScale(**options)], 20_000).gathered["noise_scale"].numbers
    )
    return result


def test_noise_scale_of_known_distribution() -> None:
    n, mean = 100_000, torch.full((5,), 0.5, dtype=torch.float64)
    square_mean, noise = float(mean.square().sum()), float(SPREADS.square().sum())
    result = numbers_of(drawn(n, mean, 0))
    # Standard errors to first order: of |G|^2 2 sqrt(G' Sigma G / n), of tr(Sigma) sqrt(2 tr(Sigma^2) / n).
    errors = (
        2 * math.sqrt(float((mean * SPREADS).square().sum()) / n),
        math.sqrt(2 * float(SPREADS.pow(4).sum()) / n),
    )
    assert abs(result["square_mean"] - square_mean) < 4 * errors[0]
    assert abs(result["noise"] - noise) < 4 * errors[1]
    assert abs(result["noise_scale"] - noise / square_mean) < 4 * noise / square_mean * (
        errors[0] / square_mean + errors[1] / noise
    )
    low, high = result["square_mean_interval"]
    assert high - low == pytest.approx(2 * 1.96 * errors[0], rel=0.1)
    low, high = result["noise_interval"]
    assert high - low == pytest.approx(2 * 1.96 * errors[1], rel=0.1)
    assert result["noise_scale_interval"][0] < result["noise_scale"] < result["noise_scale_interval"][1]


def test_noise_scale_jackknife() -> None:
    g = drawn(7, torch.ones(5, dtype=torch.float64), 3)
    squares, mean = g.square().sum(1), g.mean(0)

    def of(rows: Tensor) -> float:
        return estimates(len(rows), float(rows.square().sum(1).mean()), float(rows.mean(0).square().sum()))[0]

    expected = [7 * of(g) - 6 * of(torch.cat([g[:i], g[i + 1 :]])) for i in range(7)]
    result = jackknife_values(squares, g @ mean, float(mean.square().sum()))
    np.testing.assert_allclose(result, expected, rtol=1e-10)
    assert float(result.mean()) == pytest.approx(of(g), rel=1e-12)


@pytest.mark.parametrize("size", [0.02, 0.1, 0.5])
def test_noise_scale_interval_coverage(size: float) -> None:
    """Of 300 datasets of 200 samples, at 95 %: nine in ten and more, be the signal strong, like the noise, or
    lost in it.
    """
    mean = torch.full((5,), size, dtype=torch.float64)
    truth = float(SPREADS.square().sum()) / float(mean.square().sum())
    held, widths = 0, 0
    for seed in range(300):
        g = drawn(200, mean, 1000 + seed).cpu()  # where statistics of columns are computed
        squares, middle = g.square().sum(1), g.mean(0)
        square_mean, noise = resampled_estimates(squares, g @ middle, float(middle.square().sum()), 300, seed)
        low, high = interval((noise / square_mean).where(square_mean > 0, torch.inf), 0.95)
        held += (low is None or low <= truth) and (high is None or truth <= high)
        widths += high is not None and low is not None and high / low < 4
    assert held / 300 >= 0.89
    assert size < 0.5 or (held / 300 <= 0.985 and widths == 300), (
        "an interval that holds everything says nothing"
    )


def test_noise_scale_undefined_without_signal() -> None:
    result = next(
        numbers
        for seed in range(20)
        if (numbers := numbers_of(drawn(60, torch.zeros(5, dtype=torch.float64), seed)))["square_mean"] <= 0
    )
    assert result["noise_scale"] is None
    low, high = result["square_mean_interval"]
    assert (
        result["status"]
        == f"undefined: the estimate of |G|^2 is {result['square_mean']:.3g} (at 95% between {low:.3g} and"
        f" {high:.3g}), not above zero"
    )
    assert low < 0
    assert result["noise_scale_interval"][1] is None


@pytest.mark.parametrize("options", [{"resamples": 10}, {"level": 1.0}, {"level": 0.0}])
def test_noise_scale_options_invalid_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        NoiseScale(**options)
