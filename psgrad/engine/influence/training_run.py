"""A training run that is computed again, step by step, forward and backward.

The run is a function of its training examples' weights: step t goes along the mean over its batch of
w_i * loss_i, where all w_i are 1. `TrainingRun.weight_derivatives` is the exact derivative of a number of the
last parameters with respect to each w_i. With w_i = 0 an example is left out while all else stays: initial
weights, order, batches. Ilyas and Engstrom, "MAGIC: Near-Optimal Data Attribution for Deep Learning" (2025);
Engstrom et al., "Optimizing ML Training with Metagradient Descent" (2025).

States of the forward run are kept where they fit into memory. Where they do not, some are kept and the steps
between them are computed again, level by level.

Optimisers are functions of tensors, which can be differentiated: parameters, state and gradients to new
parameters and a new state, with the numbers of torch.optim. The numbers of a step that are known beforehand
(the learning rate, Adam's corrections of its means) come as one tensor, so that one captured program serves
all steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from psgrad.engine.execution.objective import Objective
from psgrad.engine.free_memory import free_memory
from psgrad.engine.gradients.flat import Vectors
from psgrad.engine.influence.evaluation.jobs import LoadedRows, Recipe
from psgrad.engine.transforms import capture, grad, jvp, vjp, vmap
from psgrad.engine.transforms.private_torch import tree_leaves
from psgrad.errors import InfluenceError

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


# The share of the free memory that states of the run may take.
_SHARE = 4
# Fewer states than these at a level would compute most steps many times.
_FEWEST = 8


def training_batches(rows: int, *, epochs: int, batch_size: int, seed: int) -> list[torch.Tensor]:
    """The numbers of the rows of each step, int64 [b]: a permutation of all rows for each epoch, cut into
    batches, the last of which may be smaller.
    """
    shuffles = np.random.default_rng([seed, 1])
    found: list[torch.Tensor] = []
    for _ in range(epochs):
        found += torch.from_numpy(shuffles.permutation(rows)).split(batch_size)
    return found


@dataclass(frozen=True)
class TrainingState:
    """Where a run is before a step: parameters, and the optimiser's state."""

    params: Vectors
    state: State

    @property
    def bytes(self) -> int:
        return sum(leaf.nbytes for leaf in tree_leaves((self.params, self.state)))


