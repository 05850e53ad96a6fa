"""Preconditioners of a symmetric positive definite matrix, as the inverse square roots that a system is multiplied by from both sides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from psgrad.engine.influence.curvature.spectrum import random_block
from psgrad.engine.influence.solvers.refusals import assert_invertible

Apply = Callable[[torch.Tensor], torch.Tensor]


class Preconditioner(Protocol):
    """A matrix P that resembles the system's, of which roots can be multiplied with vectors."""

    name: str

    def root(self, block: torch.Tensor, power: float) -> torch.Tensor:
        """[k, p]: P^power times each of k vectors [k, p], float64, power 1/2 or -1/2."""


@dataclass(frozen=True)
class Diagonal:
    """P is diagonal, with these entries [p] > 0."""

    entries: torch.Tensor
    name = "diagonal"

    def root(self, block: torch.Tensor, power: float) -> torch.Tensor:
        return block * self.entries**power


@dataclass(frozen=True)
class Nystroem:
    """P is the matrix along its leading eigenvectors, about, and a constant across them.

    vectors: [r, p], orthonormal. values: [r], the undamped matrix along them. damping: what the system adds to its diagonal.
    """

    vectors: torch.Tensor
    values: torch.Tensor
    damping: float
    name = "nystroem"

    def root(self, block: torch.Tensor, power: float) -> torch.Tensor:
        least = self.values.amin() + self.damping
        scale = ((self.values + self.damping) / least) ** power - 1
        return block + ((block @ self.vectors.t()) * scale) @ self.vectors


def nystroem(apply: Apply, size: int, damping: float, *, rank: int, seed: int = 0, device: torch.device | str = "cpu") -> Nystroem:
    """The randomised Nystroem preconditioner of a positive semidefinite matrix plus damping, from `rank` products.

    Args:
        apply: products with the matrix without the damping, [k, p] to [k, p].
        size: p. seed: of the random vectors.

    Raises InfluenceError where the matrix has no more positive eigenvalues than that, and there is no damping.
    Frangella, Tropp and Udell, "Randomized Nystroem Preconditioning" (2021), algorithms 2.1 and 5.1.
    """
    test = torch.linalg.qr(random_block(min(rank, size), size, seed, device).t()).Q  # [p, r]
    sketch = apply(test.t()).t()
    kind = torch.finfo(sketch.dtype)
    shift = max(kind.eps * float(torch.linalg.matrix_norm(sketch)) * size**0.5, kind.tiny**0.5)  # the matrix may be zero
    sketch = sketch + shift * test
    core = test.t() @ sketch
    factor, failed = torch.linalg.cholesky_ex((core + core.t()) / 2)
    if int(failed):  # negative curvature: the square root of the absolute value serves as well for a preconditioner
        values, vectors = torch.linalg.eigh((core + core.t()) / 2)
        half = sketch @ (vectors / values.abs().clamp_min(shift).sqrt())
    else:
        half = torch.linalg.solve_triangular(factor.t(), sketch, upper=True, left=False)
    left, singular, _ = torch.linalg.svd(half, full_matrices=False)
    values = (singular.square() - shift).clamp_min(0)
    assert_invertible(float(values.amin()) + damping, float(values.amax()) + damping, size)
    return Nystroem(left.t().contiguous(), values, damping)
