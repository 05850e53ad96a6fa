"""Fits that multiply by the inverse of a damped curvature: `ByMatrix` from the materialised matrix,
`ByKernel` from the inner products of its rows, `ByProducts` from products with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from psgrad.engine.execution.examples import Examples
from psgrad.engine.execution.output_rows import GaussNewtonRows, OutputRows, output_factors
from psgrad.engine.execution.row_grams import (
    gram_matrix,
    gram_seconds,
    inner_product_operations,
    inner_products,
    product_seconds,
)
from psgrad.engine.gradients.flat import Vectors, as_gradients
from psgrad.engine.influence.curvature.curvature_products import CurvatureProducts, curvature_products
from psgrad.engine.influence.curvature.matrices import loss_hessian, sum_of_outer_products
from psgrad.engine.influence.leverage import (
    Damping,
    InverseProblem,
    Invertible,
    Leverage,
    estimated_leverage,
    output_products,
    vectors_that_fit,
)
from psgrad.engine.influence.method import Per, ScoreBlock, SelfBlock
from psgrad.engine.influence.solvers.direct import Inverse, KernelInverse, combinations, products
from psgrad.engine.influence.solvers.solver_costs import solved_products
from psgrad.engine.influence.solvers.spectrum import TOLD_SECONDS, duration_words
from psgrad.errors import InfluenceError


class ByMatrix(Invertible):
    """Scores through the Cholesky factor of the damped curvature [p, p].

    facts: besides `damping` and `mean_eigenvalue`, the ends of the mean curvature's own spectrum and the
    condition number of what is inverted. Raises InfluenceError where that has no inverse.
    """

    def __init__(
        self, problem: InverseProblem, matrix: torch.Tensor, ends: tuple[float, float] | None = None
    ) -> None:
        super().__init__(problem.training)
        self.problem, self.matrix, count = problem, matrix, len(problem.training)
        shift, facts = problem.shift(float(matrix.diagonal().mean()) / count)
        self.inverse = Inverse.of(matrix, shift, problem.title, count, ends)
        smallest, largest = self.inverse.smallest, self.inverse.largest
        self.facts = {
            **facts,
            "smallest_eigenvalue": smallest / count,
            "largest_eigenvalue": largest / count,
            "condition": (largest + shift) / (smallest + shift),
        }
        if smallest < -1e-8 * largest:
            problem.say(
                f"the {problem.title} is indefinite: its smallest eigenvalue is {smallest / count:.3g}, and"
                " only the damping makes it positive; the checkpoint is not at a minimum, and scores are"
                " what they are at one by an assumption that does not hold"
            )

    def undamped(self) -> ByMatrix | None:
        """This inverse without damping; None where the curvature and its weight decay have no inverse with
        digits in the type that the curvature's rows are computed in.
        """
        matrix = self.matrix.clone()
        matrix.diagonal().add_(len(self.training) * self.problem.weight_decay)
        factor, failed = torch.linalg.cholesky_ex(matrix)
        pivots = factor.diagonal().square()
        precision = torch.finfo(next(iter(self.training.params.values())).dtype).eps
        if bool(failed) or not bool(pivots.min() > len(matrix) * precision * pivots.max()):
            return None
        # The messages of the correction were not given for the damped fit.
        return ByMatrix(replace(self.problem, damping=Damping(0.0)), self.matrix)

    @classmethod
    def fit(cls, problem: InverseProblem) -> ByMatrix:
        hessian = problem.curvature == "hessian"
        return cls(
            problem, loss_hessian(problem.training) if hessian else sum_of_outer_products(problem.rows())
        )

    def refitted(self, problem: InverseProblem) -> ByMatrix:
        return ByMatrix(problem, self.matrix, (self.inverse.smallest, self.inverse.largest))

    def precondition(self, vectors: Vectors) -> Vectors:
        flat = self.training.flat
        return flat.split(self.inverse.apply(flat.join(vectors)))

    def leverage(self, root: torch.Tensor, gradient: torch.Tensor) -> Leverage:
        return Leverage.through(output_products(self.training, self.inverse.half), root, gradient)


# A loss's gradient in the output may be outside the span of its second derivatives by that share of the
# largest gradient, as rounding causes.
_MISS = 1e-8
# Vectors of a block by which the time of a solve is predicted.
_TRIED = 8
# Samples whose self-influence is solved for at once.
_SOLVED = 256


class ByKernel(Invertible):
    """Scores through the Cholesky factor of K + mu I, K [n * R, n * R] the inner products of the curvature's
    R rows a sample.

    Where every training gradient is a combination of its sample's rows, g_i = G_i' c_i (of the Fisher it is
    the row itself, of Gauss-Newton where L_i has the loss's gradient in its span), scores are c_i' (K + mu
    I)^-1 G g_q, and nothing is subtracted, however small mu is.

    facts: besides `damping` and `mean_eigenvalue`, `rows`. Raises InfluenceError where damping and weight
    decay are too small.
    """

    makes_passes = True

    def __init__(
        self, problem: InverseProblem, rows: Examples, matrix: torch.Tensor, coefficients: torch.Tensor | None
    ) -> None:
        super().__init__(problem.training)
        self.problem, self.rows, self.matrix, self.coefficients = problem, rows, matrix, coefficients
        count = len(problem.training)
        shift, facts = problem.shift(float(matrix.diagonal().sum()) / (rows.flat.size * count))
        self.inverse = KernelInverse.of(matrix, shift, problem.title, count)
        self.facts = {**facts, "rows": len(rows)}

    @classmethod
    def fit(cls, problem: InverseProblem) -> ByKernel:
        rows = problem.rows()
        predicted = gram_seconds(rows, problem.training.seconds)
        if predicted > TOLD_SECONDS:
            problem.say(
                f"inner products of {len(rows):,} rows of the curvature are predicted to take"
                f" {duration_words(predicted)}; influence.method.name: ekfac takes two passes, and"
                " gradient_dot one"
            )
        return cls(problem, rows, gram_matrix(rows), _coefficients(rows))

    def refitted(self, problem: InverseProblem) -> ByKernel:
        return ByKernel(problem, self.rows, self.matrix, self.coefficients)

    def seconds(self, vectors: Vectors) -> float:
        return 2 * product_seconds(self.rows, as_gradients(vectors), self.training.seconds)

    def precondition(self, vectors: Vectors) -> Vectors:
        flat = self.training.flat
        solved = self.inverse.apply(products(self.rows, as_gradients(vectors)))
        joined = flat.join(vectors).double()
        return flat.split((joined - combinations(self.rows, solved).to(joined.device)) / self.inverse.shift)

    def scores(self, queries: Examples, per: Per = "total") -> Iterator[ScoreBlock]:
        if per != "total" or (self.coefficients is None and not self._takes_pairs(len(queries))):
            yield from super().scores(queries, per)
            return
        solved = self.inverse.apply(inner_products(self.rows, queries))
        if self.coefficients is None:
            found = inner_products(self.training, queries)
            found -= inner_products(self.training, self.rows) @ solved
            found = found.cpu() / self.inverse.shift
        else:
            solved = solved.cpu().reshape(*self.coefficients.shape, solved.shape[1])
            found = torch.einsum("nr,nrm->nm", self.coefficients, solved)
        yield ScoreBlock(0, len(found), {"": found})

    @cached_property
    def _pair_operations(self) -> float:
        return inner_product_operations(self.rows)

    def _takes_pairs(self, queries: int) -> bool:
        """Whether inner products of all pairs of gradients are predicted to be less work than combinations of
        rows for the queries.
        """
        n, rows, m = len(self.training), len(self.rows), queries
        pairs = (n * rows + n * m + rows * m) * self._pair_operations
        return pairs < 2 * self.rows.flat.size * m * (2 * rows + n)

    def self_influence(self) -> Iterator[SelfBlock]:
        if self.coefficients is None:
            yield from (
                self._self_influence_by_pairs()
                if self._takes_pairs(len(self.training))
                else super().self_influence()
            )
            return
        for start in range(0, len(self.coefficients), _SOLVED):
            chosen = torch.zeros_like(self.coefficients[start : start + _SOLVED])
            columns = torch.zeros(len(self.rows), len(chosen), dtype=torch.float64, device=self.matrix.device)
            each = self.coefficients.shape[1]
            for place in range(len(chosen)):
                first = (start + place) * each
                columns[first : first + each, place] = self.coefficients[start + place].to(columns)
            solved = self.inverse.apply(columns)
            moved = self.matrix @ solved
            own, squares = (columns * moved).sum(0).cpu(), (solved * moved).sum(0).cpu()
            yield SelfBlock(start, start + len(chosen), own, squares.clamp_min(0).sqrt())

    def _self_influence_by_pairs(self) -> Iterator[SelfBlock]:
        """With G the rows, H^-1 g = (g - G'w) / mu for w = (K + mu I)^-1 G g."""
        shift, device = self.inverse.shift, self.matrix.device
        along = inner_products(self.rows, self.training)  # [N, n]
        squares = torch.cat([norms["square_norm"] for _, norms in self.training.norms()]).to(device)
        for start in range(0, len(squares), _SOLVED):
            block = slice(start, min(start + _SOLVED, len(squares)))
            solved = self.inverse.apply(along[:, block])
            own = squares[block] - (along[:, block] * solved).sum(0)
            steps = own - ((along[:, block] - self.matrix @ solved) * solved).sum(0)
            yield SelfBlock(
                block.start, block.stop, own.cpu() / shift, steps.clamp_min(0).sqrt().cpu() / shift
            )

    def has_leverage(self) -> bool:
        return self.coefficients is not None

    def leverage(self, root: torch.Tensor, gradient: torch.Tensor) -> Leverage:
        if self.coefficients is None:
            raise InfluenceError(
                "the leverage correction needs training gradients that are combinations of the curvature's"
                " rows, and here they are not",
                hint=(
                    "a loss that is flat in some direction of the output in which it has a gradient"
                    " (l1, Huber); set solver: exact"
                ),
            )
        each = self.coefficients.shape[1]
        own = -self.inverse.shift * self.inverse.diagonal_blocks(each)
        own.diagonal(dim1=1, dim2=2).add_(1)
        return Leverage.of(own, (own @ self.coefficients.to(own).unsqueeze(2)).squeeze(2))

    def on(self, training: Examples, weights: torch.Tensor) -> ByKernel:
        other = super().on(training, weights)
        other.coefficients = None if self.coefficients is None else self.coefficients + weights
        return other


def _coefficients(rows: Examples) -> torch.Tensor | None:
    """c [n, R] float64 on the CPU with g_i = G_i' c_i; None where there are none for some sample."""
    if not isinstance(rows, OutputRows):
        return torch.ones(rows.count, 1, dtype=torch.float64)
    if not isinstance(rows, GaussNewtonRows):  # random rows
        return None
    root, coefficients, gradient = output_factors(rows)
    missed = (root @ coefficients.unsqueeze(2)).squeeze(2) - gradient
    return coefficients if bool(missed.abs().amax() <= _MISS * gradient.abs().amax()) else None


# (products, lam, right-hand sides [k, p], whether to return the spectrum) to the solutions [k, p] of (C +
# (weight_decay + lam) I) x = b and the solver's facts.
Solve = Callable[[CurvatureProducts, float, torch.Tensor, bool], tuple[torch.Tensor, dict[str, Any]]]


class ByProducts(Invertible):
    """Scores through a solver that needs only products.

    facts: besides `damping` and `mean_eigenvalue`, its standard error, the source of products
        (`products_by`), and the solver's own, once there are scores. Raises InfluenceError as the solver
        does.
    """

    has_self_influence, makes_passes = False, True

    def __init__(
        self, problem: InverseProblem, products: CurvatureProducts, solve: Solve, rough: Solve, seed: int
    ) -> None:
        super().__init__(problem.training)
        self.problem, self.products, self.solve, self.rough, self.seed = problem, products, solve, rough, seed
        mean, error = products.mean_eigenvalue()
        shift, facts = problem.shift(mean)
        self.damping = shift / len(problem.training) - problem.weight_decay
        self.facts = {**facts, "mean_eigenvalue_error": error, "products_by": products.how}

    @classmethod
    def fit(cls, problem: InverseProblem, solve: Solve, rough: Solve, seed: int) -> ByProducts:
        """rough: solves to fewer digits, for what is estimated. seed: of an estimated trace, and of an
        estimated leverage.
        """
        products = curvature_products(
            problem.training, problem.curvature, weight_decay=problem.weight_decay, seed=seed
        )
        return cls(problem, products, solve, rough, seed)

    def refitted(self, problem: InverseProblem) -> ByProducts:
        return ByProducts(problem, self.products, self.solve, self.rough, self.seed)

    def seconds(self, vectors: Vectors) -> float:
        some = self.training.flat.join(vectors)[:_TRIED].double()
        began = self.training.seconds()
        self.products.apply(some)
        count = solved_products(len(next(iter(vectors.values()))))
        return (self.training.seconds() - began) / len(some) * count

    def precondition(self, vectors: Vectors) -> Vectors:
        flat = self.training.flat
        solved, facts = self.solve(
            self.products, self.damping, flat.join(vectors).double(), "ritz_min" not in self.facts
        )
        self.facts.update(_worst(self.facts, facts))
        return flat.split(solved / len(self.training))

    def has_leverage(self) -> bool:
        return vectors_that_fit(self.training) > 0

    def leverage(self, root: torch.Tensor, gradient: torch.Tensor) -> Leverage:
        """As for `Invertible`, root [n, C, R] and gradient [n, C]; estimated for most examples
        (leverage.py).
        """

        def inverse(block: torch.Tensor) -> torch.Tensor:
            return self.rough(self.products, self.damping, block, False)[0] / len(self.training)

        shift = len(self.training) * (self.damping + self.problem.weight_decay)
        estimate, exact, vectors = estimated_leverage(
            self.training, inverse, shift, root, gradient, self.seed
        )
        self.facts["leverage_by"] = (
            f"{vectors} random vectors, and a solve for each of the {exact} examples of the largest leverage"
        )
        return estimate


def _worst(before: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    """A solver's facts, with the worst of all calls so far where a fact has a worst value."""
    largest = ("iterations", "relative_residual_max")
    worst = {name: max(before.get(name, 0), facts[name]) for name in largest if name in facts}
    return {
        **facts,
        **worst,
        **(
            {"converged": before.get("converged", True) and facts["converged"]}
            if "converged" in facts
            else {}
        ),
    }
