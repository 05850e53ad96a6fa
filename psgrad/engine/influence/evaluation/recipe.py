"""How the built-in trainer trains."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

OptimizerName = Literal["sgd", "adam", "adamw", "newton"]
Schedule = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True)
class Recipe:
    """A training from fresh weights.

    Attributes:
        optimizer: sgd, adam and adamw are torch.optim's. newton minimises a convex objective exactly.
        epochs, batch_size: passes over the rows, in shuffled order, the last batch of a pass being the rest.
        learning_rate: of the first step. schedule: constant, or falling to zero by the last step, linearly or as half a cosine.
        momentum: of sgd.
        weight_decay: the optimiser's own. newton adds n * weight_decay / 2 * |theta|^2 to the sum of the losses, where n counts the whole
            training set whichever rows are left out: the objective that removals are predicted for.
        tolerance: newton ends where no entry of the gradient of the mean loss is larger.
        together: how many models are trained at once.
    """

    optimizer: OptimizerName = "adam"
    epochs: int = 50
    batch_size: int = 64
    learning_rate: float = 1e-3
    schedule: Schedule = "constant"
    momentum: float = 0.0
    weight_decay: float = 0.0
    tolerance: float = 1e-10
    together: int = 100

    def optimiser(self, parameters: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
        """torch's optimiser over stacked parameters: it works element by element, so that the models don't notice one another."""
        options: dict[str, Any] = {"lr": self.learning_rate, "weight_decay": self.weight_decay, "fused": True}
        if self.optimizer == "sgd":
            return torch.optim.SGD(parameters, momentum=self.momentum, **options)
        kind = torch.optim.Adam if self.optimizer == "adam" else torch.optim.AdamW
        return kind(parameters, **options)

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of step number `step` of so many."""
        left = 1 - step / steps
        factor = {"constant": 1.0, "linear": left, "cosine": (1 + math.cos(math.pi * (1 - left))) / 2}[self.schedule]
        return self.learning_rate * factor
