"""Optimisers as functions of tensors, which can be differentiated: parameters, state and gradients to new
parameters and a new state, with the numbers of torch.optim.

The numbers of a step that are known beforehand (the learning rate, Adam's corrections of its means) come as
one tensor, so that one captured program serves all steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from psgrad.engine.gradients.flat import Vectors
from psgrad.engine.influence.evaluation.jobs import Recipe

State = dict[str, Vectors]
Update = Callable[[Vectors, State, Vectors, torch.Tensor], tuple[Vectors, State]]

_BETAS = (0.9, 0.999)
_EPSILON = 1e-8


@dataclass(frozen=True)
class Optimiser:
    """An optimiser of a recipe.

    Attributes:
        means: the parts of its state, each of which has the parameters' names and shapes, and begins at zero.
        update: (parameters, state, gradients, numbers of the step) to (parameters, state).
    """

    means: tuple[str, ...]
    update: Update

    def start(self, params: Vectors) -> State:
        """The state before the first step."""
        return {
            mean: {name: torch.zeros_like(value) for name, value in params.items()} for mean in self.means
        }


def optimiser_of(recipe: Recipe) -> Optimiser:
    """The optimiser that torch.optim has for this recipe (SGD, Adam or AdamW)."""
    if recipe.optimizer == "sgd":
        return Optimiser(("momentum",) if recipe.momentum else (), _sgd(recipe))
    return Optimiser(("mean", "square"), _adam(recipe))


def numbers_of(recipe: Recipe, step: int, steps: int, like: torch.Tensor) -> torch.Tensor:
    """[3]: the learning rate of a step, counted from 0, of so many, and the corrections of Adam's means."""
    first, second = (1 - beta ** (step + 1) for beta in _BETAS)
    return torch.tensor([recipe.rate(step, steps), first, second], dtype=like.dtype, device=like.device)


def _sgd(recipe: Recipe) -> Update:
    decay, momentum = recipe.weight_decay, recipe.momentum

    def update(
        params: Vectors, state: State, gradients: Vectors, numbers: torch.Tensor
    ) -> tuple[Vectors, State]:
        steps = {name: gradients[name] + decay * value for name, value in params.items()}
        if momentum:
            steps = {name: momentum * state["momentum"][name] + step for name, step in steps.items()}
        moved = {name: value - numbers[0] * steps[name] for name, value in params.items()}
        return moved, {"momentum": steps} if momentum else {}

    return update


def _adam(recipe: Recipe) -> Update:
    decoupled = recipe.optimizer == "adamw"
    decay, (first, second) = recipe.weight_decay, _BETAS

    def update(
        params: Vectors, state: State, gradients: Vectors, numbers: torch.Tensor
    ) -> tuple[Vectors, State]:
        moved, means, squares = {}, {}, {}
        for name, value in params.items():
            gradient = gradients[name] if decoupled else gradients[name] + decay * value
            means[name] = first * state["mean"][name] + (1 - first) * gradient
            squares[name] = second * state["square"][name] + (1 - second) * gradient.square()
            corrected = squares[name] / numbers[2]
            # the root of a square that is zero has no slope: its gradient was zero in all steps
            ever = corrected > 0
            root = torch.where(ever, torch.where(ever, corrected, 1.0).sqrt(), 0.0)
            kept = value - numbers[0] * decay * value if decoupled else value
            moved[name] = kept - numbers[0] * (means[name] / numbers[1]) / (root + _EPSILON)
        return moved, {"mean": means, "square": squares}

    return update
