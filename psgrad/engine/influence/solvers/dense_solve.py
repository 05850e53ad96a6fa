"""Solves by the Cholesky factor of the materialised curvature, in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from psgrad.engine.execution.examples import Examples
from psgrad.engine.execution.output_rows import jacobian_rows
from psgrad.engine.gradients import PerSampleGradients
from psgrad.engine.gradients.flat import Vectors
from psgrad.engine.influence.curvature.operator import Curvature
from psgrad.engine.influence.damping import Damping
from psgrad.engine.influence.solvers.solve import Solve
from psgrad.engine.influence.solvers.spectrum import extremes, random_block
from psgrad.errors import InfluenceError


class DenseSolve(Solve):
    """Scores through the Cholesky factor of the damped curvature [p, p].

    Raises InfluenceError where that has no inverse.

    Args:
        matrix: n C [p, p] float64.
        ends: its smallest and largest eigenvalue, if they are known.
        say: called with a message where the curvature is indefinite.
    """

    def __init__(
        self,
        curvature: Curvature,
        weight_decay: float,
        damping: Damping,
        matrix: torch.Tensor,
        ends: tuple[float, float] | None = None,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        count = len(curvature.training)
        super().__init__(curvature, weight_decay, damping, float(matrix.diagonal().mean()) / count)
        self.matrix = matrix
        self.inverse = Inverse.of(matrix, self.shift, curvature.title, count, ends)
        smallest, largest = self.inverse.smallest, self.inverse.largest
        self.said = replace(
            self.said,
            smallest_eigenvalue=smallest / count,
            largest_eigenvalue=largest / count,
            condition=(largest + self.shift) / (smallest + self.shift),
        )
        if smallest < -1e-8 * largest:
            say(
                f"the {curvature.title} is indefinite: its smallest eigenvalue is {smallest / count:.3g}, and"
                " only the damping makes it positive; the checkpoint is not at a minimum, and scores are"
                " what they are at one by an assumption that does not hold"
            )

    def damped(self, damping: Damping) -> DenseSolve:
        """The inverse of the same matrix with another damping."""
        ends = self.inverse.smallest, self.inverse.largest
        return DenseSolve(self.curvature, self.weight_decay, damping, self.matrix, ends)

    def precondition(self, vectors: Vectors) -> Vectors:
        flat = self.training.flat
        return flat.split(self.inverse.apply(flat.join(vectors)))

    def leverage(self, root: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        towards = root.transpose(1, 2) @ self._output_products()
        return towards @ root, (towards @ gradient.unsqueeze(2)).squeeze(2)

    def _output_products(self) -> torch.Tensor:
        """M_i = J_i H^-1 J_i' [n, C, C] float64 on the CPU."""
        rows = jacobian_rows(self.training)

        def products(gradients: PerSampleGradients) -> dict[str, torch.Tensor]:
            halves = self.inverse.half(rows.flat.join(gradients.materialise()))
            halves = halves.reshape(-1, rows.per_sample, halves.shape[1])
            return {"products": halves @ halves.transpose(1, 2)}

        return torch.cat([part["products"] for _, part in rows.each(products)])


def has_inverse(matrix: torch.Tensor, training: Examples) -> bool:
    """Whether a curvature [p, p] has an inverse without any damping, with digits in the type that its rows
    are computed in.
    """
    factor, failed = torch.linalg.cholesky_ex(matrix)
    pivots = factor.diagonal().square()
    precision = torch.finfo(next(iter(training.params.values())).dtype).eps
    return not bool(failed) and bool(pivots.min() > len(matrix) * precision * pivots.max())


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
                    hint="leave out the training examples whose gradients are not finite",
                )
            values = torch.linalg.eigvalsh(matrix)
            raise _no_inverse(title, float(values[0]), float(values[-1]), shift, count, len(matrix))
        smallest, largest = _ends(matrix, lower, shift) if ends is None else ends
        if smallest + shift <= len(matrix) * _EPSILON * largest:
            raise _no_inverse(title, smallest, largest, shift, count, len(matrix))
        return cls(lower, largest, smallest)

    def apply(self, vectors: torch.Tensor) -> torch.Tensor:
        """[k, p] float64: the inverse times each of k vectors [k, p]."""
        return torch.cholesky_solve(vectors.to(self.lower).t(), self.lower).t()

    def half(self, vectors: torch.Tensor) -> torch.Tensor:
        """[k, p] float64: vectors whose inner products are those of the vectors [k, p] through the
        inverse.
        """
        return torch.linalg.solve_triangular(self.lower, vectors.to(self.lower).t(), upper=False).t()


_EPSILON = torch.finfo(torch.float64).eps
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
    largest = extremes(lambda block: block @ matrix, start, close=_CLOSE).highest

    def apply(block: torch.Tensor) -> torch.Tensor:  # for one vector ten times as fast as cholesky_solve
        half = torch.linalg.solve_triangular(lower, block.t(), upper=False)
        return torch.linalg.solve_triangular(lower.t(), half, upper=True).t()

    with _one_thread():
        smallest = 1 / extremes(apply, start, close=_NEAR).highest - shift
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
    indefinite = smallest < -size * _EPSILON * max(largest, abs(smallest))
    other = ", or curvature: gauss_newton" if indefinite and title == "Hessian" else ""
    return InfluenceError(
        f"the {title} is {'indefinite' if indefinite else 'singular'}: its smallest eigenvalue is"
        f" {smallest / count:.3g} and its largest {largest / count:.3g}, and damping and weight decay add"
        f" {shift / count:.3g}",
        hint=f"set influence.method.damping: {enough:.1e}{other}",
    )
