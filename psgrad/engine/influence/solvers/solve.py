"""What all solvers are: fits that multiply by the inverse of a damped curvature."""

from __future__ import annotations

import copy
from abc import abstractmethod
from typing import Self

import torch

from psgrad.engine.execution.examples import Examples
from psgrad.engine.influence.curvature.operator import Curvature
from psgrad.engine.influence.damping import Damping
from psgrad.engine.influence.fit_facts import FitFacts
from psgrad.engine.influence.method import Preconditioned


class Solve(Preconditioned):
    """Products with (n (C + (weight_decay + damping) I))^-1, C the mean curvature.

    damping: resolved, in units of C. mean_eigenvalue: of C. said: the facts about the fit.
    """

    def __init__(
        self, curvature: Curvature, weight_decay: float, damping: Damping, mean_eigenvalue: float
    ) -> None:
        super().__init__(curvature.training)
        self.curvature, self.weight_decay, self.mean_eigenvalue = curvature, weight_decay, mean_eigenvalue
        self.damping = damping.resolve(mean_eigenvalue)
        self.said = FitFacts(
            curvature=curvature.kind,
            damping=self.damping,
            mean_eigenvalue=mean_eigenvalue,
            weight_decay=weight_decay,
        )

    @property
    def facts(self) -> FitFacts:
        return self.said

    @property
    def shift(self) -> float:
        """What is added to the diagonal of n C."""
        return len(self.curvature.training) * (self.weight_decay + self.damping)

    @property
    def has_leverage(self) -> bool:
        """Whether `leverage` can be computed."""
        return True

    @abstractmethod
    def leverage(self, root: torch.Tensor, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(S_i' M_i S_i [n, R, R], S_i' M_i r_i [n, R]) of all n examples, as leverage.py has them. root S_i
        [n, C, R], gradient r_i [n, C]: as `output_factors` has them.
        """

    def on(self, training: Examples, weights: torch.Tensor) -> Self:
        """This inverse for the same n examples with other gradients. weights [n, R]: those of `Leverage`, by
        which the gradients differ.
        """
        other = copy.copy(self)
        other.training = training
        return other
