"""Traces and extreme eigenvalues from products with a matrix whose spectrum is known."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from psgrad.engine.influence.solvers.spectrum import extremes, hutchinson_trace, lanczos, random_block
from psgrad.errors import InfluenceError
from tests.engine.influence.test_conjugate_gradient import symmetric

pytestmark = pytest.mark.usefixtures("on_device")


def start(size: int, seed: int = 0) -> torch.Tensor:
    return random_block(1, size, seed, device=torch.empty(0).device)[0]


def test_spectrum_of_full_krylov_space() -> None:
    spectrum = torch.logspace(-2, 2, 100, dtype=torch.float64)
    matrix = symmetric(spectrum)
    result = lanczos(lambda v: v @ matrix, start(100), 100)
    assert result.iterations == 100
    torch.testing.assert_close(result.values, spectrum, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(
        result.vectors @ result.vectors.t(), torch.eye(100, dtype=torch.float64), rtol=0, atol=1e-11
    )
    assert float((result.vectors @ matrix - result.values[:, None] * result.vectors).abs().max()) < 1e-10


@pytest.mark.parametrize("iterations", [1, 5, 20, 60])
def test_spectrum_ritz_value_bounds(iterations: int) -> None:
    spectrum = np.concatenate([[-3.0, -0.1], np.logspace(-2, 2, 98)])
    matrix = symmetric(torch.tensor(spectrum))
    result = lanczos(lambda v: v @ matrix, start(100), iterations)
    assert result.iterations == iterations
    residuals = torch.linalg.vector_norm(
        result.vectors @ matrix - result.values[:, None] * result.vectors, dim=1
    )
    torch.testing.assert_close(result.bounds, residuals, rtol=1e-6, atol=1e-9)
    for value, bound in zip(result.values.numpy(), result.bounds.numpy(), strict=True):
        assert np.abs(spectrum - value).min() <= bound + 1e-9


@pytest.mark.parametrize("close", [1e-2, 1e-5, 1e-8])
def test_spectrum_ends_once_its_highest_value_is_close(close: float) -> None:
    matrix = symmetric(torch.logspace(-2, 2, 200))
    ends = extremes(lambda v: v @ matrix, start(200), 60, close)
    assert ends.iterations < 50
    assert float(ends.bounds[-1]) <= close * float(ends.values[-1])
    assert float(ends.values[-1]) == pytest.approx(100, rel=close)
    assert extremes(lambda v: v @ matrix, start(200), ends.iterations - 4).bounds[-1] > close * 100


def test_spectrum_krylov_space_that_ends_early_is_reported() -> None:
    """Three eigenvalues: three steps, and no residual."""
    matrix = symmetric(torch.tensor([1.0, 4.0, 9.0]).repeat_interleave(10))
    result = lanczos(lambda v: v @ matrix, start(30), 20)
    assert result.iterations in (3, 4)  # rounding may ask for one more
    assert result.values[[0, -1]].tolist() == pytest.approx([1, 9])
    assert float(result.bounds.max()) < 1e-6


def test_spectrum_nonfinite_refused() -> None:
    with pytest.raises(InfluenceError, match="products with the curvature are not finite"):
        lanczos(lambda v: v * float("nan"), start(4), 3)


def test_spectrum_trace_estimate_unbiased() -> None:
    matrix = symmetric(torch.logspace(-2, 2, 60))
    exact = float(matrix.trace())
    result = [
        hutchinson_trace(lambda v: v @ matrix, 60, probes=16, seed=seed, device=matrix.device)
        for seed in range(200)
    ]
    scores = np.array([(value - exact) / error for value, error in result])
    spread = np.std([value for value, _ in result])
    assert abs(np.mean([value for value, _ in result]) - exact) < 4 * spread / np.sqrt(len(result))
    assert np.mean([error for _, error in result]) == pytest.approx(spread, rel=0.2)
    assert np.mean(np.abs(scores) < 2) > 0.85
