"""The section of `psgrad influence`: which number of which queries, which method, at which checkpoints, what
is kept of the scores; the index of training gradients: what it holds, and how it is searched; and how
models are trained again to evaluate scores, how many of them, and what is compared.

The options of a method are its own, and checked where the method is known: see
psgrad/engine/influence/methods.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from psgrad.config.checkpoint_lists import listed_checkpoints
from psgrad.config.data import QueriesConfig
from psgrad.config.plugin_names import Group
from psgrad.config.values import (
    CallableSpec,
    ConfigSection,
    FilePath,
    Finite,
    NamedSection,
    ParameterPatterns,
    first_twice,
    is_callable_spec,
)
from psgrad.wording import did_you_mean

# -- methods, and models that are trained again --------------------------------------------------------------


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


# -- the section ---------------------------------------------------------------------------------------------

MEASUREMENTS = ("loss", "margin", "logit", "log_probability")
"""What of a query is explained, by name."""


def _measurement_name(value: str) -> str:
    if value in MEASUREMENTS or is_callable_spec(value):
        return value
    meant = did_you_mean(value, MEASUREMENTS, before="", after=" ")
    raise ValueError(
        f"there is no measurement {value!r}; {meant}known: {', '.join(MEASUREMENTS)}; or module:callable"
    )


class MeasurementConfig(ConfigSection):
    """What of a query is explained: its loss, the margin or the logit of its class, the log-probability of
    its class or of all its tokens, or a callable of (output, target) that returns one number. `larger_is`
    says whether a large one is good for the query; it is known for the named ones.
    """

    bare: ClassVar[str] = "name"

    name: Annotated[str, AfterValidator(_measurement_name)] = "loss"
    """loss, margin, logit, log_probability, or module:callable(output, target) that returns one number for
    each query.
    """
    larger_is: Literal["better", "worse"] | None = None
    """Of a callable of your own: whether a large value is good for the query."""

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


class IndexConfig(ConfigSection):
    """An index of the training gradients, built once by `psgrad influence index` and asked many times.

    All but `path` is as in psgrad.engine.influence.index.stored_index.IndexSpec.
    """

    bare: ClassVar[str] = "path"
    not_taken: ClassVar[Mapping[str, str]] = {"seed": "the projection of an index has one seed"}

    path: FilePath
    """Folder of the index, relative to the current directory."""
    dimension: Annotated[int, Field(ge=1)] = 2048
    """Numbers stored for each gradient."""
    projection: Literal["sparse", "two-sided", "none"] = "sparse"
    """How gradients are projected; none keeps them whole."""
    features: Literal["loss", "margin"] = "loss"
    """Gradients of the loss, or of the margin (for trak)."""
    dtype: Literal["float64", "float32", "float16", "bfloat16", "int8"] = "float32"
    """Precision of the stored numbers."""
    rows_per_shard: Annotated[int, Field(ge=1)] = 4096
    """Rows in each file of the index."""


class CheckpointConfig(ConfigSection):
    """One checkpoint: the weights, and the learning rate that the optimiser had then."""

    bare: ClassVar[str] = "path"
    not_taken: ClassVar[Mapping[str, str]] = {"step": "scores are averaged over checkpoints in any order"}

    path: FilePath
    """The weights, relative to this config."""
    learning_rate: Annotated[Finite, Field(gt=0)] | None = None
    """The optimiser's learning rate there, which tracin needs; null for that of its trainer_state.json, or
    its metadata.
    """


class InfluenceConfig(ConfigSection):
    """`psgrad influence`: which training examples made the model do this."""

    not_taken: ClassVar[Mapping[str, str]] = {
        "training": "no method computes a training run again: list its checkpoints in influence.checkpoints",
        "damping": "damping is an option of the method: influence.method.damping",
        "learning_rate": "learning rates go with checkpoints: influence.checkpoints",
        "learning_rates": (
            "each learning rate goes with its checkpoint, so that no list can have another length:"
            " influence.checkpoints: [{path: ..., learning_rate: ...}]"
        ),
        "average": "scores of several checkpoints are put on one scale before they are averaged",
        "over_queries": "all queries together are ranked by their mean score; scores.parquet has each query",
        "layers": "scores are of all parameters together: choose some by influence.parameters",
        "index_search": "an index is read whole, and all scores are exact; leave it out",
        "query_tokens": "tokens.parquet has all tokens of the queries: choose its rows by query_token",
    }

    queries: QueriesConfig | None = None
    """The samples to explain; by default the training rows themselves."""
    method: MethodConfig = Field(default_factory=MethodConfig)
    """How influence is estimated; docs/explanation/influence.md lists the methods and their options."""
    measurement: MeasurementConfig = Field(default_factory=MeasurementConfig)
    """The number of a query that is explained."""
    parameters: ParameterPatterns = None
    """Patterns of parameter names, such as [head.*]; null for all trainable ones."""
    checkpoints: Annotated[
        list[CheckpointConfig] | None,
        BeforeValidator(listed_checkpoints, json_schema_input_type=str | list[str | CheckpointConfig] | None),
    ] = None
    """Checkpoints of one training run, each a path or {path, learning_rate}, or a pattern such as
    run/*.safetensors or run/checkpoint-*; by default only the model's.
    """
    top: Annotated[int, Field(ge=1)] = 10
    """Examples of either sign ranked for each query."""
    level: Literal["sample", "token"] = "sample"
    """Whether the ranked pairs of the queries that the report shows are also divided over the tokens of both;
    of a loss of positions.
    """
    normalize: Literal["none", "self_influence", "preconditioned_norm"] = "none"
    """RelatIF: scores divided by the root of the example's self-influence, or by the norm of its
    preconditioned gradient.
    """
    groups: str | None = None
    """A column of the training data, such as a document or a source: scores are also summed over the rows
    that agree in it.
    """
    contrast: list[Annotated[list[str | int], Field(min_length=2, max_length=2)]] | None = None
    """Pairs of ids of queries: which training examples help the first one more than the second."""
    index: IndexConfig | None = None
    """An index of the training gradients, built by `psgrad influence index`."""
    self_influence: Literal["auto", "always", "never"] = "auto"
    """Each example's influence on itself; auto leaves it out if it would cost one solve for each example."""
    check: Literal["auto", "always", "never"] = "auto"
    """Whether a few of the largest predicted changes are compared with training that continues without
    the row; auto for about fifteen seconds.
    """
    evaluate: EvaluationConfig = Field(default_factory=EvaluationConfig)
    """`psgrad influence --evaluate`: models are trained again, and scores are compared with the result."""

    @model_validator(mode="after")
    def _each_checkpoint_once(self) -> InfluenceConfig:
        paths = [checkpoint.path for checkpoint in self.checkpoints or []]
        twice = first_twice(paths)
        if twice is not None:
            raise ValueError(f"the checkpoint {twice} is listed twice; it would count double")
        if self.checkpoints is not None and not paths:
            raise ValueError("checkpoints is an empty list; leave it out to use model.checkpoint")
        return self

    @model_validator(mode="after")
    def _tokens_of_one_checkpoint(self) -> InfluenceConfig:
        if self.level == "token" and len(self.checkpoints or ()) > 1:
            raise ValueError(
                f"level: token divides the scores of one checkpoint, and {len(self.checkpoints or ())} are"
                " listed"
            )
        if self.level == "token" and self.index is not None:
            raise ValueError("level: token reads the gradients of tokens, which an index has not")
        return self

    @model_validator(mode="after")
    def _contrasts_of_two(self) -> InfluenceConfig:
        if self.contrast is not None and not self.contrast:
            raise ValueError("contrast is an empty list; name two queries, such as [[a, b]]")
        alone = next((pair for pair in self.contrast or () if str(pair[0]) == str(pair[1])), None)
        if alone is not None:
            raise ValueError(f"contrast compares the query {alone[0]!r} with itself; name two queries")
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
