"""Inverses by Cholesky factors, in float64: `Inverse` of a materialised curvature, `KernelInverse` of the
inner products K = G G' of its rows, which works for any number of parameters.

(G'G + mu I)^-1 v = (v - G' (K + mu I)^-1 G v) / mu. For a vector in the span of the rows, g = G'c, nothing is
subtracted: v' (G'G + mu I)^-1 g = (G v)' (K + mu I)^-1 c.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from psgrad.engine.execution.examples import Examples
from psgrad.engine.gradients import PerSampleGradients
from psgrad.engine.influence.solvers.spectrum import extremes, random_block
from psgrad.errors import InfluenceError, one_line

# Up to here all eigenvalues are computed, above it the two at the ends.
_ALL_EIGENVALUES = 400


@dataclass(frozen=True)
class Inverse:
    """(matrix + shift I)^-1 of a symmetric matrix [p, p] float64.

    Attributes:
        lower: the Cholesky factor [p, p].
        largest, smallest: the ends of the matrix's own spectrum, shift left out.
    """

    lower: torch.Tensor
    shift: float
    largest: float
    smallest: float

    @classmethod
    def of(
        cls,
        matrix: torch.Tensor,
        shift: float,
        title: str,
        count: int,
        ends: tuple[float, float] | None = None,
    ) -> Inverse:
        """The inverse of a matrix [p, p] float64 plus `shift` on its diagonal.

        title: the matrix's name in messages. count: n, by which eigenvalues and damping are divided in
        messages. ends: the matrix's smallest and largest eigenvalue, if they are known.

        Raises InfluenceError, with the smallest eigenvalue and a damping that suffices, where the matrix
        plus its shift is not positive definite, or too near to that for its inverse to have any digits.
        """
        damped = matrix.clone()
        damped.diagonal().add_(shift)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if bool(failed) or not bool(lower.diagonal().isfinite().all()):
            if not bool(matrix.isfinite().all()):
                raise InfluenceError(
                    f"the {title} has entries that are not finite",
                    hint=(
                        "training examples whose gradients are not finite; leave them out, or load a"
                        " checkpoint of a model that did not diverge"
                    ),
                )
            values = torch.linalg.eigvalsh(matrix)
            raise _no_inverse(title, float(values[0]), float(values[-1]), shift, count, len(matrix))
        smallest, largest = _ends(matrix, lower, shift) if ends is None else ends
        if smallest + shift <= _rounding(len(matrix)) * largest:
            raise _no_inverse(title, smallest, largest, shift, count, len(matrix))
        return cls(lower, shift, largest, smallest)

    def apply(self, vectors: torch.Tensor) -> torch.Tensor:
        """[k, p] float64: the inverse times each of k vectors [k, p]."""
        return torch.cholesky_solve(vectors.to(self.lower).t(), self.lower).t()

    def half(self, vectors: torch.Tensor) -> torch.Tensor:
        """[k, p] float64: vectors whose inner products are those of the vectors [k, p] through the
        inverse.
        """
        return torch.linalg.solve_triangular(self.lower, vectors.to(self.lower).t(), upper=False).t()


def _rounding(size: int) -> float:
    return size * torch.finfo(torch.float64).eps


# The shares to which eigenvalues are computed: the largest one, and the smallest one with the shift, which is
# often the lowest of many near zero, and says no more than how near to singular the sum is.
_CLOSE, _NEAR = 1e-7, 1e-2


def _ends(matrix: torch.Tensor, lower: torch.Tensor, shift: float) -> tuple[float, float]:
    """(smallest, largest) eigenvalue of a matrix whose Cholesky factor with the shift is at hand; by Lanczos
    where there are many.
    """
    if len(matrix) <= _ALL_EIGENVALUES:
        values = torch.linalg.eigvalsh(matrix)
        return float(values[0]), float(values[-1])
    start = random_block(1, len(matrix), seed=0, device=matrix.device)[0]
    largest = float(extremes(lambda block: block @ matrix, start, close=_CLOSE).values[-1])

    def apply(
        block: torch.Tensor,
    ) -> torch.Tensor:  # for one vector ten times as fast as torch.cholesky_solve
        half = torch.linalg.solve_triangular(lower, block.t(), upper=False)
        return torch.linalg.solve_triangular(lower.t(), half, upper=True).t()

    with _one_thread():
        smallest = 1 / float(extremes(apply, start, close=_NEAR).values[-1]) - shift
    return smallest, largest


@contextmanager
def _one_thread() -> Iterator[None]:
    """Triangular solves of one vector took a hundred times as long on two threads as on one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _no_inverse(
    title: str, smallest: float, largest: float, shift: float, count: int, size: int
) -> InfluenceError:
    # As little as leaves the inverse half its digits, or a little more than the most negative eigenvalue.
    enough = (max(-1.1 * smallest, 0.0) + 1e-8 * max(largest, abs(smallest))) / count
    indefinite = smallest < -_rounding(size) * max(largest, abs(smallest))
    state = "indefinite" if indefinite else "singular"
    return InfluenceError(
        f"the {title} is {state}: its smallest eigenvalue is {smallest / count:.3g} and its largest"
        f" {largest / count:.3g}, and damping and weight decay add {shift / count:.3g}; expected a"
        " positive definite matrix, whose inverse scores are made with",
        hint=(
            one_line(
                "the checkpoint is not at a minimum of the training loss"
                if indefinite
                else (
                    "directions in the parameters that no training example's output depends on, and no weight"
                    " decay"
                ),
                f"set influence.method.damping: {enough:.1e}"
                + (", or curvature: gauss_newton" if indefinite and title == "Hessian" else ""),
            )
        ),
    )


