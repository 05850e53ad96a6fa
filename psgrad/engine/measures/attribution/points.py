"""Points of a chunk of samples in the space of a model's inputs, and what the model says there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from psgrad.engine.gradients.terms import accumulating
from psgrad.engine.measures.attribution.places import Inputs, Place, in_place, looked_up
from psgrad.engine.objective import Objective
from psgrad.engine.transforms import grad_and_value, vmap

Of = Literal["loss", "target", "prediction"]
Values = tuple[torch.Tensor, ...]
"""For each place [k, ...]: an input, or what an embedding looked up, as it came out of it."""


@dataclass(frozen=True)
class Scalar:
    """What is attributed: the loss, or the model's output for the class of the label or of its own prediction.

    randomness: as for vmap.
    """

    objective: Objective
    places: list[Place]
    of: Of
    randomness: str = "error"

    def values(self, inputs: Inputs) -> Values:
        """Where the samples lie."""

        def looked(*sample: torch.Tensor) -> list[torch.Tensor]:
            with looked_up(self.objective.model, self.places) as noted:
                self.objective.predict(self.objective.params, sample)
            return [noted[place] for place in self.places if place.module is not None]

        found = iter(vmap(looked, randomness=self.randomness)(*inputs) if any(place.module for place in self.places) else ())
        return tuple(inputs[place.input] if place.module is None else next(found) for place in self.places)

    def classes(self, inputs: Inputs, target: torch.Tensor | None) -> torch.Tensor | None:
        """[k] int64: the classes whose outputs are attributed, the same all along a path; None for the loss."""
        if self.of == "loss":
            return None
        if self.of == "target":
            assert target is not None, "a loss over classes without targets"
            return target.argmax(-1) if target.is_floating_point() else target
        outputs: torch.Tensor = vmap(lambda *sample: self.objective.predict(self.objective.params, sample), randomness=self.randomness)(
            *inputs
        )
        return outputs.argmax(-1)

    def at(self, values: Values, inputs: Inputs, target: torch.Tensor | None, classes: torch.Tensor | None) -> torch.Tensor:
        """[k]: the scalar at these points."""
        return self._mapped(self._of_one, values, inputs, target, classes)  # type: ignore[no-any-return]

    def gradient(
        self, values: Values, inputs: Inputs, target: torch.Tensor | None, classes: torch.Tensor | None
    ) -> tuple[Values, torch.Tensor]:
        """(its gradient in the values, itself [k])."""
        return self._mapped(grad_and_value(self._of_one), values, inputs, target, classes)  # type: ignore[no-any-return]

    def _mapped(self, function: Callable[..., Any], values: Values, inputs: Inputs, *others: torch.Tensor | None) -> Any:
        dims = (0, 0, *(None if x is None else 0 for x in others))
        return vmap(function, dims, randomness=self.randomness)(values, inputs, *others)

    def _of_one(self, values: Values, inputs: Inputs, target: torch.Tensor | None, chosen: torch.Tensor | None) -> torch.Tensor:
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
    """A chunk of k samples, and what may be asked of the scalar along the way to them.

    Attributes:
        values: where the samples lie. rows: [k] int64, which samples they are.
    """

    scalar: Scalar
    inputs: Inputs
    target: torch.Tensor | None
    rows: torch.Tensor
    values: Values
    classes: torch.Tensor | None

    @classmethod
    def of(cls, scalar: Scalar, inputs: Inputs, target: torch.Tensor | None, rows: torch.Tensor) -> Point:
        return cls(scalar, inputs, target, rows, scalar.values(inputs), scalar.classes(inputs, target))

    def gradient(self, values: Values | None = None) -> Values:
        """The scalar's gradient at these values, at the samples themselves where none are given."""
        return self.scalar.gradient(self.values if values is None else values, self.inputs, self.target, self.classes)[0]

    def at(self, values: Values) -> torch.Tensor:
        """[k] float64: the scalar at these values."""
        return self.scalar.at(values, self.inputs, self.target, self.classes).double()

    def with_token(self, token: int) -> Values:
        """The values of samples that hold this id everywhere, where ids are looked up; the samples' own elsewhere."""
        ids = {place.input for place in self.scalar.places if place.module is not None}
        return self.scalar.values(tuple(torch.full_like(x, token) if number in ids else x for number, x in enumerate(self.inputs)))
