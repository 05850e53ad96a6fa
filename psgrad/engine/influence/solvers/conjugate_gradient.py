"""Conjugate gradients for many right-hand sides in one shared Krylov space, and a preconditioner, as roots of
the matrix that a system is multiplied by from both sides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from psgrad.engine.free_memory import free_memory
from psgrad.engine.influence.fit_facts import SolveFacts
from psgrad.engine.influence.solvers.spectrum import (
    ROUNDING,
    Apply,
    assert_finite,
    assert_invertible,
    extremes,
    negative_curvature,
    not_finite,
    random_block,
)


@dataclass(frozen=True)
class Nystroem:
    """P is the matrix along its leading eigenvectors, about, and a constant across them.

    vectors: [r, p], orthonormal. values: [r], the undamped matrix along them. damping: what the system adds
    to its diagonal.
    """

    vectors: torch.Tensor
    values: torch.Tensor
    damping: float

    def root(self, block: torch.Tensor, power: float) -> torch.Tensor:
        """[k, p]: P^power times each of k vectors [k, p], float64, power 1/2 or -1/2."""
        least = self.values.amin() + self.damping
        scale = ((self.values + self.damping) / least) ** power - 1
        return block + ((block @ self.vectors.t()) * scale) @ self.vectors


def nystroem(
    apply: Apply, size: int, damping: float, *, rank: int, seed: int = 0, device: torch.device | str = "cpu"
) -> Nystroem:
    """The randomised Nystroem preconditioner of a positive semidefinite matrix plus damping, from `rank`
    products.

    Args:
        apply: products with the matrix without the damping, [k, p] to [k, p].
        size: p.
        seed: of the random vectors.

    Raises InfluenceError where the matrix has no more positive eigenvalues than that, and there is no
    damping. Frangella, Tropp and Udell, "Randomized Nystroem Preconditioning" (2021), algorithms 2.1 and 5.1.
    """
    test = torch.linalg.qr(random_block(min(rank, size), size, seed, device).t()).Q  # [p, r]
    sketch = apply(test.t()).t()
    kind = torch.finfo(sketch.dtype)
    shift = max(
        kind.eps * float(torch.linalg.matrix_norm(sketch)) * size**0.5, kind.tiny**0.5
    )  # the matrix may be zero
    sketch = sketch + shift * test
    core = test.t() @ sketch
    factor, failed = torch.linalg.cholesky_ex((core + core.t()) / 2)
    if int(
        failed
    ):  # negative curvature: the square root of the absolute value serves as well for a preconditioner
        values, vectors = torch.linalg.eigh((core + core.t()) / 2)
        half = sketch @ (vectors / values.abs().clamp_min(shift).sqrt())
    else:
        half = torch.linalg.solve_triangular(factor.t(), sketch, upper=True, left=False)
    left, singular, _ = torch.linalg.svd(half, full_matrices=False)
    values = (singular.square() - shift).clamp_min(0)
    assert_invertible(float(values.amin()) + damping, float(values.amax()) + damping, size)
    return Nystroem(left.t().contiguous(), values, damping)


# Blocks of vectors that are alive at once, and the share of the free memory that they may take.
_ALIVE, _SHARE = 10, 4
# A restart that gains less than that factor is the last.
_GAIN = 0.5
# Columns whose triangular factor has such a small entry lose too many digits in their inner products.
_DEPENDENT = 1e-6


def conjugate_gradient(
    apply: Apply,
    rhs: torch.Tensor,
    *,
    tolerance: float = 1e-6,
    iterations: int = 200,
    preconditioner: Nystroem | None = None,
    room: Callable[[], int] | None = None,
    spectrum: bool = True,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[torch.Tensor, SolveFacts]:
    """Solve A x = b for each of k right-hand sides, A symmetric positive definite.

    Args:
        apply: A times each of some vectors, [k, p] to [k, p] float64; the damping is A's.
        rhs: [k, p].
        tolerance: of |b - A x| / |b|, for every right-hand side, computed anew from x at the end.
        iterations: at most, for each block of right-hand sides.
        preconditioner: P, near A; None for none.
        room: the bytes that are free, the same on all processes that solve together; None for those of this
            one. As many right-hand sides as fit are solved at a time.
        spectrum: whether A's extreme eigenvalues are estimated first, for some tens of products with one
            vector.
        say: called with a message if the tolerance is not reached.

    Returns x [k, p] float64, and how it went.

    Raises InfluenceError where A is found to be singular or indefinite, with the damping that would do, and
    where numbers are not finite. O'Leary, "The block conjugate gradient algorithm and related methods"
    (1980), in the form that stays stable when residuals become dependent: Dubrulle, "Retooling the method of
    block conjugate gradients" (2001), algorithm BCGrQ.
    """
    rhs = rhs.double()
    assert_finite(rhs)
    run = _BlockSolver(apply, tolerance, iterations, preconditioner)
    ends = extremes(apply, random_block(1, rhs.shape[1], seed=0, device=rhs.device)[0]) if spectrum else None
    if ends is not None and ends.lowest < -ROUNDING * abs(ends.highest):
        raise negative_curvature(ends)
    if ends is not None:
        assert_invertible(ends.lowest, ends.highest, rhs.shape[1])
    free = room() if room is not None else free_memory(rhs.device)
    size = max(1, min(len(rhs), free // (_SHARE * _ALIVE * 8 * rhs.shape[1])))
    x = torch.cat([run.solve(part) for part in rhs.split(size)]) if len(rhs) else rhs.clone()
    residuals = torch.cat(run.residuals) if run.residuals else rhs.new_zeros(1)
    unconverged = int((residuals > tolerance).sum())
    facts = SolveFacts(
        iterations=run.iterations,
        products=run.products,
        relative_residual_max=float(residuals.max()),
        relative_residual_median=float(residuals.median()),
        converged=unconverged == 0,
        unconverged=unconverged,
        preconditioner="nystroem" if preconditioner is not None else "none",
        ritz_min=None if ends is None else ends.lowest,
        ritz_max=None if ends is None else ends.highest,
    )
    if unconverged:
        say(
            f"conjugate gradients did not converge: after {run.iterations} iterations the relative residual"
            f" of {unconverged} of {len(rhs)} right-hand sides is above {tolerance:g}, of the worst"
            f" {float(residuals.max()):.2g}; raise iterations, or the damping"
        )
    return x, facts


@dataclass
class _BlockSolver:
    """Solves blocks of right-hand sides of one call, and counts iterations and products over all of them."""

    apply: Apply
    tolerance: float
    most: int
    preconditioner: Nystroem | None
    iterations: int = 0
    products: int = 0
    residuals: list[torch.Tensor] = field(default_factory=list)

    def solve(self, rhs: torch.Tensor) -> torch.Tensor:
        """[k, p]: restarted from the true residual until that is small enough, gains no more, or iterations
        are used up.
        """
        size = torch.linalg.vector_norm(rhs, dim=1)
        scale = torch.where(size > 0, size, 1.0).unsqueeze(1)
        x, residual, left = torch.zeros_like(rhs), rhs / scale, self.most
        relative = torch.linalg.vector_norm(residual, dim=1)
        while bool((relative > self.tolerance).any()) and left > 0:
            step, used = self._search(residual, left)
            left -= used
            candidate = x + step
            residual = rhs / scale - self._times(candidate)
            again = torch.linalg.vector_norm(residual, dim=1)
            if not bool(torch.isfinite(again).all()):
                raise not_finite()
            gained = bool((again.max() <= _GAIN * relative.max()).item())
            x, relative = candidate, again
            if not gained:
                break
        self.iterations = max(self.iterations, self.most - left)
        self.residuals.append(relative)
        return x * scale

    def _search(self, residual: torch.Tensor, most: int) -> tuple[torch.Tensor, int]:
        """The correction [k, p] for residuals [k, p], and the iterations that it took. Inside, vectors are
        columns.
        """
        basis, coefficients = orthonormal(self._root(residual, -0.5).t())
        directions, x = basis, torch.zeros_like(residual.t())
        used, searching = 0, True
        while searching and used < most:
            products = self._root(self._times(self._root(directions.t(), -0.5)), -0.5).t()
            core = self._inverse(directions.t() @ products, directions)
            x.addmm_(directions, core @ coefficients)
            basis, change = orthonormal(torch.addmm(basis, products, core, alpha=-1))
            directions = torch.addmm(basis, directions, change.t())
            coefficients = change @ coefficients
            left = torch.linalg.vector_norm(self._root((basis @ coefficients).t(), 0.5), dim=1)
            used, searching = used + 1, bool((left > self.tolerance / 2).any())
        return self._root(x.t(), -0.5), used

    def _times(self, block: torch.Tensor) -> torch.Tensor:
        self.products += len(block)
        return self.apply(block)

    def _root(self, block: torch.Tensor, power: float) -> torch.Tensor:
        return block if self.preconditioner is None else self.preconditioner.root(block, power)

    def _inverse(self, core: torch.Tensor, directions: torch.Tensor) -> torch.Tensor:
        """[k, k]: the inverse of S'AS for directions S [p, k], which is positive definite where A is."""
        core = (core + core.t()) / 2
        factor, failed = torch.linalg.cholesky_ex(core)
        if not int(failed):
            return torch.cholesky_inverse(factor)
        if not bool(torch.isfinite(core).all()):
            raise not_finite()
        values, vectors = torch.linalg.eigh(core)
        rounding = torch.finfo(core.dtype).eps * len(core) * float(values.abs().max())
        if float(values[0]) < -rounding:
            start = self._root((directions @ vectors[:, :1]).t(), -0.5)[0]
            raise negative_curvature(extremes(self.apply, start))
        # rounding: along directions of a right-hand side that is solved already
        return (vectors / values.clamp_min(rounding)) @ vectors.t()


def orthonormal(columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Q [p, k] with orthonormal columns and C [k, k] with Q C = the columns given.

    By the Cholesky factor of their inner products, twice, which is a few large products; by Householder
    reflections where the columns are too close to dependent for that. Yamamoto, Nakatsukasa, Yanagisawa and
    Fukaya, "Roundoff error analysis of the CholeskyQR2 algorithm" (2015).
    """
    basis, triangle = columns, None
    for _ in range(2):
        factor, failed = torch.linalg.cholesky_ex(basis.t() @ basis, upper=True)
        diagonal = factor.diagonal().abs()
        if int(failed) or not bool(diagonal.min() > _DEPENDENT * diagonal.max()):
            factors = torch.linalg.qr(columns)
            return factors.Q, factors.R
        basis = torch.linalg.solve_triangular(factor, basis, upper=True, left=False)
        triangle = factor if triangle is None else factor @ triangle
    assert triangle is not None
    return basis, triangle
