"""Arnoldi influence: the inverse along the leading eigenvectors, and zero across them. It estimates another
quantity than a solve does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from psgrad.engine.influence.solvers.spectrum import Apply, lanczos, random_block
from psgrad.errors import InfluenceError


@dataclass(frozen=True)
class Arnoldi:
    """The leading eigenpairs of a symmetric matrix, by modulus. values: [r], vectors: [r, p] orthonormal.
    facts: plain values.
    """

    values: torch.Tensor
    vectors: torch.Tensor
    facts: dict[str, Any]

    def solve(self, rhs: torch.Tensor, damping: float = 0.0) -> torch.Tensor:
        """[k, p] float64: V (S + damping)^-1 V' b for each of k right-hand sides [k, p]."""
        return ((rhs.double() @ self.vectors.t()) / (self.values + damping)) @ self.vectors


def arnoldi(
    apply: Apply,
    size: int,
    *,
    rank: int = 50,
    iterations: int = 200,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Arnoldi:
    """The `rank` eigenpairs of largest modulus that a Krylov space of `iterations` products with one vector
    has.

    Args:
        apply: products with the symmetric matrix, [1, p] to [1, p]; with or without its damping.
        seed: of the random first vector.

    What a damped solve gives along the other directions, b / damping, is left out: scores are smaller, and
    ranks differ. Only positive eigenvalues are kept, as negative ones would turn the sign of what they
    contribute. The matrix is symmetric, so the Arnoldi process is Lanczos'. Schioppa, Zablotskaia, Vilar and
    Sokolov, "Scaling up influence functions" (2022).

    facts: iterations, rank (how many are kept), eigenvalues_kept (smallest, largest), largest_bound (of a
    kept one's error), negative (how many of the largest by modulus were dropped). Raises InfluenceError where
    no eigenvalue is positive.
    """
    spectrum = lanczos(apply, random_block(1, size, seed, device)[0], iterations)
    order = spectrum.values.abs().argsort(descending=True)[:rank]
    positive = order[
        spectrum.values[order] > torch.finfo(torch.float64).eps * size * spectrum.values.abs().max()
    ]
    if not len(positive):
        raise InfluenceError(
            "no eigenvalue of the curvature is positive",
            cause="a loss that does not depend on the chosen parameters, or a Hessian at a maximum",
            next_step="look at `parameters`; or curvature: gauss_newton",
        )
    values, vectors = spectrum.values[positive], spectrum.vectors[positive]
    facts = {
        "iterations": spectrum.iterations,
        "rank": len(values),
        "eigenvalues_kept": [float(values[-1]), float(values[0])],
        "largest_bound": float(spectrum.bounds[positive].max()),
        "negative": int((spectrum.values[order] < 0).sum()),
    }
    return Arnoldi(values, vectors, facts)
