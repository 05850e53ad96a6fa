"""The curvature of the training set from rows of gradients, with an inverse in the space that they are
projected to: for a change of the data, whose rows are left out and put in.
"""

from __future__ import annotations

import torch

from psgrad.engine.execution.examples import Examples
from psgrad.engine.gradients.flat import Vectors, as_gradients
from psgrad.engine.gradients.projections.projector import Projector
from psgrad.engine.influence.damping import Damping
from psgrad.engine.influence.index.estimators import factor_of, require_parameters
from psgrad.engine.influence.index.index_rows import RowSource
from psgrad.engine.influence.method import Preconditioned


def curvature_of_rows(source: RowSource, log_loss: bool, chosen: torch.Tensor | None = None) -> torch.Tensor:
    """[k, k] float64: the sum over the rows, or over those of `chosen` [n] bool, of c P g g' P'.

    log_loss: whether the loss is minus the log of the probability p of one label. Its second derivative in
    the margin is p (1 - p), and its slope p - 1, so that c = p / (1 - p) makes the sum the Gauss-Newton
    matrix of the loss as a function of the margin. For other losses c is 1: the empirical Fisher.
    """
    k = source.projector.width
    total = torch.zeros(k, k, dtype=torch.float64)
    for block in source.blocks():
        taken = block.finite if chosen is None else block.finite & chosen[block.start : block.stop]
        rows = block.rows[taken].double() * block.to_loss[taken].unsqueeze(1)
        loss = block.loss[taken]
        # where p rounds to 1 the gradient is rounding
        factors = torch.where(loss > 0, 1 / loss.expm1(), 0.0) if log_loss else torch.ones_like(loss)
        total.addmm_((rows * factors.unsqueeze(1)).t(), rows)
    return total


class RowCurvature(Preconditioned):
    """P' (K + n lam I)^-1 P, K [k, k] the curvature of the rows: weights move in the directions of P alone.

    training: examples of the parameters that the rows are of. count: n. Raises InfluenceError where the
    matrix has no inverse, or the rows are of other parameters.
    """

    def __init__(
        self, training: Examples, projector: Projector, curvature: torch.Tensor, count: int, damping: Damping
    ) -> None:
        super().__init__(training)
        require_parameters(projector.flat, training)
        self.projector, k = projector, len(curvature)
        mean = float(curvature.diagonal().sum()) / (count * k)
        self.damping = damping.resolve(mean)
        shifted = curvature + torch.eye(k, dtype=torch.float64) * (self.damping * count)
        self._root = factor_of(shifted, self.damping, mean, count)

    def precondition(self, vectors: Vectors) -> Vectors:
        rows = self.projector(as_gradients(vectors)).double().cpu()
        moved = self.projector.transposed(torch.cholesky_solve(rows.t(), self._root).t())
        device = next(iter(vectors.values())).device
        return {name: value.to(device) for name, value in self.projector.flat.split(moved).items()}
