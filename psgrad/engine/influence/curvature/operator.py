"""The curvature of a training set as an operator: it says what it can do for a solver, which may need its
matrix, the rows whose outer products it is the sum of, or products with vectors.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from psgrad.engine.execution.examples import Examples
from psgrad.engine.execution.output_rows import LARGEST_OUTPUT, gauss_newton_rows, output_size, outputs_alike
from psgrad.engine.influence.curvature.curvature_products import (
    CurvatureKind,
    CurvatureProducts,
    curvature_products,
)
from psgrad.engine.influence.curvature.kronecker_fitting import fisher_rows
from psgrad.engine.influence.curvature.matrices import loss_hessian, sum_of_outer_products

TITLES: dict[CurvatureKind, str] = {
    "gauss_newton": "Gauss-Newton matrix",
    "hessian": "Hessian",
    "fisher": "empirical Fisher",
    "sampled": "sampled Gauss-Newton matrix",
}


@dataclass(frozen=True)
class Curvature:
    """n C, the curvature of the summed loss of n training examples. kind: 'gauss_newton' (the loss's second
    derivatives in the output, pulled back to the parameters), 'fisher' (the sum of g g' over the gradients of
    the labels that there are), 'hessian', or 'sampled', a sum of `draws` random rows for each example, by
    `seed`, whose mean is the Gauss-Newton matrix.
    """

    training: Examples
    kind: CurvatureKind
    draws: int = 1
    seed: int = 0

    @property
    def title(self) -> str:
        return TITLES[self.kind]

    @property
    def why_no_rows(self) -> str | None:
        """Why it is no sum over rows; None where it is one."""
        if self.kind == "hessian":
            return "a Hessian is no sum over rows"
        if self.kind in ("fisher", "sampled"):
            return None
        if not outputs_alike(self.training):
            return "outputs of rows that differ in length differ in size"
        size = output_size(self.training)
        return (
            f"an output of {size} numbers is too large for the other solvers"
            if size > LARGEST_OUTPUT
            else None
        )

    def rows(self) -> Examples:
        """The rows whose gradients' outer products add up to it, where it has them."""
        if self.kind == "sampled":
            return fisher_rows(self.training, self.draws, self.seed)
        return gauss_newton_rows(self.training) if self.kind == "gauss_newton" else self.training

    def matrix(self) -> torch.Tensor:
        """[p, p] float64."""
        return loss_hessian(self.training) if self.kind == "hessian" else sum_of_outer_products(self.rows())

    def products(self, weight_decay: float) -> CurvatureProducts:
        """Products with C, and this weight decay on its diagonal; there are none of 'sampled'."""
        return curvature_products(self.training, self.kind, weight_decay=weight_decay)
