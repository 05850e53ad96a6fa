"""The section of `psgrad influence --evaluate`: how models are trained again, how many of them, and what is
compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from psgrad.config.plugin_names import Group
from psgrad.config.values import CallableSpec, ConfigSection, Finite, NamedSection


class MethodConfig(NamedSection):
    """A method by name, a file of `psgrad/engine/influence/methods` or `module:Class`, with its options. A
    bare string is the name; options without a name are those of `influence`.
    """

    group: ClassVar[Group] = "methods"

    name: str = "influence"
    """A known method, or module:Class; the other keys are its options."""


EvaluationKind = Literal["loo", "lds", "removal"]

_STEPS = frozenset({"epochs", "batch_size", "learning_rate", "schedule"})
# The options of each optimizer, in addition to weight decay and the number of models at once.
_TAKES: Mapping[str, frozenset[str]] = {
    "sgd": _STEPS | {"momentum"},
    "adam": _STEPS,
    "adamw": _STEPS,
    "newton": frozenset(),
}
_ALWAYS = frozenset({"optimizer", "weight_decay", "together"})


class TrainConfig(ConfigSection):
    """How a model is trained again, from the fresh weights of the model's factory. A bare string is a
    training function of your own.

    That returns the trained model. The built-in trainer trains many models at once by `optimizer`.
    """

    bare: ClassVar[str] = "function"
    not_taken: ClassVar[Mapping[str, str]] = {
        "tolerance": "newton ends where no entry of the gradient of the mean loss is above 1e-10",
    }

    function: CallableSpec | None = None
    """module:callable, called as train(model, inputs, target, seed); null for the built-in trainer."""
    optimizer: Literal["sgd", "adam", "adamw", "newton"] = "adam"
    """Of the built-in trainer; newton is for convex objectives only."""
    epochs: Annotated[int, Field(ge=1)] = 50
    """Passes over the training rows; of sgd, adam and adamw."""
    batch_size: Annotated[int, Field(ge=1)] = 64
    """Rows in each step; of sgd, adam and adamw."""
    learning_rate: Annotated[Finite, Field(gt=0)] = 1e-3
    """Of sgd, adam and adamw."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate falls to zero; of sgd, adam and adamw."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Of sgd."""
    weight_decay: Annotated[Finite, Field(ge=0)] = 0.0
    """As in torch's optimisers; newton keeps n * weight_decay fixed on removal."""

    together: Annotated[int, Field(ge=1)] = 100
    """Models trained, and kept, at a time."""

    @model_validator(mode="after")
    def _options_of_this_training(self) -> TrainConfig:
        given = self.not_default()
        if self.function is not None:
            refused, who = (
                given - {"function", "together"},
                f"the function {self.function} trains as it wants to and",
            )
        else:
            refused, who = given - _ALWAYS - _TAKES[self.optimizer], self.optimizer
        if refused:
            raise ValueError(f"{who} does not take {', '.join(sorted(refused))}")
        return self


class EvaluationConfig(ConfigSection):
    """`psgrad influence --evaluate`: models trained again, and what is compared."""

    not_taken: ClassVar[Mapping[str, str]] = {
        "tuning": (
            "dampings are no longer tuned: list a method several times in influence.evaluate.methods, each"
            " with its own damping"
        ),
        "explained": "removal asks about at most 20 queries; influence.evaluate.queries: N takes fewer",
        "highest": "a fifth of influence.evaluate.removals are those with the highest self-influence",
    }

    train: TrainConfig = Field(default_factory=TrainConfig)
    """How a model is trained again."""
    methods: list[MethodConfig] = Field(default_factory=list)
    """Methods compared with influence.method, in the same tables."""
    queries: Annotated[int, Field(ge=1)] | None = None
    """The largest number of queries, drawn at random; null for all."""
    seeds: Annotated[int, Field(ge=1)] = 3
    """Trainings of each subset (lds) or removal (loo, removal)."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of everything drawn."""
    subsets: Annotated[int, Field(ge=3)] = 100
    """Of lds: how many subsets."""
    fraction: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Of lds: the share of the rows in each subset."""
    removals: Annotated[int, Field(ge=3)] = 100
    """Of loo: how many examples are left out, one at a time; a fifth of them have the highest
    self-influence.
    """
    ks: list[Annotated[int, Field(ge=1)]] = Field(default_factory=lambda: [10, 20, 50], min_length=1)
    """Of removal: how many proponents are left out."""
