"""Arnoldi influence keeps the leading eigenpairs, and nothing across them."""

from __future__ import annotations

import pytest
import torch

from psgrad.engine.influence.solvers.spectrum import arnoldi
from psgrad.errors import InfluenceError
from tests.engine.influence.test_conjugate_gradient import solved, symmetric

SPECTRUM = torch.logspace(-2, 2, 100, dtype=torch.float64)


@pytest.mark.parametrize("rank", [1, 10, 50])
def test_arnoldi_leading_eigenpairs_of_a_known_spectrum(rank: int) -> None:
    matrix = symmetric(SPECTRUM)
    result = arnoldi(lambda v: v @ matrix, 100, rank=rank, iterations=100)
    torch.testing.assert_close(result.values, SPECTRUM.flip(0)[:rank], rtol=1e-8, atol=0)
    assert float((result.vectors @ matrix - result.values[:, None] * result.vectors).abs().max()) < 1e-8
    assert result.facts["rank"] == rank
    assert result.facts["eigenvalues_kept"] == pytest.approx([float(SPECTRUM[-rank]), 100])


def test_arnoldi_truncated_inverse() -> None:
    matrix, rhs = symmetric(SPECTRUM), torch.randn(4, 100, dtype=torch.float64)
    values, vectors = torch.linalg.eigh(matrix)
    kept = vectors[:, -20:]
    for damping in (0.0, 3.0):
        expected = rhs @ (kept / (values[-20:] + damping)) @ kept.t()
        result = arnoldi(lambda v: v @ matrix, 100, rank=20, iterations=100).solve(rhs, damping)
        torch.testing.assert_close(result, expected, rtol=1e-7, atol=1e-9)
    across = rhs - rhs @ kept @ kept.t()
    assert float(arnoldi(lambda v: v @ matrix, 100, rank=20, iterations=100).solve(across).abs().max()) < 1e-9


def test_arnoldi_full_rank_is_the_inverse() -> None:
    matrix, rhs = symmetric(SPECTRUM), torch.randn(4, 100, dtype=torch.float64)
    result = arnoldi(lambda v: v @ matrix, 100, rank=100, iterations=100).solve(rhs)
    torch.testing.assert_close(result, solved(matrix, rhs), rtol=1e-6, atol=1e-6)


def test_arnoldi_few_products_and_residuals() -> None:
    matrix = symmetric(SPECTRUM)
    result = arnoldi(lambda v: v @ matrix, 100, rank=5, iterations=25)
    assert result.facts["iterations"] == 25
    for value in result.values:
        assert float((SPECTRUM - value).abs().min()) <= result.facts["largest_bound"]


def test_arnoldi_negative_eigenvalues_are_dropped_and_counted() -> None:
    matrix = symmetric(torch.cat([torch.tensor([-90.0, -60.0, -0.001]), SPECTRUM[3:]]))
    result = arnoldi(lambda v: v @ matrix, 100, rank=10, iterations=100)
    assert result.facts["negative"] == 2
    assert len(result.values) == 8
    assert float(result.values.min()) > 0
    with pytest.raises(InfluenceError, match="no eigenvalue of the curvature is positive"):
        arnoldi(lambda v: -v, 10)
