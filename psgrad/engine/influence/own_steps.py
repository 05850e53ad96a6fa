"""The steps of a user's own function, checked: it has to be a function of tensors that a run can compute
again, and that the weights of the examples act on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from psgrad.engine.gradients.flat import Vectors
from psgrad.engine.influence.training_steps import StepBatch, Steps, TrainingState
from psgrad.engine.transforms import vjp, vmap
from psgrad.engine.transforms.private_torch import tree_flatten, tree_leaves, tree_map, tree_unflatten
from psgrad.errors import ModelError, TransformError, one_line

SIGNATURE = "step(params, state, batch, weights) -> params, state"
# Two runs of a step may differ by this share of its change: rounding, where a GPU adds in another order.
_ROUNDING = 1e-3
_PURE = "a function of its arguments alone: what it keeps from step to step, such as a count, is in its state"
_DRAWS = (
    "draw by a generator that is made in the step from a seed and a count in the state, or leave the random"
    " part (such as dropout) out"
)


@dataclass(frozen=True)
class OwnSteps(Steps):
    """Steps of a function of the user's.

    Attributes:
        name: of the function, for messages.
        function: (params, state, batch, weights) to (params, state). params: name -> parameter. state: a tree
            of tensors. batch: the tensors of the batch's examples, inputs and then the target. weights: [b].
        first: params to the state before the first step; None for an empty one.
        errors: what it is called under.
    """

    name: str
    function: Callable[..., Any]
    first: Callable[[Vectors], Any] | None = None
    errors: Callable[[], AbstractContextManager[None]] = field(default=nullcontext)

    @property
    def facts(self) -> dict[str, Any]:
        return {"step": self.name}

    def start(self, params: Vectors) -> Any:
        if self.first is None:
            return {}
        with self.errors():
            state = self.first(dict(params))
        odd = next((leaf for leaf in tree_leaves(state) if not isinstance(leaf, torch.Tensor)), None)
        if odd is not None:
            raise ModelError(
                f"the first state of the training step {self.name} has a value of type"
                f" {type(odd).__name__}; expected dicts, lists or tuples of tensors",
                hint=(
                    "a count or a rate that is a number of Python; make it a tensor: torch.zeros((),"
                    " dtype=torch.int64) for a count"
                ),
            )
        # An own copy: a function may return the parameters themselves.
        return tree_map(lambda leaf: leaf.detach().clone(), state)

    def after(
        self, params: Vectors, state: Any, batch: StepBatch, weights: torch.Tensor
    ) -> tuple[Vectors, Any]:
        tensors = batch.inputs if batch.target is None else (*batch.inputs, batch.target)
        # Dicts of its own: a function may put new values into the ones that it gets.
        given = tree_map(lambda leaf: leaf, (dict(params), state))
        return self._checked(params, state, self.function(*given, tensors, weights))

    def pulled(
        self, params: Vectors, state: Any, batch: StepBatch, of_params: Vectors, of_state: Any
    ) -> tuple[Vectors, Any, torch.Tensor]:
        leaves, tree = tree_flatten(state)
        smooth = [place for place, leaf in enumerate(leaves) if leaf.is_floating_point()]

        def step(
            params: Vectors, smooth_leaves: list[torch.Tensor], weights: torch.Tensor
        ) -> tuple[Vectors, list[torch.Tensor]]:
            whole = list(leaves)
            for place, leaf in zip(smooth, smooth_leaves, strict=True):
                whole[place] = leaf
            moved, after = self.after(params, tree_unflatten(whole, tree), batch, weights)
            changed = tree_leaves(after)
            return moved, [changed[place] for place in smooth]

        like = next(iter(params.values()))
        weights = torch.ones(len(batch.inputs[0]), dtype=like.dtype, device=like.device)
        _, pull = vjp(step, params, [leaves[place] for place in smooth], weights)
        cotangents = tree_leaves(of_state)
        before, before_smooth, derivatives = vmap(lambda p, s: pull((p, s)))(
            of_params, [cotangents[place] for place in smooth]
        )
        for place, leaf in zip(smooth, before_smooth, strict=True):
            cotangents[place] = leaf
        return before, tree_unflatten(cotangents, tree), derivatives

    def require_same_again(self, point: TrainingState, batch: StepBatch) -> None:
        like = next(iter(point.params.values()))
        weights = torch.ones(len(batch.inputs[0]), dtype=like.dtype, device=like.device)
        begun = [leaf.clone() for leaf in tree_leaves((point.params, point.state))]
        one, other = (tree_leaves(self.after(point.params, point.state, batch, weights)) for _ in range(2))
        if _apart(begun, tree_leaves((point.params, point.state))):
            raise ModelError(
                f"the training step {self.name} writes into the tensors that it is given; expected new"
                " tensors of parameters and state; those of the step before stay as they are",
                hint=(
                    "an update in place, such as p -= rate * g or p.sub_(...); compute new tensors: p -"
                    " rate * g"
                ),
            )
        apart, way = _apart(one, other), _apart(one, begun)
        if math.isfinite(way) and not apart <= _ROUNDING * way:
            raise ModelError(
                one_line(
                    f"the training step {self.name} can't be computed again: the first step, run twice from"
                    f" the same parameters and state, ended {apart / way if way else 1:.2g} times as far"
                    " apart as it goes",
                    "expected " + (_PURE),
                ),
                hint=one_line(
                    "random numbers of PyTorch's global generator, or a variable outside of the step", _DRAWS
                ),
            )

    def depends_on_weights(self, point: TrainingState, batch: StepBatch) -> bool:
        # A random direction: the derivative along it is zero for all examples only where there is none.
        random = torch.Generator().manual_seed(0)

        def direction(leaf: torch.Tensor) -> torch.Tensor:
            drawn = torch.randn((1, *leaf.shape), generator=random, dtype=torch.float64)
            return drawn.to(leaf) if leaf.is_floating_point() else torch.zeros_like(leaf).unsqueeze(0)

        of_params, of_state = tree_map(direction, (point.params, point.state))
        try:
            *_, derivatives = self.pulled(point.params, point.state, batch, of_params, of_state)
        except TransformError as error:
            raise ModelError(
                f"the training step {self.name} can't be differentiated: {error.message}",
                hint=error.hint
                or "take gradients in the step by torch.func.grad, or by grad of psgrad.engine.transforms",
            ) from error
        return bool((derivatives != 0).any())

    def require_weights(self, seen: bool) -> None:
        if not seen:
            raise ModelError(
                f"the training step {self.name} does not use the weights of its examples: the derivative"
                " of each step by each of them is zero; expected a step along the mean of weights *"
                " losses, or another function of the weights [b]",
                hint=(
                    "the mean of the losses without weights, or an update under torch.no_grad() or of"
                    " detached gradients, which has no derivative; multiply the losses [b] by weights"
                    " [b], and leave no_grad() and detach() out"
                ),
            )

    def _checked(self, params: Vectors, state: Any, returned: Any) -> tuple[Vectors, Any]:
        if not isinstance(returned, tuple | list) or len(returned) != 2 or not isinstance(returned[0], dict):
            raise self._error(
                f"returned {_words(returned)}",
                "it returns the parameters alone, or more than parameters and state",
                "end it with `return params, state`",
            )
        moved, after = returned
        names = sorted(moved.keys() ^ params.keys())
        if names:
            raise self._error(
                f"returned parameters {'without' if names[0] in params else 'with'} {names[0]}",
                "it makes the dict of only some of the parameters, or of others",
                "return a dict with all names that it is given",
            )
        leaves, tree = tree_flatten(state)
        after_leaves, after_tree = tree_flatten(after)
        if after_tree != tree:
            raise self._error(
                "returned a state of another structure than it was given",
                "an entry that is new, or missing, after the step",
                "give the first state all of its entries: influence.training.state",
            )
        pairs = [(f"the parameter {name}", value, moved[name]) for name, value in params.items()]
        pairs += [
            (f"number {place} of its state", leaf, new)
            for place, (leaf, new) in enumerate(zip(leaves, after_leaves, strict=True))
        ]
        for what, before, new in pairs:
            if _kind(new) != _kind(before):
                raise self._error(
                    f"was given {what} as {_kind(before)} and returned it as {_kind(new)}",
                    "a mean over another axis, a number of Python, or a tensor of another type in the sum",
                    "look at what is added to it: shapes and types stay the same in all steps",
                )
        return {name: moved[name] for name in params}, after

    def _error(self, what: str, cause: str, hint: str) -> ModelError:
        return ModelError(
            f"the training step {self.name} {what}; expected {SIGNATURE}, of the same names, structure,"
            " shapes and types as it is given",
            hint=one_line(cause, hint),
        )


def _kind(value: Any) -> str:
    """The type and shape of a tensor, in words."""
    if not isinstance(value, torch.Tensor):
        return f"an object of type {type(value).__name__}"
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def _words(returned: Any) -> str:
    if isinstance(returned, tuple | list):
        kinds = ", ".join(type(each).__name__ for each in returned)
        return f"a {type(returned).__name__} of {len(returned)}: {kinds}"
    return f"an object of type {type(returned).__name__}"


def _apart(ones: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    """The distance of two lists of tensors."""
    squares = [
        (one.double() - other.double()).square().sum().cpu() for one, other in zip(ones, others, strict=True)
    ]
    return float(torch.stack(squares).sum().sqrt())
