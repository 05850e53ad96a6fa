"""The spectrum of a symmetric matrix from products with it: its trace and its extreme eigenvalues; and the
errors that iterative solvers raise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from psgrad.errors import InfluenceError

# The share of the largest eigenvalue below which the lowest one may be rounding.
ROUNDING = 1e-9
# The share of the largest eigenvalue that a damping adds so that an inverse keeps half its digits.
_ENOUGH = 1e-8


def assert_finite(rhs: torch.Tensor) -> None:
    """Raises InfluenceError where a right-hand side [k, p] is not finite."""
    bad = (~torch.isfinite(rhs).all(1)).nonzero().squeeze(1).tolist()
    if bad:
        raise InfluenceError(
            f"{len(bad)} of {len(rhs)} right-hand sides are not finite, the first of them number {bad[0]}",
            hint="a query whose loss or gradient is not finite; leave that query out",
        )


def not_finite() -> InfluenceError:
    return InfluenceError(
        "products with the curvature are not finite",
        hint="look for gradients that are not finite with `psgrad analyze`, or set engine.dtype: float64",
    )


def assert_invertible(smallest: float, largest: float, size: int) -> None:
    """Raises InfluenceError where a positive semidefinite matrix [size, size] with these extreme eigenvalues,
    its damping included, has no inverse with any digits. smallest: or anything above it.
    """
    if smallest > size * torch.finfo(torch.float64).eps * largest:
        return
    enough = (
        f"raise the damping by {_ENOUGH * largest:.1e} or more" if largest > 0 else "look at `parameters`"
    )
    raise InfluenceError(
        f"the damped curvature is singular: its smallest eigenvalue is {smallest:.3g} and its largest"
        f" {largest:.3g}",
        hint=enough,
    )


def negative_curvature(ends: Extremes) -> InfluenceError:
    """ends: of the damped matrix."""
    more = 1.1 * (ends.bound - ends.lowest)
    return InfluenceError(
        f"the damped curvature is not positive definite: its lowest eigenvalue is {ends.lowest:.3g}, to"
        f" within {ends.bound:.1g}",
        hint=f"raise the damping by {more:.3g} or more, or set curvature: gauss_newton",
    )


Apply = Callable[[torch.Tensor], torch.Tensor]
"""[k, p] to [k, p] float64: products of a symmetric matrix [p, p] with k vectors."""


def random_block(k: int, size: int, seed: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """[k, size] float64 standard normal numbers, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(k, size, generator=generator, dtype=torch.float64).to(device)


def hutchinson_trace(
    apply: Apply, size: int, *, probes: int = 64, seed: int = 0, device: torch.device | str = "cpu"
) -> tuple[float, float]:
    """An unbiased estimate of the trace of a symmetric matrix [size, size], and its standard error.

    The mean of z'Az over vectors z of random signs. Hutchinson, "A stochastic estimator of the trace of the
    influence matrix for Laplacian smoothing splines" (1990).
    """
    signs = random_block(probes, size, seed, device).sign()
    products = (signs * apply(signs)).sum(1)
    return float(products.mean()), float(products.std()) / math.sqrt(probes)


@dataclass(frozen=True)
class Extremes:
    """The extreme eigenvalues of a symmetric matrix, about; there is one within `bound` of `lowest`."""

    lowest: float
    highest: float
    bound: float


def extremes(apply: Apply, start: torch.Tensor, iterations: int = 40, close: float = 0.0) -> Extremes:
    """The ends of a symmetric matrix by Lanczos, every vector orthogonalised against all before it, twice.

    Args:
        apply: [1, p] to [1, p].
        start: [p], the first vector; all that it is orthogonal to stays unseen.
        iterations: at most; fewer where the Krylov space ends before.
        close: it ends, too, once the bound of the highest value is at most this share of it.

    The bounds are norms of residuals, |A v - value v|. Raises InfluenceError where a product is not finite.
    Parlett, "The Symmetric Eigenvalue Problem" (1998), chapter 13.
    """
    basis = start.new_zeros(min(iterations, len(start)), len(start), dtype=torch.float64)
    alphas: list[float] = []
    betas: list[float] = []
    vector = start.double() / torch.linalg.vector_norm(start.double())
    largest = 0.0
    for step in range(len(basis)):
        basis[step] = vector
        product = apply(vector.unsqueeze(0)).squeeze(0).double()
        alphas.append(float(vector @ product))
        if not math.isfinite(alphas[-1]):
            raise not_finite()
        earlier = basis[: step + 1]
        for _ in range(2):
            product = product - earlier.t() @ (earlier @ product)
        betas.append(float(torch.linalg.vector_norm(product)))
        largest = max(largest, abs(alphas[-1]), betas[-1])
        if betas[-1] <= 1e-14 * largest:
            betas[-1] = 0.0
            break
        vector = product / betas[-1]
        if close and step % _STEPS == _STEPS - 1:
            values, within = _eigenpairs(alphas, betas)
            if betas[-1] * within[-1, -1].abs() <= close * values[-1].abs():
                break
    values, within = _eigenpairs(alphas, betas)
    return Extremes(float(values[0]), float(values[-1]), float(betas[-1] * within[-1, 0].abs()))


# Products after which it is checked whether the highest value is close.
_STEPS = 4


def _eigenpairs(alphas: list[float], betas: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """The eigenvalues and eigenvectors of a symmetric tridiagonal matrix: its diagonal and the one beside."""
    beside = torch.tensor(betas[: len(alphas) - 1], dtype=torch.float64)
    diagonal = torch.diag(torch.tensor(alphas, dtype=torch.float64))
    values, vectors = torch.linalg.eigh(diagonal + torch.diag(beside, 1) + torch.diag(beside, -1))
    return values, vectors