@dataclass(frozen=True)
class TrainingRun:
    """A deterministic training run.

    Attributes:
        objective: model and loss. Its own parameters count for nothing.
        rows: the training set, [n, ...] each.
        recipe: how; any but newton.
        seed: of the order of the rows: that of the built-in trainer of an evaluation.
        initial: name -> parameter, where the run begins.
        kept: how many states are kept at once; None for as many as fit into a quarter of the free memory.
        fresh: seed -> the initial parameters of another run; None where there are no others.
    """

    objective: Objective
    rows: LoadedRows
    recipe: Recipe
    seed: int
    initial: Vectors
    kept: int | None = None
    fresh: Callable[[int], Vectors] | None = None

    def on(self, rows: torch.Tensor, seed: int) -> TrainingRun:
        """A run of the same recipe on some of the examples, rows [k], in another order, and from other
        initial parameters where there are any.
        """
        inputs = tuple(x[rows] for x in self.rows.inputs)
        part = LoadedRows(inputs, None if self.rows.target is None else self.rows.target[rows])
        initial = self.initial if self.fresh is None else self.fresh(seed)
        return replace(self, rows=part, seed=seed, initial=initial)

    @cached_property
    def batches(self) -> list[torch.Tensor]:
        """The numbers of the rows of each step, int64 [b]."""
        recipe = self.recipe
        found = training_batches(
            len(self.rows), epochs=recipe.epochs, batch_size=recipe.batch_size, seed=self.seed
        )
        return [batch.to(self.device) for batch in found]

    @property
    def device(self) -> torch.device:
        return next(iter(self.initial.values())).device

    @cached_property
    def final(self) -> Vectors:
        """The parameters after the last step. Raises InfluenceError for a run that diverges."""
        point = TrainingState(self.initial, self.optimiser.start(self.initial))
        for step in range(len(self.batches)):
            point = self._after(point, step)
        self._require_finite(point.params)
        return point.params

    def retrained(self, weights: torch.Tensor) -> Vectors:
        """name -> [K, *shape]: the parameters after the same run with other weights [K, n] of the examples,
        all K at once.
        """
        count = len(weights)
        params = {name: value.expand(count, *value.shape).clone() for name, value in self.initial.items()}
        state = self.optimiser.start(params)
        weights = weights.to(self._like)
        for step, batch in enumerate(self.batches):
            params, state = self._stacked(
                params, state, *self._batch(batch), weights[:, batch], self._numbers(step)
            )
        return params

    def weight_derivatives(self, cotangents: Vectors) -> torch.Tensor:
        """[m, n] float64: the derivatives of m numbers with respect to each example's weight.

        cotangents: name -> [m, *shape], the derivatives of the numbers with respect to the last parameters.
        """
        count = len(next(iter(cotangents.values())))
        found = torch.zeros(count, len(self.rows), dtype=torch.float64, device=self.device)
        of_state: State = {
            mean: {name: torch.zeros_like(value) for name, value in cotangents.items()}
            for mean in self.optimiser.means
        }
        start = TrainingState(self.initial, self.optimiser.start(self.initial))
        for step, point in self._backward(start, 0, len(self.batches)):
            batch = self.batches[step]
            cotangents, of_state, derivatives = self._pulled(
                point.params, point.state, *self._batch(batch), self._numbers(step), cotangents, of_state
            )
            found[:, batch] += derivatives.double()
        return found

    # -- one step --------------------------------------------------------------------------------------------

    @cached_property
    def optimiser(self) -> Optimiser:
        return optimiser_of(self.recipe)

    @property
    def _like(self) -> torch.Tensor:
        return next(iter(self.initial.values()))

    def _numbers(self, step: int) -> torch.Tensor:
        return numbers_of(self.recipe, step, len(self.batches), self._like)

    def _batch(self, batch: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
        target = self.rows.target
        return tuple(x[batch] for x in self.rows.inputs), None if target is None else target[batch]

    def _after(self, point: TrainingState, step: int) -> TrainingState:
        inputs, target = self._batch(self.batches[step])
        weights = torch.ones(len(self.batches[step]), dtype=self._like.dtype, device=self.device)
        return TrainingState(
            *self._step(point.params, point.state, inputs, target, weights, self._numbers(step))
        )

    def _weighted(
        self, params: Vectors, inputs: Any, target: torch.Tensor | None, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(the mean over a batch of weight times loss, the losses [b])."""
        dims = (None, 0, None if target is None else 0)
        losses, _ = vmap(self.objective.loss, in_dims=dims)(params, inputs, target)
        return (weights.to(losses.dtype) * losses).mean(), losses

    def _one_step(
        self, params: Vectors, state: State, inputs: Any, target: Any, weights: Any, numbers: Any
    ) -> tuple[Vectors, State]:
        gradients, _ = grad(self._weighted, has_aux=True)(params, inputs, target, weights)
        return self.optimiser.update(params, state, gradients, numbers)

    @cached_property
    def _step(self) -> Any:
        return capture(self._one_step, say=lambda why: None)

    @cached_property
    def _stacked(self) -> Any:
        stacked = vmap(self._one_step, in_dims=(0, 0, None, None, 0, None))
        return capture(stacked, say=lambda why: None)

    @cached_property
    def _pulled(self) -> Any:
        """The cotangents before a step and the derivatives by the weights [m, b], from those after it.

        The derivative of the step's gradient along v, and that of each example's loss along v, come from one
        forward derivative of the gradient: H v, and <v, g_i>, which is b times the derivative by w_i.
        """

        def pulled(
            params: Vectors,
            state: State,
            inputs: Any,
            target: Any,
            numbers: Any,
            of_params: Any,
            of_state: Any,
        ) -> tuple[Vectors, State, torch.Tensor]:
            size = len(inputs[0])
            weights = torch.ones(size, dtype=numbers.dtype, device=numbers.device)

            def gradient(params: Vectors) -> tuple[Vectors, torch.Tensor]:
                found: tuple[Vectors, torch.Tensor] = grad(self._weighted, has_aux=True)(
                    params, inputs, target, weights
                )
                return found

            gradients, _ = gradient(params)
            _, pull = vjp(
                lambda params, state, gradients: self.optimiser.update(params, state, gradients, numbers),
                params,
                state,
                gradients,
            )
            before, before_state, along = vmap(lambda p, s: pull((p, s)))(of_params, of_state)
            _, (curved, slopes) = _tangents(gradient, params, along)
            moved = {name: value + curved[name] for name, value in before.items()}
            return moved, before_state, slopes / size

        return capture(pulled, say=lambda why: None)

    # -- states of the forward run, in reverse order ---------------------------------------------------------

    def _backward(self, start: TrainingState, first: int, last: int) -> Iterator[tuple[int, TrainingState]]:
        """(step, the point before it) of the steps last - 1, ..., first. start: the point before `first`."""
        width = self._width(start)
        if last - first <= width:
            points = [start]
            for step in range(first, last - 1):
                points.append(self._after(points[-1], step))
            for step in reversed(range(first, last)):
                yield step, points.pop()
            return
        parts, starts = _parts(first, last, width), [start]
        for part in parts[:-1]:
            point = starts[-1]
            for step in range(part.start, part.stop):
                point = self._after(point, step)
            starts.append(point)
        for part in reversed(parts):
            yield from self._backward(starts.pop(), part.start, part.stop)

    def _width(self, point: TrainingState) -> int:
        """How many points are kept at one level."""
        if self.kept is not None:
            return max(self.kept, 2)
        return max(_FEWEST, free_memory(self.device) // _SHARE // max(point.bytes, 1))

    def _require_finite(self, params: Vectors) -> None:
        if all(bool(value.isfinite().all()) for value in params.values()):
            return
        raise InfluenceError(
            "the training that influence.training describes diverged: its weights are not finite",
            cause="the learning rate is too high for this model, or its loss is not bounded on these rows",
            next_step="set a smaller influence.training.learning_rate",
        )


def _tangents(function: Any, params: Vectors, along: Vectors) -> Any:
    """(values, tangents [m, ...]) of a function along m vectors, name -> [m, *shape]."""
    return vmap(lambda vector: jvp(function, (params,), (vector,)))(along)


def _parts(first: int, last: int, count: int) -> list[slice]:
    """Steps first, ..., last - 1 in so many parts of like length."""
    ends = [first + (last - first) * number // count for number in range(count + 1)]
    return [slice(start, stop) for start, stop in pairwise(ends) if stop > start]
