"""Influence by the inner products of the curvature's rows."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch

from psgrad.engine.examples import Examples
from psgrad.engine.flat import Vectors, as_gradients
from psgrad.engine.influence.curvature.rows import OutputRows, output_factors
from psgrad.engine.influence.fits.corrected import Invertible
from psgrad.engine.influence.fits.setting import Setting
from psgrad.engine.influence.leverage import Leverage
from psgrad.engine.influence.method import Per, ScoreBlock, SelfBlock
from psgrad.engine.influence.solvers.dual import KernelInverse, combinations, kernel, products
from psgrad.errors import InfluenceError

# A loss's gradient in the output may miss the span of its second derivatives by that share of the largest gradient, as rounding does.
_MISS = 1e-8
# Samples whose self-influence is solved for at once.
_SOLVED = 256


class ByKernel(Invertible):
    """Scores through the Cholesky factor of K + mu I, K [n * R, n * R] the inner products of the curvature's R rows a sample.

    Where every training gradient is a combination of its sample's rows, g_i = G_i' c_i (of the Fisher it is the row itself, of
    Gauss-Newton where L_i has the loss's gradient in its span), scores are c_i' (K + mu I)^-1 G g_q, and nothing is subtracted, however
    small mu is.

    facts: besides `damping` and `mean_eigenvalue`, `rows`. Raises InfluenceError where damping and weight decay are too small.
    """

    def __init__(self, setting: Setting, rows: Examples, matrix: torch.Tensor, coefficients: torch.Tensor | None) -> None:
        super().__init__(setting.training)
        self.setting, self.rows, self.matrix, self.coefficients = setting, rows, matrix, coefficients
        count = len(setting.training)
        shift, facts = setting.shift(float(matrix.diagonal().sum()) / (rows.flat.size * count))
        self.inverse = KernelInverse.of(matrix, shift, setting.title, count)
        self.facts = {**facts, "rows": len(rows)}

    @classmethod
    def fit(cls, setting: Setting) -> ByKernel:
        rows = setting.rows()
        return cls(setting, rows, kernel(rows), _coefficients(rows))

    def with_damping(self, *, damping: float | None = None, relative: float | None = None) -> ByKernel:
        fitted = ByKernel(self.setting.damped(damping, relative), self.rows, self.matrix, self.coefficients)
        fitted.facts = {**self.setting.chosen(self.facts), **fitted.facts}
        return fitted

    def precondition(self, vectors: Vectors) -> Vectors:
        flat = self.training.flat
        solved = self.inverse.apply(products(self.rows, as_gradients(vectors)))
        joined = flat.join(vectors).double()
        return flat.split((joined - combinations(self.rows, solved).to(joined.device)) / self.inverse.shift)

    def scores(self, queries: Examples, per: Per = "total") -> Iterator[ScoreBlock]:
        if self.coefficients is None or per != "total":
            yield from super().scores(queries, per)
            return
        vectors = as_gradients(queries.flat.split(queries.materialise().to(self.training.device)))
        solved = self.inverse.apply(products(self.rows, vectors)).cpu()
        solved = solved.reshape(*self.coefficients.shape, solved.shape[1])
        yield ScoreBlock(0, len(solved), {"": torch.einsum("nr,nrm->nm", self.coefficients, solved)})

    def self_influence(self) -> Iterator[SelfBlock]:
        if self.coefficients is None:
            yield from super().self_influence()
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

    def has_leverage(self) -> bool:
        return self.coefficients is not None

    def leverage(self, root: torch.Tensor, gradient: torch.Tensor) -> Leverage:
        if self.coefficients is None:
            raise InfluenceError(
                "the leverage correction needs training gradients that are combinations of the curvature's rows, and here they are not",
                cause="a loss that is flat in some direction of the output in which it has a gradient (l1, Huber)",
                next_step="set solver: exact",
            )
        each = self.coefficients.shape[1]
        own = -self.inverse.shift * self.inverse.diagonal_blocks(each)
        own.diagonal(dim1=1, dim2=2).add_(1)
        return Leverage.of(own, (own @ self.coefficients.to(own).unsqueeze(2)).squeeze(2))

    def on(self, training: Examples, weights: torch.Tensor) -> ByKernel:
        other = copy.copy(self)
        other.training = training
        other.coefficients = None if self.coefficients is None else self.coefficients + weights
        return other


def _coefficients(rows: Examples) -> torch.Tensor | None:
    """c [n, R] float64 on the CPU with g_i = G_i' c_i; None where there are none for some sample."""
    if not isinstance(rows, OutputRows):
        return torch.ones(rows.count, 1, dtype=torch.float64)
    root, coefficients, gradient = output_factors(rows)
    missed = (root @ coefficients.unsqueeze(2)).squeeze(2) - gradient
    return coefficients if bool(missed.abs().amax() <= _MISS * gradient.abs().amax()) else None
