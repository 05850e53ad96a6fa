"""What a training run does in one step, and the derivative of that: a function of the parameters, the
optimiser's state, a batch and the weights of its examples. Optimisers are functions of tensors, too, which
can be differentiated: parameters, state and gradients to new parameters and a new state, with the numbers of
torch.optim.

The numbers of a step that are known beforehand (the learning rate, Adam's corrections of its means) come as
one tensor, so that one captured program serves all steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from psgrad.engine.execution.objective import Objective
from psgrad.engine.gradients.flat import Vectors
from psgrad.engine.influence.evaluation.jobs import Recipe
from psgrad.engine.transforms import grad, jvp, vjp, vmap
from psgrad.engine.transforms.private_torch import tree_leaves


class StepBatch(NamedTuple):
    """What a step has besides parameters, state and weights.

    Attributes:
        inputs, target: of b examples. known: the numbers of the step that do not depend on its examples.
    """

    inputs: tuple[torch.Tensor, ...]
    target: torch.Tensor | None
    known: Any


@dataclass(frozen=True)
class TrainingState:
    """Where a run is before a step: parameters, and the state that goes from step to step, a tree of
    tensors.
    """

    params: Vectors
    state: Any

    @property
    def bytes(self) -> int:
        return sum(leaf.nbytes for leaf in tree_leaves((self.params, self.state)))


@dataclass(frozen=True)
class RecipeSteps:
    """Steps of torch.optim's optimisers along the mean over a batch of weight times loss: `after` is the
    step, `pulled` its derivative where all weights are 1.
    """

    objective: Objective
    recipe: Recipe

    @cached_property
    def update(self) -> Update:
        """(parameters, state, gradients, numbers of the step) to (parameters, state)."""
        return _sgd(self.recipe) if self.recipe.optimizer == "sgd" else _adam(self.recipe)

    def known(self, step: int, of: int, like: torch.Tensor) -> torch.Tensor:
        """[3]: the learning rate of step `step` (from 0) of `of`, and the corrections of Adam's means."""
        numbers = self.recipe.rate(step, of), *(1 - beta ** (step + 1) for beta in _BETAS)
        return torch.tensor(numbers, dtype=like.dtype, device=like.device)

    def start(self, params: Vectors) -> State:
        """The state before the first step: means with the parameters' names and shapes, which begin at
        zero.
        """
        means: tuple[str, ...] = ("mean", "square")
        if self.recipe.optimizer == "sgd":
            means = ("momentum",) if self.recipe.momentum else ()
        return {mean: {name: torch.zeros_like(value) for name, value in params.items()} for mean in means}

    def after(
        self, params: Vectors, state: Any, batch: StepBatch, weights: torch.Tensor
    ) -> tuple[Vectors, Any]:
        """Parameters and state after a step with these weights [b]."""
        gradients, _ = grad(self._weighted, has_aux=True)(params, batch, weights)
        return self.update(params, state, gradients, batch.known)

    def pulled(
        self, params: Vectors, state: Any, batch: StepBatch, of_params: Vectors, of_state: Any
    ) -> tuple[Vectors, Any, torch.Tensor]:
        """The cotangents before a step, and the derivatives by the weights [m, b], from the m cotangents
        after it.
        """
        # The derivative of the step's gradient along v, and that of each example's loss along v, come from
        # one forward derivative of the gradient: H v, and <v, g_i>, which is b times the derivative by w_i.
        size, known = len(batch.inputs[0]), batch.known
        weights = torch.ones(size, dtype=known.dtype, device=known.device)

        def gradient(params: Vectors) -> tuple[Vectors, torch.Tensor]:
            found: tuple[Vectors, torch.Tensor] = grad(self._weighted, has_aux=True)(params, batch, weights)
            return found

        gradients, _ = gradient(params)
        _, pull = vjp(
            lambda params, state, gradients: self.update(params, state, gradients, known),
            params,
            state,
            gradients,
        )
        before, before_state, along = vmap(lambda p, s: pull((p, s)))(of_params, of_state)
        _, (curved, slopes) = _tangents(gradient, params, along)
        moved = {name: value + curved[name] for name, value in before.items()}
        return moved, before_state, slopes / size

    def _weighted(
        self, params: Vectors, batch: StepBatch, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(the mean over a batch of weight times loss, the losses [b])."""
        dims = (None, 0, None if batch.target is None else 0)
        losses, _ = vmap(self.objective.loss, in_dims=dims)(params, batch.inputs, batch.target)
        return (weights.to(losses.dtype) * losses).mean(), losses


def _tangents(function: Any, params: Vectors, along: Vectors) -> Any:
    """(values, tangents [m, ...]) of a function along m vectors, name -> [m, *shape]."""
    return vmap(lambda vector: jvp(function, (params,), (vector,)))(along)


State = dict[str, Vectors]
Update = Callable[[Vectors, State, Vectors, torch.Tensor], tuple[Vectors, State]]

_BETAS = (0.9, 0.999)
_EPSILON = 1e-8


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
