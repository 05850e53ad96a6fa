"""Block conjugate gradients: the dense solve, whatever the right-hand sides are like; and loud where there is
none.
"""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from psgrad.engine.influence.solvers.conjugate_gradient import Nystroem, conjugate_gradient, nystroem
from psgrad.errors import InfluenceError


def symmetric(eigenvalues: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """A matrix with these eigenvalues, and eigenvectors that are random."""
    generator = np.random.default_rng(seed)
    vectors = torch.tensor(np.linalg.qr(generator.standard_normal((len(eigenvalues), len(eigenvalues))))[0])
    return (vectors * eigenvalues.double()) @ vectors.t()


def solved(matrix: torch.Tensor, rhs: torch.Tensor) -> torch.Tensor:
    return torch.tensor(np.linalg.solve(matrix.numpy(), rhs.numpy().T).T)


def relative(matrix: torch.Tensor, x: torch.Tensor, rhs: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(rhs - x @ matrix, dim=1) / torch.linalg.vector_norm(rhs, dim=1)


@given(size=st.integers(2, 40), count=st.integers(1, 60), spread=st.floats(0, 4), seed=st.integers(0, 1000))
def test_conjugate_gradient_equals_dense_solve(size: int, count: int, spread: float, seed: int) -> None:
    matrix = symmetric(torch.logspace(-spread / 2, spread / 2, size), seed)
    rhs = torch.tensor(np.random.default_rng(seed).standard_normal((count, size)))
    x, facts = conjugate_gradient(lambda v: v @ matrix, rhs, tolerance=1e-10)
    assert facts.converged
    assert float(relative(matrix, x, rhs).max()) <= 1e-10
    rounding = 4 * torch.finfo(torch.float64).eps * 10**spread  # of both residuals
    assert facts.relative_residual_max == pytest.approx(
        float(relative(matrix, x, rhs).max()), rel=0.5, abs=max(1e-14, rounding)
    )
    torch.testing.assert_close(x, solved(matrix, rhs), rtol=1e-6, atol=1e-6 * float(x.abs().max()))


def test_conjugate_gradient_dependent_right_hand_sides() -> None:
    matrix = symmetric(torch.logspace(-3, 1, 120))
    rhs = torch.randn(12, 120, dtype=torch.float64)
    rhs[1] = 0
    rhs[3] = rhs[2]
    rhs[4] = -1e6 * rhs[2]
    rhs[5] = rhs[2] + 1e-9 * rhs[6]
    rhs[7] *= 1e-12
    x, facts = conjugate_gradient(lambda v: v @ matrix, rhs, tolerance=1e-8)
    assert facts.converged
    assert torch.equal(x[1], torch.zeros(120, dtype=torch.float64))
    rest = torch.arange(12) != 1
    assert float(relative(matrix, x[rest], rhs[rest]).max()) <= 1e-8
    torch.testing.assert_close(x[3], x[2], rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(x[4], -1e6 * x[2], rtol=1e-5, atol=1e-2)


def test_conjugate_gradient_counts_unconverged_right_hand_sides() -> None:
    matrix = symmetric(torch.logspace(-4, 2, 200))
    rhs = torch.randn(3, 200, dtype=torch.float64)
    heard: list[str] = []
    x, facts = conjugate_gradient(lambda v: v @ matrix, rhs, iterations=7, say=heard.append)
    assert not facts.converged
    assert facts.unconverged == 3
    assert facts.iterations == 7
    assert facts.relative_residual_max == pytest.approx(float(relative(matrix, x, rhs).max()))
    assert facts.relative_residual_median == pytest.approx(float(relative(matrix, x, rhs).median()))
    assert heard == [
        "conjugate gradients did not converge: after 7 iterations the relative residual of 3 of 3 right-hand"
        f" sides is above 1e-06, of the worst {facts.relative_residual_max:.2g}; raise iterations, or the"
        " damping"
    ]


def test_conjugate_gradient_reports_true_residual() -> None:
    """Products that are wrong by a part in a thousand, another one each time: no recurrence notices, x says
    so.
    """
    matrix = symmetric(torch.logspace(-2, 2, 80))
    generator = torch.Generator().manual_seed(0)

    def noisy(v: torch.Tensor) -> torch.Tensor:
        exact = v @ matrix
        return exact * (1 + 1e-3 * torch.randn(exact.shape, generator=generator, dtype=exact.dtype))

    rhs = torch.randn(2, 80, dtype=torch.float64)
    x, facts = conjugate_gradient(noisy, rhs, spectrum=False)
    assert not facts.converged
    assert facts.relative_residual_max == pytest.approx(float(relative(matrix, x, rhs).max()), rel=0.3)


@pytest.mark.parametrize("spectrum", [True, False])
def test_conjugate_gradient_negative_curvature_refused(spectrum: bool) -> None:
    matrix = symmetric(torch.cat([torch.tensor([-0.5]), torch.logspace(-2, 1, 49)]))
    rhs = torch.randn(4, 50, dtype=torch.float64)
    with pytest.raises(
        InfluenceError, match=r"not positive definite: its lowest eigenvalue is -0\.5, to within"
    ) as caught:
        conjugate_gradient(lambda v: v @ matrix, rhs, spectrum=spectrum)
    assert caught.value.hint is not None
    assert "curvature: gauss_newton" in caught.value.hint
    more = float(re.findall(r"\d\S*\d", caught.value.hint)[0])
    assert 0.5 < more < 1
    _, facts = conjugate_gradient(lambda v: v @ matrix + more * v, rhs, spectrum=spectrum)
    assert facts.converged


@pytest.mark.parametrize("preconditioned", [True, False])
def test_conjugate_gradient_singular_curvature_refused(preconditioned: bool) -> None:
    matrix = symmetric(torch.cat([torch.zeros(40), torch.logspace(-2, 1, 10)]))
    rhs = torch.randn(4, 50, dtype=torch.float64)

    def solve(damping: float) -> bool:
        near = nystroem(lambda v: v @ matrix, 50, damping, rank=20) if preconditioned else None
        _, facts = conjugate_gradient(lambda v: v @ matrix + damping * v, rhs, preconditioner=near)
        return bool(facts.converged)

    with pytest.raises(
        InfluenceError, match=r"the damped curvature is singular: .* and its largest 10"
    ) as caught:
        solve(0.0)
    assert caught.value.hint == "raise the damping by 1.0e-07 or more"
    assert solve(1e-7)


def test_conjugate_gradient_nonfinite_refused() -> None:
    matrix = symmetric(torch.ones(5))
    rhs = torch.randn(3, 5, dtype=torch.float64)
    rhs[1, 2] = float("nan")
    with pytest.raises(
        InfluenceError, match="1 of 3 right-hand sides are not finite, the first of them number 1"
    ):
        conjugate_gradient(lambda v: v @ matrix, rhs)
    for spectrum in (True, False):
        with pytest.raises(InfluenceError, match="products with the curvature are not finite"):
            conjugate_gradient(lambda v: v * float("inf"), rhs[:1], spectrum=spectrum)


def test_conjugate_gradient_extreme_eigenvalues_are_reported() -> None:
    matrix = symmetric(torch.linspace(1, 30, 30))
    _, facts = conjugate_gradient(lambda v: v @ matrix, torch.ones(1, 30))
    assert facts.ritz_min == pytest.approx(1)
    assert facts.ritz_max == pytest.approx(30)


# -- Preconditioners: they make iterations few where they resemble the matrix --------------------------------

SIZE = 60
SPECTRUM = torch.logspace(-5, 2, SIZE, dtype=torch.float64)
DAMPING = 1e-3


def test_preconditioner_reduces_condition() -> None:
    """100 large eigenvalues over a floor: hundreds of iterations without, some with."""
    matrix = symmetric(torch.cat([torch.logspace(0, 4, 100), torch.full((300,), 1e-2)]))
    rhs = torch.randn(1, 400, dtype=torch.float64)

    def iterations(preconditioner: Nystroem | None) -> int:
        x, facts = conjugate_gradient(
            lambda v: v @ matrix + DAMPING * v, rhs, preconditioner=preconditioner, iterations=1000
        )
        assert facts.converged
        expected = solved(matrix + DAMPING * torch.eye(400, dtype=torch.float64), rhs)
        torch.testing.assert_close(x, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))
        return int(facts.iterations)

    alone = iterations(None)
    helped = iterations(nystroem(lambda v: v @ matrix, 400, DAMPING, rank=120))
    assert alone > 100
    assert helped <= 20


def test_preconditioner_negative_eigenvalues() -> None:
    """The solver is to tell of them, not a factorisation."""
    matrix = symmetric(torch.cat([torch.tensor([-1.0, -0.5]), SPECTRUM[2:]]))
    result = nystroem(lambda v: v @ matrix, SIZE, 2.0, rank=SIZE)
    assert bool(torch.isfinite(result.root(torch.eye(SIZE, dtype=torch.float64), -0.5)).all())
    rhs = torch.randn(2, SIZE, dtype=torch.float64)
    x, facts = conjugate_gradient(lambda v: v @ matrix + 2 * v, rhs, preconditioner=result)
    assert facts.converged
    torch.testing.assert_close(
        x, solved(matrix + 2 * torch.eye(SIZE, dtype=torch.float64), rhs), rtol=1e-4, atol=1e-5
    )
