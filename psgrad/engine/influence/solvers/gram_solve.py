"""Solves by the inner products K = G G' of the curvature's rows G, for any number of parameters.

(G'G + mu I)^-1 v = (v - G' (K + mu I)^-1 G v) / mu. For a vector in the span of the rows, g = G'c, nothing is
subtracted: v' (G'G + mu I)^-1 g = (G v)' (K + mu I)^-1 c.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from psgrad.engine.execution.examples import Examples
from psgrad.engine.execution.output_rows import GaussNewtonRows, OutputRows, output_factors
from psgrad.engine.execution.row_grams import gram_matrix, inner_products
from psgrad.engine.gradients import PerSampleGradients
from psgrad.engine.gradients.flat import Vectors, as_gradients
from psgrad.engine.influence.curvature.operator import Curvature
from psgrad.engine.influence.damping import Damping
from psgrad.engine.influence.method import ScoreBlock, SelfBlock
from psgrad.engine.influence.solvers.solve import Solve
from psgrad.errors import InfluenceError

# A loss's gradient in the output may be outside the span of its second derivatives by that share of the
# largest gradient, as rounding causes.
_MISS = 1e-8
# Samples whose self-influence is solved for at once.
_SOLVED = 256


class GramSolve(Solve):
    """Scores through the Cholesky factor of K + mu I, K [n * R, n * R] the inner products of the curvature's
    R rows a sample.

    Where every training gradient is a combination of its sample's rows, g_i = G_i' c_i (of the Fisher it is
    the row itself, of Gauss-Newton where L_i has the loss's gradient in its span), scores are c_i' (K + mu
    I)^-1 G g_q, and nothing is subtracted, however small mu is.

    Raises InfluenceError where damping and weight decay are too small.
    """

    makes_passes = True

    def __init__(self, curvature: Curvature, weight_decay: float, damping: Damping) -> None:
        self.rows, training = curvature.rows(), curvature.training
        self.matrix = gram_matrix(self.rows)
        trace = float(self.matrix.diagonal().sum())
        if not trace < float("inf"):
            raise InfluenceError(
                f"the {curvature.title} has rows that are not finite",
                hint="leave out the training examples whose gradients are not finite",
            )
        super().__init__(curvature, weight_decay, damping, trace / (training.flat.size * len(training)))
        self.lower = factor_of_gram(self.matrix, self.shift, curvature.title, len(training))
        self.coefficients = _coefficients(self.rows)
        self.said = replace(self.said, rows=len(self.rows))

    def precondition(self, vectors: Vectors) -> Vectors:
        flat, joined = self.training.flat, self.training.flat.join(vectors).double()
        solved = self._solved(_products(self.rows, as_gradients(vectors)))
        return flat.split((joined - _combinations(self.rows, solved).to(joined.device)) / self.shift)

    def scores(self, queries: Examples) -> Iterator[ScoreBlock]:
        solved = self._solved(inner_products(self.rows, queries))
        if self.coefficients is None:
            found = inner_products(self.training, queries)
            found = (found - inner_products(self.training, self.rows) @ solved).cpu() / self.shift
        else:
            solved = solved.cpu().reshape(*self.coefficients.shape, solved.shape[1])
            found = torch.einsum("nr,nrm->nm", self.coefficients, solved)
        yield ScoreBlock(0, len(found), found)

    def self_influence(self) -> Iterator[SelfBlock]:
        if self.coefficients is None:
            yield from self._self_influence_by_pairs()
            return
        count, each = self.coefficients.shape
        for start in range(0, count, _SOLVED):
            stop = min(start + _SOLVED, count)
            columns = self.matrix.new_zeros(count, each, stop - start)
            places = torch.arange(stop - start)
            columns[start + places, :, places] = self.coefficients[start:stop].to(columns)
            columns = columns.flatten(0, 1)
            solved = self._solved(columns)
            moved = self.matrix @ solved
            own, squares = (columns * moved).sum(0).cpu(), (solved * moved).sum(0).cpu()
            yield SelfBlock(start, stop, own, squares.clamp_min(0).sqrt())

    def _self_influence_by_pairs(self) -> Iterator[SelfBlock]:
        """With G the rows, H^-1 g = (g - G'w) / mu for w = (K + mu I)^-1 G g."""
        along = inner_products(self.rows, self.training)  # [N, n]
        squares = torch.cat([norms["square_norm"] for _, norms in self.training.norms()]).to(along)
        for start in range(0, len(squares), _SOLVED):
            block = slice(start, min(start + _SOLVED, len(squares)))
            solved = self._solved(along[:, block])
            own = squares[block] - (along[:, block] * solved).sum(0)
            steps = own - ((along[:, block] - self.matrix @ solved) * solved).sum(0)
            norms = steps.clamp_min(0).sqrt().cpu() / self.shift
            yield SelfBlock(block.start, block.stop, own.cpu() / self.shift, norms)

    @property
    def has_leverage(self) -> bool:
        return self.coefficients is not None

    def leverage(self, root: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        assert self.coefficients is not None
        count, each = self.coefficients.shape
        whole = torch.cholesky_inverse(self.lower).reshape(count, each, count, each)
        own = -self.shift * whole.diagonal(dim1=0, dim2=2).permute(2, 0, 1)
        own.diagonal(dim1=1, dim2=2).add_(1)
        return own, (own @ self.coefficients.to(own).unsqueeze(2)).squeeze(2)

    def on(self, training: Examples, weights: torch.Tensor) -> GramSolve:
        other = super().on(training, weights)
        assert self.coefficients is not None
        other.coefficients = self.coefficients + weights
        return other

    def _solved(self, columns: torch.Tensor) -> torch.Tensor:
        """[N, k] float64: (K + mu I)^-1 times columns [N, k]."""
        return torch.cholesky_solve(columns.to(self.lower), self.lower)


def factor_of_gram(matrix: torch.Tensor, shift: float, title: str, count: int) -> torch.Tensor:
    """The Cholesky factor of a matrix [N, N] float64 plus `shift`, damping and weight decay together, on its
    diagonal.

    title: the curvature's name in messages. count: n, by which the shift is divided in messages. Raises
    InfluenceError where the shift is too small for an inverse in float64.
    """
    trace = float(matrix.diagonal().sum())
    least = len(matrix) * torch.finfo(torch.float64).eps * trace
    if shift > least:
        damped = matrix.clone()
        damped.diagonal().add_(shift)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not bool(failed):
            return lower
    raise InfluenceError(
        f"the {title} is singular: it is made of {len(matrix)} rows, and damping and weight decay add"
        f" {shift / count:.3g} to eigenvalues that add up to {trace / count:.3g}",
        hint=f"set influence.method.damping: {max(1e-8 * trace, 10 * least) / count:.1e}, or more",
    )


def _coefficients(rows: Examples) -> torch.Tensor | None:
    """c [n, R] float64 on the CPU with g_i = G_i' c_i; None where there are none for some sample."""
    if not isinstance(rows, OutputRows):
        return torch.ones(rows.count, 1, dtype=torch.float64)
    if not isinstance(rows, GaussNewtonRows):  # random rows
        return None
    root, coefficients, gradient = output_factors(rows)
    missed = (root @ coefficients.unsqueeze(2)).squeeze(2) - gradient
    return coefficients if bool(missed.abs().amax() <= _MISS * gradient.abs().amax()) else None


def _products(rows: Examples, vectors: PerSampleGradients) -> torch.Tensor:
    """[N, k] float64, on the CPU: each row's inner product with each of k vectors."""
    return torch.cat(
        [part["products"] for _, part in rows.each(lambda gradients: {"products": gradients.inner(vectors)})]
    )


def _combinations(rows: Examples, weights: torch.Tensor) -> torch.Tensor:
    """[k, p] float64, on the CPU: G'w for the k columns of weights [N, k]."""
    total = torch.zeros(weights.shape[1], rows.flat.size, dtype=torch.float64)
    for found_rows, part in rows.each(lambda gradients: {"rows": rows.flat.join(gradients.materialise())}):
        total += weights[found_rows].t().cpu() @ part["rows"].double()
    return total
