"""Preconditioners are the roots they say they are, and make iterations few where they resemble the matrix."""

from __future__ import annotations

import torch

from psgrad.engine.influence.solvers.conjugate_gradient import (
    Nystroem,
    conjugate_gradient,
    nystroem,
)
from tests.engine.influence.test_conjugate_gradient import solved, symmetric

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
