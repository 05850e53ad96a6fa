"""What a training run does in one step, and the derivative of that: a function of the parameters, the
optimiser's state, a batch and the weights of its examples.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from psgrad.engine.execution.objective import Objective
from psgrad.engine.gradients.flat import Vectors
from psgrad.engine.influence.evaluation.jobs import Recipe
from psgrad.engine.influence.optimisers import Optimiser, numbers_of, optimiser_of
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


class Steps(ABC):
    """How a run steps. The examples of a step are weighted: `after` is the step, `pulled` its derivative
    where all weights are 1.
    """

    errors: Callable[[], AbstractContextManager[None]] = nullcontext
    """What steps run under, for exceptions of the user's own code."""

    @abstractmethod
    def start(self, params: Vectors) -> Any:
        """The state before the first step."""

    @abstractmethod
    def after(
        self, params: Vectors, state: Any, batch: StepBatch, weights: torch.Tensor
    ) -> tuple[Vectors, Any]:
        """Parameters and state after a step with these weights [b]."""

    @abstractmethod
    def pulled(
        self, params: Vectors, state: Any, batch: StepBatch, of_params: Vectors, of_state: Any
    ) -> tuple[Vectors, Any, torch.Tensor]:
        """The cotangents before a step, and the derivatives by the weights [m, b], from the m cotangents
        after it. Of numbers that are not floating-point, cotangents are zero.
        """

    @property
    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """What the manifest says of them."""

    def known(self, step: int, of: int, like: torch.Tensor) -> Any:
        """The numbers of a step, counted from 0, of so many."""
        return None

    def require_same_again(  # noqa: B027 (steps of psgrad's own need no check)
        self, point: TrainingState, batch: StepBatch
    ) -> None:
        """Raises ModelError where a step can't be computed again: its code is not a function of tensors."""

    def depends_on_weights(self, point: TrainingState, batch: StepBatch) -> bool:
        """Whether the weights of its examples change what a step does."""
        return True

    def require_weights(self, seen: bool) -> None:  # noqa: B027 (as above)
        """Raises ModelError unless some step depended on weights."""


@dataclass(frozen=True)
class RecipeSteps(Steps):
    """Steps of torch.optim's optimisers along the mean over a batch of weight times loss."""

    objective: Objective
    recipe: Recipe

    @cached_property
    def optimiser(self) -> Optimiser:
        return optimiser_of(self.recipe)

    @property
    def facts(self) -> dict[str, Any]:
        return asdict(self.recipe)

    def known(self, step: int, of: int, like: torch.Tensor) -> torch.Tensor:
        return numbers_of(self.recipe, step, of, like)

    def start(self, params: Vectors) -> Any:
        return self.optimiser.start(params)

    def after(
        self, params: Vectors, state: Any, batch: StepBatch, weights: torch.Tensor
    ) -> tuple[Vectors, Any]:
        gradients, _ = grad(self._weighted, has_aux=True)(params, batch, weights)
        return self.optimiser.update(params, state, gradients, batch.known)

    def pulled(
        self, params: Vectors, state: Any, batch: StepBatch, of_params: Vectors, of_state: Any
    ) -> tuple[Vectors, Any, torch.Tensor]:
        # The derivative of the step's gradient along v, and that of each example's loss along v, come from
        # one forward derivative of the gradient: H v, and <v, g_i>, which is b times the derivative by w_i.
        size, known = len(batch.inputs[0]), batch.known
        weights = torch.ones(size, dtype=known.dtype, device=known.device)

        def gradient(params: Vectors) -> tuple[Vectors, torch.Tensor]:
            found: tuple[Vectors, torch.Tensor] = grad(self._weighted, has_aux=True)(params, batch, weights)
            return found

        gradients, _ = gradient(params)
        _, pull = vjp(
            lambda params, state, gradients: self.optimiser.update(params, state, gradients, known),
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
