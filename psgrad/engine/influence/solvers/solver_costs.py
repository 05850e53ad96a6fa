"""The predicted cost of each solver, from sizes: multiplications and additions, and bytes; and the time that
products are predicted to take, from a few of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from psgrad.engine.execution.examples import Examples
from psgrad.engine.execution.output_rows import LARGEST_OUTPUT, output_size
from psgrad.engine.influence.curvature.curvature_products import CurvatureProducts
from psgrad.engine.influence.solvers.spectrum import TOLD_SECONDS, duration_words

# Rows, or parameters, whose square matrix is ever factorised: 2 GB.
LARGEST = 16384
# Measured on CPU cores, networks of 1,091 to 38,282 parameters and 400 to 1,500 samples
# (docs/explanation/influence.md); benchmarks/influence_solvers.py measures them again. The inner products of
# rows, as a multiple of what they are predicted to take; operations of a product with the curvature, for each
# sample and parameter; iterations of conjugate gradients with a damping of one mean eigenvalue, and how they
# grow as the damping falls. From a hundred queries on, which share a Krylov space, iterations fall as queries
# become more, down to the fewest.
_INNER, _PRODUCT, _ITERATIONS, _FEWEST, _GROWTH, _MANY = 2.0, 10.0, 20.0, 4.0, 0.45, 100
# Products behind the Nystroem preconditioner, which few queries get.
_PRECONDITIONER = 200
# Vectors of a block by which the time of the others is predicted.
_TRIED = 8
# Matrices of the full size that are alive at once, and the share of the free memory that they may take.
_ALIVE, _SHARE = 3, 0.5


@dataclass(frozen=True)
class Work:
    """The sizes that a solve's cost depends on.

    size: p. count: n. rows: N of the curvature; None where it is not a sum over rows. inner: operations of
    the inner product of two rows. queries: m. ratio: of damping and weight decay to the mean eigenvalue,
    about. memory: bytes that are free. products: whether there is a solver that takes products alone.
    """

    size: int
    count: int
    rows: int | None
    inner: float
    queries: int
    ratio: float
    memory: int
    products: bool = True

    def operations(self) -> dict[str, float]:
        """solver -> operations, of each solver whose matrices fit in memory."""
        p, n, m = float(self.size), float(self.count), float(self.queries)
        costs = {}
        if self.products:
            costs["conjugate_gradient"] = _PRODUCT * n * p * self.solved_products()
        if self.rows is not None and self.size <= LARGEST and self._fits(self.size):
            costs["exact"] = 2 * n * p * p + p**3 / 3 + 2 * m * p * p
        if self.rows is not None and self.rows <= LARGEST and self._fits(self.rows):
            costs["dual"] = _INNER * self.rows**2 * self.inner + self.rows**3 / 3 + 2.0 * self.rows**2 * m
        return costs

    def solved_products(self) -> float:
        """How many products with one vector conjugate gradients take."""
        return solved_products(self.queries) * max(min(self.ratio, 1.0), 1e-8) ** -_GROWTH

    def least(self, correct: bool) -> tuple[str, str]:
        """The solver of the least work, and why. correct: whether scores are corrected for leverage: exact or
        dual, where either fits.
        """
        costs = self.operations()
        if correct and self.products and len(costs) > 1:
            del costs["conjugate_gradient"]
        solver = min(costs, key=lambda name: costs[name])
        listed = ", ".join(
            f"{name} {work:.1g}" for name, work in sorted(costs.items(), key=lambda pair: pair[1])
        )
        what = (
            "that corrects for leverage and fits"
            if correct and solver != "conjugate_gradient"
            else "that fits"
        )
        return (
            solver,
            f"the least work of what is there {what} into memory, in predicted operations: {listed}",
        )

    def _fits(self, side: int) -> bool:
        return _ALIVE * 8 * side * side <= _SHARE * self.memory


def solved_products(queries: int) -> float:
    """How many products with one vector conjugate gradients take for `queries` right-hand sides, with a
    damping of one mean eigenvalue.
    """
    if queries >= _MANY:
        return max(_ITERATIONS * _MANY, _FEWEST * queries)
    return queries * _ITERATIONS + _PRECONDITIONER


def tell_of_time(
    products: CurvatureProducts,
    rhs: torch.Tensor,
    singly: int,
    in_blocks: float,
    training: Examples,
    say: Callable[[str], None],
) -> None:
    """Say how long a solve is predicted to take, where that is long: `singly` products with one vector each,
    and `in_blocks` in blocks of vectors. One and a few of them are timed.
    """
    begun = training.seconds()
    products.apply(rhs[:1].double())
    one = training.seconds()
    predicted = singly * (one - begun)
    if in_blocks:
        products.apply(rhs[:_TRIED].double())
        predicted += in_blocks * (training.seconds() - one) / len(rhs[:_TRIED])
    if predicted > TOLD_SECONDS:
        # of a large output EK-FAC draws labels, which not every loss has
        large = output_size(training) > LARGEST_OUTPUT
        ekfac = (
            "influence.method: {name: ekfac, fisher: empirical}" if large else "influence.method.name: ekfac"
        )
        say(
            f"scores of {len(rhs):,} queries take about {singly + in_blocks:,.0f} products with the curvature"
            f" ({products.how}), predicted to take {duration_words(predicted)};"
            f" influence.method.curvature: fisher, or {ekfac}, is much faster where the"
            " model's output is large, and estimates another curvature"
        )
