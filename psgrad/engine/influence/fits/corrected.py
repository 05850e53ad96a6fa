"""Influence with the one-step leverage correction, on top of a way to invert the curvature."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from typing import Self

import torch

from psgrad.engine.examples import Examples
from psgrad.engine.influence.curvature.rows import output_factors
from psgrad.engine.influence.fits.setting import Setting
from psgrad.engine.influence.leverage import Leverage, with_cotangents
from psgrad.engine.influence.method import Fitted, Per, Preconditioned, ScoreBlock, SelfBlock


class Invertible(Preconditioned):
    """A fit whose scores can be corrected."""

    setting: Setting

    def has_leverage(self) -> bool:
        """Whether the rows' leverage can be had."""
        return True

    @abstractmethod
    def leverage(self, root: torch.Tensor, gradient: torch.Tensor) -> Leverage:
        """root, gradient: as `output_factors` has them."""

    @abstractmethod
    def on(self, training: Examples, weights: torch.Tensor) -> Self:
        """The same inverse for the same examples with other gradients. weights: of Leverage, by which they are others."""

    @abstractmethod
    def with_damping(self, *, damping: float | None = None, relative: float | None = None) -> Self:
        """The same curvature with another damping: an absolute one, or one relative to the mean eigenvalue."""


class Corrected(Fitted):
    """decrements: [n], twice what each removal's own step lowers the objective without it by, as far as the loss's gradient in the output
    is in the span of its second derivatives. facts: those of the fit, and `largest_leverage`, the largest eigenvalue of any example's
    L_i M_i.

    An example without which the training problem has no solution is told, and its scores are NaN.

    automatic: whether the correction goes with the damping that a default chose: with another damping there is none.
    """

    def __init__(self, plain: Invertible, *, automatic: bool = False) -> None:
        self.automatic = automatic
        training = plain.training
        root, coefficients, gradient = output_factors(training)
        self.plain = plain
        self.leverage = plain.leverage(root, gradient)
        self.decrements = (coefficients * self.leverage.pull).sum(1) + self.leverage.extra
        self.leverage.tell(training, plain.setting.say)
        weights = self.leverage.weights.nan_to_num(0.0)
        self.removed = plain.on(with_cotangents(training, gradient + (root @ weights.unsqueeze(2)).squeeze(2)), weights)
        self.facts = plain.facts  # not copied, as solvers add to them while they solve
        self.facts["largest_leverage"] = float(self.leverage.largest.max())
        self.calibrated, self.has_self_influence = plain.calibrated, plain.has_self_influence

    def solver(self) -> Preconditioned | None:
        return self.plain

    def with_damping(self, *, damping: float | None = None, relative: float | None = None) -> Fitted:
        """As that of the fit."""
        plain = self.plain.with_damping(damping=damping, relative=relative)
        if not self.automatic:
            return Corrected(plain)
        plain.facts["leverage"] = False
        return plain

    def scores(self, queries: Examples, per: Per = "total") -> Iterator[ScoreBlock]:
        return map(self.marked, self.removed.scores(queries, per))

    def marked(self, block: ScoreBlock) -> ScoreBlock:
        """The block with NaN for examples without a score."""
        gone = self.leverage.gone[block.start : block.stop].unsqueeze(1)
        return replace(block, scores={label: value.masked_fill(gone, torch.nan) for label, value in block.scores.items()})

    def self_influence(self) -> Iterator[SelfBlock]:
        # The removed part's norms are how far parameters move; its blocks need not be cut where those of the whole are.
        norms = torch.cat([block.preconditioned_norm for block in self.removed.self_influence()]).masked_fill(self.leverage.gone, torch.nan)
        for block in self.plain.self_influence():
            rows = slice(block.start, block.stop)
            own = block.self_influence + self.leverage.extra[rows]
            yield replace(block, self_influence=own, preconditioned_norm=norms[rows])
