"""Influence by the curvature written out."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch

from psgrad.engine.examples import Examples
from psgrad.engine.flat import Vectors
from psgrad.engine.influence.curvature.dense import loss_hessian, sum_of_outer_products
from psgrad.engine.influence.damping import Damping
from psgrad.engine.influence.fits.corrected import Invertible
from psgrad.engine.influence.fits.setting import Setting
from psgrad.engine.influence.leverage import Leverage, output_products
from psgrad.engine.influence.solvers.exact import Inverse


class ByMatrix(Invertible):
    """Scores through the Cholesky factor of the damped curvature [p, p].

    facts: besides `damping` and `mean_eigenvalue`, the ends of the mean curvature's own spectrum and the condition number of what is
    inverted. Raises InfluenceError where that has no inverse.
    """

    def __init__(self, setting: Setting, matrix: torch.Tensor, ends: tuple[float, float] | None = None) -> None:
        super().__init__(setting.training)
        self.setting, self.matrix, count = setting, matrix, len(setting.training)
        shift, facts = setting.shift(float(matrix.diagonal().mean()) / count)
        self.inverse = Inverse.of(matrix, shift, setting.title, count, ends)
        smallest, largest = self.inverse.smallest, self.inverse.largest
        self.facts = {
            **facts,
            "smallest_eigenvalue": smallest / count,
            "largest_eigenvalue": largest / count,
            "condition": (largest + shift) / (smallest + shift),
        }
        if smallest < -1e-8 * largest:
            setting.say(
                f"the {setting.title} is indefinite: its smallest eigenvalue is {smallest / count:.3g}, and only the damping makes it "
                "positive; the checkpoint is not at a minimum, and scores are what they are at one by an assumption that does not hold"
            )

    def undamped(self) -> ByMatrix | None:
        """The same without damping; None where the curvature and its weight decay have no inverse with digits in the type that the
        curvature's rows are computed in."""
        matrix = self.matrix.clone()
        matrix.diagonal().add_(len(self.training) * self.setting.weight_decay)
        factor, failed = torch.linalg.cholesky_ex(matrix)
        pivots = factor.diagonal().square()
        precision = torch.finfo(next(iter(self.training.params.values())).dtype).eps
        if bool(failed) or not bool(pivots.min() > len(matrix) * precision * pivots.max()):
            return None
        # What the correction has to say of this fit was not said of the damped one.
        return ByMatrix(replace(self.setting, damping=Damping(0.0)), self.matrix)

    @classmethod
    def fit(cls, setting: Setting) -> ByMatrix:
        hessian = setting.curvature == "hessian"
        return cls(setting, loss_hessian(setting.training) if hessian else sum_of_outer_products(setting.rows()))

    def with_damping(self, *, damping: float | None = None, relative: float | None = None) -> ByMatrix:
        ends = self.inverse.smallest, self.inverse.largest
        fitted = ByMatrix(self.setting.damped(damping, relative), self.matrix, ends)
        fitted.facts = {**self.setting.chosen(self.facts), **fitted.facts}
        return fitted

    def precondition(self, vectors: Vectors) -> Vectors:
        flat = self.training.flat
        return flat.split(self.inverse.apply(flat.join(vectors)))

    def leverage(self, root: torch.Tensor, gradient: torch.Tensor) -> Leverage:
        return Leverage.through(output_products(self.training, self.inverse.half), root, gradient)

    def on(self, training: Examples, weights: torch.Tensor) -> ByMatrix:
        other = copy.copy(self)
        other.training = training
        return other
