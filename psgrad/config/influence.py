"""The section of `psgrad influence`: which queries, which method, at which checkpoints, and what is kept of
the scores.

The options of a method are its own, and checked where the method is known: see
psgrad/engine/influence/methods.

The section of `psgrad influence --evaluate`: how models are trained again, how many of them, and what is
compared.

An influence method of a config. Its options are its own, and checked where the method is known: see
psgrad/engine/influence/methods.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from psgrad.config.checkpoint_lists import listed_checkpoints
from psgrad.config.conditions import names_in_condition
from psgrad.config.data import DataConfig
from psgrad.config.values import (
    CallableSpec,
    FilePath,
    Finite,
    NamedSection,
    ParameterPatterns,
    Section,
    is_callable_spec,
    nearest,
)


class MethodConfig(NamedSection):
    """A method by name, a file of `psgrad/engine/influence/methods` or `module:Class`, with its options. A
    bare string is the name; options without a name are those of `influence`.
    """

    name: str = "influence"
    """A known method, or module:Class; the other keys are its options."""


EvaluationKind = Literal["loo", "lds", "mislabel", "removal"]

_STEPS = frozenset({"epochs", "batch_size", "learning_rate", "schedule"})
# What each way of training takes, besides weight decay and the number of models at once.
_TAKES: Mapping[str, frozenset[str]] = {
    "sgd": _STEPS | {"momentum"},
    "adam": _STEPS,
    "adamw": _STEPS,
    "newton": frozenset({"tolerance"}),
}
_ALWAYS = frozenset({"optimizer", "weight_decay", "together"})


class RecipeConfig(Section):
    """How a model is trained by mini-batches."""

    optimizer: Literal["sgd", "adam", "adamw"] = "adam"
    """As torch.optim has it."""
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
    """As in torch's optimisers."""

    @model_validator(mode="after")
    def _momentum_of_sgd(self) -> RecipeConfig:
        if self.momentum and self.optimizer in ("adam", "adamw"):
            raise ValueError(f"{self.optimizer} does not take momentum")
        return self


class TrainingConfig(RecipeConfig):
    """The training run that led to the model, which `method: replay` computes again: from its initial weights
    in an order of the rows that is known by the seed, each step along the mean loss of its batch.
    """

    seed: Annotated[int, Field(ge=0)] = 0
    """Of the fresh weights of the model's factory, and of the order of the rows, which is that of
    psgrad.engine.influence.training_run.training_batches.
    """
    initial: FilePath | None = None
    """A checkpoint of the weights that training began with; null for the factory's fresh ones."""
    tolerance: Annotated[Finite, Field(gt=0)] = 1e-3
    """How far the end of the run may be from model.checkpoint, as a share of the way from the initial
    weights.
    """


