"""Methods in the space of projected gradients: influence functions with the empirical Fisher as the
curvature, and TRAK, the model as logistic regression on the projected gradients of its margin.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from psgrad.engine.execution.examples import Examples
from psgrad.engine.gradients.projections.projector import Kind, Projector
from psgrad.engine.influence.index.estimators import ProjectedInverse
from psgrad.engine.influence.index.index_rows import Differentiated, RowsInMemory, RowSource
from psgrad.engine.influence.method import RELATIVE, Checkpoint, Fitted, Method
from psgrad.errors import InfluenceError


@dataclass(frozen=True)
class Projected(Method):
    """The options and the fit of methods on projected gradients of the loss or of the margin (`of`)."""

    dimension: int = 2048
    projection: Kind = "sparse"
    seed: int = 0
    damping: float | None = None
    relative_damping: float = 1.0

    unit: ClassVar[str] = RELATIVE
    predicts_removal: ClassVar[bool] = False
    of: ClassVar[Differentiated] = "loss"

    def fit(self, training: Examples, checkpoint: Checkpoint) -> Fitted:
        projector = Projector(self.projection, self.dimension, self.seed, checkpoint.number, training.params)
        return self.fit_rows(RowsInMemory(training, projector, self.of))

    def fit_rows(self, source: RowSource) -> Fitted:
        """The method fitted to existing rows, of the loss or of the margin."""
        return ProjectedInverse(source, self.of, self.damping, self.relative_damping)


@dataclass(frozen=True)
class ProjectedInfluence(Projected):
    """score = P g_q (P G'G P' + n lam I)^-1 P g_i, G [n, p] the gradients of the training losses, P a random
    projection.

    Choe et al., "What is your data worth to GPT? LLM-scale data valuation with influence functions" (2024).
    This is influence as if training had moved in the k directions of P alone, with the empirical Fisher for
    the Hessian, which it is not: where training losses are near zero the empirical Fisher is far smaller, and
    scores are as much too large. Without a projection it is the damped empirical Fisher itself.

    Args:
        dimension, projection, seed: as of `TRAK`.
        damping: lam, in units of P G'G P' / n; None for `relative_damping` times its mean eigenvalue.
    """

    name = "projected_influence"


@dataclass(frozen=True)
class TRAK(Projected):
    """score = mean_t [-P g_q (F'F + n lam I)^-1 P f_i] * mean_t [1 - p_i], means over checkpoints t.

    f_i is the gradient of a training example's margin, the log odds of its label, F the matrix of all P f_i,
    P the random projection of the checkpoint, and 1 - p_i, in general, minus the slope of the loss in the
    margin. With the margin as the query's measurement -g_q is its gradient. Park, Georgiev, Ilyas, Leclerc
    and Madry, "TRAK: Attributing Model Behavior at Scale" (2023), section 3; the checkpoints of the paper are
    models trained on random halves of the data. Two things differ: a ridge, without which few checkpoints
    rank poorly, and the scale, which is kept. F'F leaves out the curvature's weights p (1 - p), as the
    paper's does, so that scores are too small, the more so the better the examples are learnt.

    Args:
        dimension: columns of the projection. Where there are no more parameters, nothing is projected.
        projection: 'sparse', 'two-sided' (`dimension` columns for each parameter) or 'none'.
        seed: of the projection; each checkpoint has its own.
        damping: lam, in units of F'F / n; None for `relative_damping` times its mean eigenvalue.
    """

    name = "trak"
    of = "margin"

    @property
    def joins_by_own_rule(self) -> bool:
        return True  # each of the two factors is averaged by itself

    def fit_rows(self, source: RowSource) -> Fitted:
        """The method fitted to existing rows. Raises InfluenceError for rows of the loss."""
        if source.of != "margin":
            raise InfluenceError(
                "trak needs the gradients of the margin, and the index holds those of the loss",
                hint="build the index with features: margin; it answers gradient_dot and the others as well",
            )
        return super().fit_rows(source)
