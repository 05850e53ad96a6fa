"""Influence functions in the space of projected gradients, with the empirical Fisher of that space as the curvature."""

from __future__ import annotations

from dataclasses import dataclass

from psgrad.engine.examples import Examples
from psgrad.engine.influence.index.estimators import RowInfluence
from psgrad.engine.influence.index.projector import Kind, Projector
from psgrad.engine.influence.index.rows import RowsInMemory, RowSource
from psgrad.engine.influence.method import RELATIVE, Checkpoint, Fitted, Method


@dataclass(frozen=True)
class ProjectedInfluence(Method):
    """score = P g_q (P G'G P' + n lam I)^-1 P g_i, G [n, p] the gradients of the training losses, P a random projection.

    Choe et al., "What is your data worth to GPT? LLM-scale data valuation with influence functions" (2024). This is influence
    as if training had moved in the k directions of P alone, with the empirical Fisher for the Hessian, which it is not: where training
    losses are near zero the empirical Fisher is far smaller, and scores are as much too large. Without a projection it is the damped
    empirical Fisher itself.

    Args:
        dimension, projection, seed: as of `TRAK`.
        damping: lam, in units of P G'G P' / n; None for `relative_damping` times its mean eigenvalue.
    """

    dimension: int = 2048
    projection: Kind = "sparse"
    seed: int = 0
    damping: float | None = None
    relative_damping: float = 1.0

    name = "projected_influence"
    unit = RELATIVE
    predicts_removal = False

    def fit(self, training: Examples, checkpoint: Checkpoint) -> Fitted:
        projector = Projector(self.projection, self.dimension, self.seed, checkpoint.number, training.params)
        return self.fit_rows(RowsInMemory(training, projector, "loss"))

    def fit_rows(self, source: RowSource) -> Fitted:
        """Of rows that are there, of the loss or of the margin."""
        return RowInfluence(source, "loss", self.damping, self.relative_damping)