class TrainConfig(RecipeConfig):
    """How a model is trained again, from the fresh weights of the model's factory. A bare string is a
    training function of your own.

    function: `module:callable`, called as train(model, inputs, target, seed), which returns the trained
    model. Without it the built-in trainer trains many models at once by `optimizer`; newton, for convex
    objectives alone, holds n * weight_decay fixed on removal, and the others have weight_decay as torch's
    optimisers do. `together` models are trained, and kept, at a time.
    """

    function: CallableSpec | None = None
    """module:callable, called as train(model, inputs, target, seed); null for the built-in trainer."""
    optimizer: Literal["sgd", "adam", "adamw", "newton"] = "adam"  # type: ignore[assignment]
    """Of the built-in trainer; newton is for convex objectives only."""
    weight_decay: Annotated[Finite, Field(ge=0)] = 0.0
    """As in torch's optimisers; newton keeps n * weight_decay fixed on removal."""
    tolerance: Annotated[Finite, Field(gt=0)] = 1e-10
    """Norm of the gradient at which newton stops."""
    together: Annotated[int, Field(ge=1)] = 100
    """Models trained, and kept, at a time."""

    @model_validator(mode="before")
    @classmethod
    def _bare_function(cls, value: object) -> object:
        return {"function": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _options_of_this_training(self) -> TrainConfig:
        # A default says nothing: a resolved config, written out in full, must load again.
        given = {
            name for name, info in TrainConfig.model_fields.items() if getattr(self, name) != info.default
        }
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


class TuningConfig(Section):
    """The damping of each method that has one, chosen by the score on other subsets and other queries than
    those that are reported.

    subsets: how many others. queries: how many of the queries are set aside for it, at random, and not
    reported. dampings: the candidates, as multiples of the curvature's mean eigenvalue.
    """

    subsets: Annotated[int, Field(ge=3)] = 30
    """How many other subsets dampings are chosen on."""
    queries: Annotated[int, Field(ge=1)] = 60
    """Queries used for tuning only, drawn at random, and not reported."""
    dampings: list[Annotated[Finite, Field(gt=0)]] = Field(
        default_factory=lambda: [1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0], min_length=1
    )
    """Candidates, as multiples of the curvature's mean eigenvalue."""


class EvaluationConfig(Section):
    """`psgrad influence --evaluate`: models trained again, and what is compared."""

    train: TrainConfig = Field(default_factory=TrainConfig)
    """How a model is trained again."""
    methods: list[MethodConfig] = Field(default_factory=list)
    """Methods compared with influence.method, in the same tables."""
    queries: Annotated[int, Field(ge=1)] | None = None
    """The largest number of queries, drawn at random; null for all."""
    seeds: Annotated[int, Field(ge=1)] = 3
    """Trainings of each subset (lds), removal (loo, removal) or set of flips (mislabel: each set has one)."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of everything drawn."""
    subsets: Annotated[int, Field(ge=3)] = 100
    """Of lds: how many subsets."""
    fraction: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """Of lds: the share of the rows in each subset."""
    tuning: TuningConfig | None = None
    """Of lds: how dampings are chosen; by default they stay as they are."""
    removals: Annotated[int, Field(ge=3)] = 100
    """Of loo: how many examples are left out."""
    highest: Annotated[int, Field(ge=0)] = 20
    """Of loo: how many of the removals are those with the highest self-influence."""
    flips: Annotated[int, Field(ge=1)] = 5
    """Of mislabel: how many sets of flipped labels."""
    share: Annotated[float, Field(gt=0, lt=1)] = 0.1
    """Of mislabel: the share of the labels in each set."""
    ks: list[Annotated[int, Field(ge=1)]] = Field(default_factory=lambda: [10, 20, 50], min_length=1)
    """Of removal: how many proponents are left out."""
    explained: Annotated[int, Field(ge=2)] = 20
    """Of removal: for how many queries."""

    @model_validator(mode="after")
    def _highest_are_removals(self) -> EvaluationConfig:
        if self.highest > self.removals:
            raise ValueError(
                f"highest: {self.highest} of the removals are to be those with the highest self-influence, of"
                f" {self.removals}"
            )
        return self


MEASUREMENTS = ("loss", "margin", "logit")
"""What of a query is explained, by name."""


_CHOICES = ("rows", "ids", "where", "wrong", "worst")
QUERY_NAMES = ("id", "index", "target", "label", "loss", "prediction", "confidence", "correct")
"""The columns that influence.queries.where can name; label is another name of target."""


def _query_condition(value: str) -> str:
    names_in_condition(value, QUERY_NAMES)
    return value


class QueriesConfig(DataConfig):
    """The queries: a dataset of their own, described as `data` is, whose keys it has where it leaves them
    out; without a source of their own, they are rows of the training data.

    `rows` or `ids` are the rows to ask about, of which `where`, `wrong` and `worst`, in this order, keep
    some; left out, all of them.
    """

    rows: list[Annotated[int, Field(ge=0)]] | None = None
    """The rows that are queries, counted from 0; left out, all of them."""
    ids: list[str | int] | None = None
    """In place of rows: the ids of the rows that are queries."""
    where: Annotated[str, AfterValidator(_query_condition)] | None = None
    """A condition on id, index, target (or label), loss, prediction, confidence and correct."""
    wrong: bool = False
    """Only rows whose predicted class is another than their label."""
    worst: Annotated[int, Field(ge=1)] | None = None
    """Only so many rows, those with the largest loss."""

    @model_validator(mode="after")
    def _one_source(self) -> QueriesConfig:
        if len(self.sources_given) > 1:
            raise ValueError(f"give one of {', '.join(self.sources_given)}, not several")
        if self.sources_given:
            self._check_columns()
        elif not self.choice_given:
            raise ValueError(
                "neither path, dataset, images, factory nor rows, ids, where, wrong, worst says what the"
                " queries are; leave queries out to ask about all training rows"
            )
        return self

    @property
    def choice_given(self) -> set[str]:
        """The keys that choose among rows, those that are given."""
        return {key for key in _CHOICES if getattr(self, key) not in (None, False)}

    @model_validator(mode="after")
    def _each_row_once(self) -> QueriesConfig:
        if self.rows is not None and self.ids is not None:
            raise ValueError("rows and ids both say which rows are asked about; give one of them")
        for key, listed in (("rows", self.rows), ("ids", self.ids)):
            if listed is not None and not listed:
                raise ValueError(f"{key} is an empty list; name at least one row")
            if listed is not None and len(set(map(str, listed))) < len(listed):
                raise ValueError(f"a row is listed twice in {key}")
        return self

    @property
    def own_data(self) -> DataConfig | None:
        """The queries' own dataset; None where they are rows of the training data."""
        if not self.sources_given:
            return None
        return DataConfig.model_validate(self.model_dump(exclude=set(_CHOICES), exclude_unset=True))


class CheckpointConfig(Section):
    """One checkpoint: the weights, and the learning rate that the optimiser had then."""

    path: FilePath
    """The weights, relative to this config."""
    learning_rate: Annotated[Finite, Field(gt=0)] | None = None
    """The optimiser's learning rate there, which tracin needs; null for that of its trainer_state.json, or
    its metadata.
    """
    step: Annotated[int, Field(ge=0)] | None = None
    """Optimiser steps up to there; null for those of its trainer_state.json, or its metadata."""

    @model_validator(mode="before")
    @classmethod
    def _bare_path(cls, value: object) -> object:
        return {"path": value} if isinstance(value, str) else value


class IndexConfig(Section):
    """An index of the training gradients, built once by `psgrad influence index` and asked many times.

    `path` is relative to the current directory, as `output` is. The rest is as in
    psgrad.engine.influence.index.stored.IndexSpec.
    """

    path: FilePath
    """Folder of the index, relative to the current directory."""
    dimension: Annotated[int, Field(ge=1)] = 2048
    """Numbers stored for each gradient."""
    projection: Literal["sparse", "rademacher", "gaussian", "two-sided", "none"] = "sparse"
    """How gradients are projected; none keeps them whole."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the projection."""
    features: Literal["loss", "margin"] = "loss"
    """Gradients of the loss, or of the margin (for trak)."""
    dtype: Literal["float64", "float32", "float16", "bfloat16"] = "float32"
    """Precision of the stored numbers."""
    rows_per_shard: Annotated[int, Field(ge=1)] = 4096
    """Rows in each file of the index."""

    @model_validator(mode="before")
    @classmethod
    def _bare_path(cls, value: object) -> object:
        return {"path": value} if isinstance(value, str) else value


def _measurement_name(value: str) -> str:
    if value in MEASUREMENTS or is_callable_spec(value):
        return value
    close = nearest(value, MEASUREMENTS)
    suggestion = f"did you mean {close}? " if close else ""
    raise ValueError(
        f"there is no measurement {value!r}; {suggestion}known: {', '.join(MEASUREMENTS)}; or module:callable"
    )


class MeasurementConfig(Section):
    """What of a query is explained: its loss, the margin or the logit of its class, or a callable of (output,
    target) that returns one number. `larger_is` says whether a large one is good for the query; it is known
    for the named ones.
    """

    name: Annotated[str, AfterValidator(_measurement_name)] = "loss"
    """loss, margin, logit, or module:callable(output, target) that returns one number for each query."""
    larger_is: Literal["better", "worse"] | None = None
    """Of a callable of your own: whether a large value is good for the query."""

    @model_validator(mode="before")
    @classmethod
    def _bare_name(cls, value: object) -> object:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _only_for_callables(self) -> MeasurementConfig:
        if self.name in MEASUREMENTS and self.larger_is is not None:
            raise ValueError(f"larger_is goes with a callable of your own; of {self.name} it is known")
        if self.name not in MEASUREMENTS and self.larger_is is None:
            raise ValueError(
                "larger_is is missing: better, or worse as a loss has it; without it scores would have no"
                " sign"
            )
        return self


class InfluenceConfig(Section):
    """`psgrad influence`: which training examples made the model do this."""

    not_taken: ClassVar[Mapping[str, str]] = {
        "damping": "damping is an option of the method: influence.method.damping",
        "learning_rate": "learning rates go with checkpoints: influence.checkpoints",
        "learning_rates": (
            "each learning rate goes with its checkpoint, so that no list can have another length:"
            " influence.checkpoints: [{path: ..., learning_rate: ...}]"
        ),
    }

    queries: QueriesConfig | None = None
    """The samples to explain; by default the training rows themselves."""
    method: MethodConfig = Field(default_factory=MethodConfig)
    """How influence is estimated; docs/explanation/influence.md lists the methods and their options."""
    measurement: MeasurementConfig = Field(default_factory=MeasurementConfig)
    """The number of a query that is explained."""
    parameters: ParameterPatterns = None
    """Patterns of parameter names, such as [head.*]; null for all trainable ones."""
    checkpoints: Annotated[list[CheckpointConfig] | None, BeforeValidator(listed_checkpoints)] = None
    """Checkpoints of one training run, or a pattern such as run/*.safetensors or run/checkpoint-*; by default
    only the model's.
    """
    average: Literal["relative", "plain"] = "relative"
    """Over several checkpoints: relative divides each one's scores of a query by their root mean square over
    the training examples first, so that all of them count the same.
    """
    training: TrainingConfig | None = None
    """The training run, for method: replay."""
    top: Annotated[int, Field(ge=1)] = 10
    """Examples of either sign ranked for each query."""
    layers: Literal["none", "parameter", "module"] = "none"
    """Whether scores are also given for each parameter or module."""
    normalize: Literal["none", "self_influence", "preconditioned_norm"] = "none"
    """RelatIF: scores divided by the root of the example's self-influence, or by the norm of its
    preconditioned gradient.
    """
    index: IndexConfig | None = None
    """An index of the training gradients, built by `psgrad influence index`."""
    self_influence: Literal["auto", "always", "never"] = "auto"
    """Each example's influence on itself; auto leaves it out if it would cost one solve for each example."""
    check: Literal["auto", "always", "never"] = "auto"
    """Whether a few of the largest predicted changes are compared with training that continues without the
    row; auto takes as many steps as fit into ten seconds, or into half of the time of the scores.
    """
    evaluate: EvaluationConfig = Field(default_factory=EvaluationConfig)
    """`psgrad influence --evaluate`: models are trained again, and scores are compared with the result."""

    @model_validator(mode="after")
    def _each_checkpoint_once(self) -> InfluenceConfig:
        paths = [checkpoint.path for checkpoint in self.checkpoints or []]
        twice = next((path for path in paths if paths.count(path) > 1), None)
        if twice is not None:
            raise ValueError(f"the checkpoint {twice} is listed twice; it would count double")
        if self.checkpoints is not None and not paths:
            raise ValueError("checkpoints is an empty list; leave it out to use model.checkpoint")
        return self

    @model_validator(mode="after")
    def _checkpoints_in_order(self) -> InfluenceConfig:
        steps = [(each.path, each.step) for each in self.checkpoints or [] if each.step is not None]
        for (one, before), (other, after) in pairwise(steps):
            if one.parent == other.parent and after < before:
                raise ValueError(
                    f"{other} is of step {after} and is listed after {one}, of step {before}; list the"
                    " checkpoints of a run in the order of its steps"
                )
        return self

    @model_validator(mode="after")
    def _replay_needs_its_training(self) -> InfluenceConfig:
        replays = self.method.name == "replay"
        if replays and self.training is None:
            raise ValueError(
                "replay computes the training run again: describe it in influence.training (optimizer,"
                " epochs, batch_size, learning_rate, seed)"
            )
        if self.training is not None and not replays:
            raise ValueError(
                f"training is of method: replay, and the method is {self.method.name}; leave it out"
            )
        if replays and self.checkpoints:
            raise ValueError(
                "replay has one model, the end of its run: name that as model.checkpoint, or leave it out"
            )
        if replays and self.index is not None:
            raise ValueError("replay does not read an index; leave index out")
        return self

    @model_validator(mode="after")
    def _tracin_needs_learning_rates(self) -> InfluenceConfig:
        if self.method.name == "tracin":
            missing = [
                str(checkpoint.path)
                for checkpoint in self.checkpoints or []
                if checkpoint.learning_rate is None
            ]
            if not self.checkpoints:
                raise ValueError(
                    "tracin sums over checkpoints of one training run: list them, each with path and"
                    " learning_rate"
                )
            if missing:
                raise ValueError(
                    "tracin weighs each checkpoint by its learning rate, and there is none for"
                    f" {', '.join(missing)}"
                )
        return self