def products(rows: Examples, vectors: PerSampleGradients) -> torch.Tensor:
    """[N, k] float64, on the CPU: each row's inner product with each of k vectors."""
    return torch.cat(
        [part["products"] for _, part in rows.each(lambda gradients: {"products": gradients.inner(vectors)})]
    )


def combinations(rows: Examples, weights: torch.Tensor) -> torch.Tensor:
    """[k, p] float64, on the CPU: G'w for the k columns of weights [N, k]."""
    total = torch.zeros(weights.shape[1], rows.flat.size, dtype=torch.float64)
    for found_rows, part in rows.each(lambda gradients: {"rows": rows.flat.join(gradients.materialise())}):
        total += weights[found_rows].t().cpu() @ part["rows"].double()
    return total


@dataclass(frozen=True)
class KernelInverse:
    """(K + mu I)^-1.

    lower: the Cholesky factor [N, N].
    """

    lower: torch.Tensor
    shift: float

    @classmethod
    def of(cls, matrix: torch.Tensor, shift: float, title: str, count: int) -> KernelInverse:
        """The inverse of a matrix [N, N] float64 plus `shift`, damping and weight decay together, on its
        diagonal.

        title: the curvature's name in messages. count: n, by which the shift is divided in messages. Raises
        InfluenceError where the shift is too small for an inverse in float64.
        """
        trace = float(matrix.diagonal().sum())
        if not trace < float("inf"):
            raise InfluenceError(
                f"the {title} has rows that are not finite",
                hint=(
                    "training examples whose gradients are not finite; leave them out, or load a"
                    " checkpoint of a model that did not diverge"
                ),
            )
        least = len(matrix) * torch.finfo(torch.float64).eps * trace
        if shift > least:
            damped = matrix.clone()
            damped.diagonal().add_(shift)
            lower, failed = torch.linalg.cholesky_ex(damped)
            if not bool(failed):
                return cls(lower, shift)
        raise InfluenceError(
            f"the {title} is singular: it is made of {len(matrix)} rows, and damping and weight decay add"
            f" {shift / count:.3g} to eigenvalues that add up to {trace / count:.3g}; expected a positive"
            " damping, as the dual form divides by it",
            hint=f"set influence.method.damping: {max(1e-8 * trace, 10 * least) / count:.1e}, or more",
        )

    def apply(self, vectors: torch.Tensor) -> torch.Tensor:
        """[N, k] float64: the inverse times the columns of [N, k]."""
        return torch.cholesky_solve(vectors.to(self.lower), self.lower)

    def diagonal_blocks(self, size: int) -> torch.Tensor:
        """[N / size, size, size]: the blocks along the inverse's diagonal."""
        whole = torch.cholesky_inverse(self.lower)
        return torch.stack(
            list(
                whole.reshape(len(whole) // size, size, len(whole) // size, size)
                .diagonal(dim1=0, dim2=2)
                .unbind(-1)
            )
        )
