"""Points in the space of a model's inputs, and the value and gradient of the loss or of a logit there.

Floating-point inputs are points as they are; inputs of ids are points by the embeddings that look them up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from psgrad import random_state
from psgrad.engine.execution.objective import Objective
from psgrad.engine.gradients.terms import accumulating
from psgrad.engine.transforms import grad_and_value, vmap

Inputs = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class InputPlace:
    """One tensor that attribution is about.

    Attributes:
        input: which of the model's inputs it belongs to, counted from 0.
        module: the embedding that looks this input's ids up, by name; None where the input holds floats, and
            is the tensor itself.
        call: which of that embedding's calls in a forward pass, counted from 0.
    """

    input: int
    module: str | None = None
    call: int = 0

    @property
    def name(self) -> str:
        return (
            f"input {self.input}"
            if self.module is None
            else f"{self.module}, call {self.call}, of input {self.input}"
        )


def places_of(objective: Objective, inputs: Inputs) -> list[InputPlace]:
    """The places of a model, found in one plain forward pass of the first sample, inputs [1, ...] each.
    Exceptions of the model pass through.

    An embedding counts if it gets all of an input's ids, unchanged: a view of them, not a shifted, clipped or
    cut copy. Inputs of whole numbers without an embedding have none.
    """
    own = objective.forward.of_model(inputs)
    places = [InputPlace(number) for number, x in enumerate(own) if x.is_floating_point()]
    calls: dict[str, int] = {}
    handles = []

    def note(name: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        call = calls[name] = calls.get(name, -1) + 1
        for number, x in enumerate(own):
            if not x.is_floating_point() and args and _same_numbers(args[0], x):
                places.append(InputPlace(number, name, call))

    try:
        for name, module in _embeddings(objective.model).items():
            handles.append(module.register_forward_hook(lambda *seen, name=name: note(name, *seen)))
        with torch.no_grad(), random_state.torch_restored():
            objective.forward(objective.model, *inputs)
    finally:
        for handle in handles:
            handle.remove()
    return sorted(places, key=lambda place: place.input)


@contextmanager
def in_place(
    model: nn.Module, places: list[InputPlace], values: Mapping[InputPlace, torch.Tensor]
) -> Iterator[None]:
    """Replaces the results of embeddings by these values, [1, ...] each, inside the context."""
    with _hooked(model, places, lambda place, output: values[place]):
        yield


@contextmanager
def looked_up(model: nn.Module, places: list[InputPlace]) -> Iterator[dict[InputPlace, torch.Tensor]]:
    """A context that collects the results of embeddings, [1, ...] each, in a dict as the model runs."""
    noted: dict[InputPlace, torch.Tensor] = {}

    def note(place: InputPlace, output: torch.Tensor) -> None:
        noted[place] = output

    with _hooked(model, places, note):
        yield noted


@contextmanager
def _hooked(model: nn.Module, places: list[InputPlace], act: Any) -> Iterator[None]:
    """A context in which act(place, output) is called for each place in an embedding; its result, if not
    None, replaces the output.
    """
    wanted = {(place.module, place.call): place for place in places if place.module is not None}
    calls: dict[str, int] = {}
    handles = []

    def hook(name: str, output: torch.Tensor) -> torch.Tensor | None:
        call = calls[name] = calls.get(name, -1) + 1
        place = wanted.get((name, call))
        return None if place is None else act(place, output)  # type: ignore[no-any-return]

    try:
        for name, module in _embeddings(model).items():
            if any(name == place.module for place in places):
                handles.append(
                    module.register_forward_hook(lambda module, args, output, name=name: hook(name, output))
                )
        yield
    finally:
        for handle in handles:
            handle.remove()


def _embeddings(model: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if isinstance(module, nn.Embedding)}


def _same_numbers(given: Any, ids: torch.Tensor) -> bool:
    """Whether a module got these ids: the same memory, from the same place on, and all of it."""
    return (
        isinstance(given, torch.Tensor)
        and given.data_ptr() == ids.data_ptr()
        and given.numel() == ids.numel()
    )


Of = Literal["loss", "target", "prediction"]
Values = tuple[torch.Tensor, ...]
"""For each place [k, ...]: an input, or what an embedding looked up, as it came out of it."""


@dataclass(frozen=True)
class Scalar:
    """The scalar that is attributed: the loss, or the model's output for the class of the label or of its own
    prediction.

    randomness: as for vmap.
    """

    objective: Objective
    places: list[InputPlace]
    of: Of
    randomness: str = "error"

    def values(self, inputs: Inputs) -> Values:
        """The values of the samples at the places."""

        def looked(*sample: torch.Tensor) -> list[torch.Tensor]:
            with looked_up(self.objective.model, self.places) as noted:
                self.objective.predict(self.objective.params, sample)
            return [noted[place] for place in self.places if place.module is not None]

        embedded = iter(
            vmap(looked, randomness=self.randomness)(*inputs)
            if any(place.module for place in self.places)
            else ()
        )
        return tuple(inputs[place.input] if place.module is None else next(embedded) for place in self.places)

    def classes(self, inputs: Inputs, target: torch.Tensor | None) -> torch.Tensor | None:
        """[k] int64: the classes whose outputs are attributed, the same along a path; None for the loss."""
        if self.of == "loss":
            return None
        if self.of == "target":
            assert target is not None, "a loss over classes without targets"
            return target.argmax(-1) if target.is_floating_point() else target
        outputs: torch.Tensor = vmap(
            lambda *sample: self.objective.predict(self.objective.params, sample), randomness=self.randomness
        )(*inputs)
        return outputs.argmax(-1)

    def at(
        self, values: Values, inputs: Inputs, target: torch.Tensor | None, classes: torch.Tensor | None
    ) -> torch.Tensor:
        """[k]: the scalar at these points."""
        return self._mapped(self._of_one, values, inputs, target, classes)  # type: ignore[no-any-return]

    def gradient(
        self, values: Values, inputs: Inputs, target: torch.Tensor | None, classes: torch.Tensor | None
    ) -> tuple[Values, torch.Tensor]:
        """(its gradient in the values, itself [k])."""
        return self._mapped(grad_and_value(self._of_one), values, inputs, target, classes)  # type: ignore[no-any-return]

    def _mapped(
        self, function: Callable[..., Any], values: Values, inputs: Inputs, *others: torch.Tensor | None
    ) -> Any:
        dims = (0, 0, *(None if x is None else 0 for x in others))
        return vmap(function, dims, randomness=self.randomness)(values, inputs, *others)

    def _of_one(
        self, values: Values, inputs: Inputs, target: torch.Tensor | None, chosen: torch.Tensor | None
    ) -> torch.Tensor:
        here = dict(zip(self.places, values, strict=True))
        whole = {place.input: value for place, value in here.items() if place.module is None}
        given = tuple(whole.get(number, x) for number, x in enumerate(inputs))
        with in_place(self.objective.model, self.places, here):
            if chosen is None:
                value: torch.Tensor = self.objective.loss(self.objective.params, given, target)[0]
                return value
            output = self.objective.predict(self.objective.params, given)
        return accumulating(output.gather(0, chosen.clamp(0, len(output) - 1).unsqueeze(0)).squeeze(0))


@dataclass(frozen=True)
class Point:
    """A chunk of k samples, and the scalar and its gradient at points in the space of their inputs.

    Attributes:
        values: where the samples lie.
        rows: [k] int64, which samples they are.
    """

    scalar: Scalar
    inputs: Inputs
    target: torch.Tensor | None
    rows: torch.Tensor
    values: Values
    classes: torch.Tensor | None

    @classmethod
    def of(cls, scalar: Scalar, inputs: Inputs, target: torch.Tensor | None, rows: torch.Tensor) -> Point:
        """The point of k samples: inputs and target [k, ...], rows [k] int64, their numbers."""
        return cls(scalar, inputs, target, rows, scalar.values(inputs), scalar.classes(inputs, target))

    def gradient(self, values: Values | None = None) -> Values:
        """The scalar's gradient at these values, by default at the samples themselves."""
        return self.scalar.gradient(
            self.values if values is None else values, self.inputs, self.target, self.classes
        )[0]

    def at(self, values: Values) -> torch.Tensor:
        """[k] float64: the scalar at these values."""
        return self.scalar.at(values, self.inputs, self.target, self.classes).double()

    def with_token(self, token: int) -> Values:
        """The values of samples with this id everywhere, for inputs of ids; the samples' own elsewhere."""
        ids = {place.input for place in self.scalar.places if place.module is not None}
        return self.scalar.values(
            tuple(torch.full_like(x, token) if number in ids else x for number, x in enumerate(self.inputs))
        )
