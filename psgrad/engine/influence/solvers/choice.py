"""Which solver a curvature gets: a table of what each solver needs, and its predicted cost in multiplications
and additions.
"""

from __future__ import annotations

from dataclasses import dataclass

from psgrad.engine.execution.row_grams import inner_product_operations
from psgrad.engine.influence.curvature.operator import Curvature
from psgrad.errors import InfluenceError

# Parameters up to which the curvature is materialised in any case: 288 MB, and seconds for its factor.
LARGEST_MATRIX = 6000
# Rows, or parameters, whose square matrix is ever factorised: 2 GB.
LARGEST = 16384
# The number of queries that is assumed where it is not known.
_QUERIES = 100
# Measured on CPU cores, networks of 1,091 to 38,282 parameters and 400 to 1,500 samples;
# benchmarks/influence_solvers.py measures them again. The inner products of rows, as a multiple of what they
# are predicted to take; operations of a product with the curvature, for each sample and parameter; iterations
# of conjugate gradients with a damping of one mean eigenvalue, and how they grow as the damping falls. From a
# hundred queries on, which share a Krylov space, iterations fall as queries become more, down to the fewest.
_INNER, _PRODUCT, _ITERATIONS, _FEWEST, _GROWTH, _MANY = 2.0, 10.0, 20.0, 4.0, 0.45, 100
# Products behind the Nystroem preconditioner, which few queries get.
_PRECONDITIONER = 200
# Matrices of the full size that are alive at once, and the share of the free memory that they may take.
_ALIVE, _SHARE = 3, 0.5


def chosen_solver(curvature: Curvature, queries: int | None, ratio: float, correct: bool) -> tuple[str, str]:
    """The name of the solver, and why. queries: how many there will be; None where that is not known. ratio:
    of damping and weight decay to the mean eigenvalue, about. correct: whether scores are to be corrected for
    leverage, which not all solvers can.
    """
    training, why_no_rows = curvature.training, curvature.why_no_rows
    size, has_rows = training.flat.size, why_no_rows is None
    if why_no_rows is not None and curvature.kind == "gauss_newton":
        return "conjugate_gradient", why_no_rows
    sampled = curvature.kind == "sampled"
    if size <= LARGEST_MATRIX and not sampled:
        return "exact", f"{size:,} parameters are at most {LARGEST_MATRIX:,}"
    rows = curvature.rows() if has_rows else training
    work = Work(
        size,
        len(rows) if sampled else len(training),
        len(rows) if has_rows else None,
        inner_product_operations(rows) if has_rows and len(rows) <= LARGEST else 0.0,
        _QUERIES if queries is None else queries,
        ratio,
        training.free_bytes(),
        products=not sampled,
    )
    if not work.operations():
        raise InfluenceError(
            f"{len(rows):,} sampled rows of {size:,} parameters have no solver: a square matrix of the one or"
            f" of the other does not fit into memory, or has more than {LARGEST:,} rows",
            hint="take fewer draws, or influence.method.name: ekfac",
        )
    return work.least(correct)


@dataclass(frozen=True)
class Work:
    """The sizes that a solve's cost depends on.

    size: p. count: n. rows: N of the curvature; None where it is not a sum over rows. inner: operations of
    the inner product of two rows. queries: m. ratio: of damping and weight decay to the mean eigenvalue,
    about. memory: bytes that are free. products: whether the curvature has products with vectors.
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
        """solver -> operations, of each solver that has what it needs, and whose matrices fit in memory."""
        p, n, m, rows = float(self.size), float(self.count), float(self.queries), float(self.rows or 0)
        table = (
            ("conjugate_gradient", self.products, _PRODUCT * n * p * self.solved_products()),
            ("exact", self._fits(self.size), 2 * n * p * p + p**3 / 3 + 2 * m * p * p),
            (
                "dual",
                self._fits(self.rows or 0),
                _INNER * rows**2 * self.inner + rows**3 / 3 + 2.0 * rows**2 * m,
            ),
        )
        return {name: cost for name, possible, cost in table if possible}

    def solved_products(self) -> float:
        """How many products with one vector conjugate gradients take."""
        m = self.queries
        products = max(_ITERATIONS * _MANY, _FEWEST * m) if m >= _MANY else m * _ITERATIONS + _PRECONDITIONER
        return products * max(min(self.ratio, 1.0), 1e-8) ** -_GROWTH

    def least(self, correct: bool) -> tuple[str, str]:
        """The solver of the least work, and why. correct: whether scores are corrected for leverage: exact or
        dual, where either fits.
        """
        costs = self.operations()
        correct = correct and self.products and len(costs) > 1
        if correct:
            del costs["conjugate_gradient"]
        listed = sorted(costs.items(), key=lambda pair: pair[1])
        what = "that corrects for leverage and fits" if correct else "that fits"
        words = ", ".join(f"{name} {work:.1g}" for name, work in listed)
        return listed[0][0], (
            f"the least work of what is there {what} into memory, in predicted operations: {words}"
        )

    def _fits(self, side: int) -> bool:
        """Whether square matrices of this side fit in memory; those of a Hessian are not made for many
        parameters.
        """
        return self.rows is not None and side <= LARGEST and _ALIVE * 8 * side * side <= _SHARE * self.memory
