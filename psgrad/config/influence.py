"""The section of `psgrad influence`: which queries, which method, at which checkpoints, and what is kept of the scores.

The options of a method are its own, and checked where the method is known: see psgrad/engine/influence/methods.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from psgrad.config.evaluation import EvaluationConfig
from psgrad.config.method import MethodConfig
from psgrad.config.sections import DataConfig
from psgrad.config.values import FilePath, Finite, ParameterPatterns, Section, is_callable_spec, nearest

MEASUREMENTS = ("loss", "margin", "logit")
"""What of a query is explained, by name."""


class QueriesConfig(DataConfig):
    """The queries: a dataset of their own, described as `data` is; left out, they are rows of the training data.

    `rows` are the rows to ask about, counted from 0; left out, all of them.
    """

    rows: list[Annotated[int, Field(ge=0)]] | None = None
    """The rows that are queries, counted from 0; left out, all of them."""

    @model_validator(mode="after")
    def _one_source(self) -> QueriesConfig:
        if self.path is not None and self.factory is not None:
            raise ValueError("give path (a file) or factory (a callable that returns a torch Dataset), not both")
        if self.path is not None and self.inputs is None:
            raise ValueError("inputs is missing: the name of the column that the model reads, or a list of names")
        if self.path is not None and self.kwargs:
            raise ValueError("kwargs are the arguments of a factory; a path takes none")
        if self.path is None and self.factory is None and self.rows is None:
            raise ValueError("neither path, factory nor rows says what the queries are; leave queries out to ask about all training rows")
        return self

    @model_validator(mode="after")
    def _each_row_once(self) -> QueriesConfig:
        if self.rows is not None and not self.rows:
            raise ValueError("rows is an empty list; name at least one row")
        if self.rows is not None and len(set(self.rows)) < len(self.rows):
            raise ValueError("a row is listed twice in rows")
        return self

    @property
    def dataset(self) -> DataConfig | None:
        """The queries' own dataset; None where they are rows of the training data."""
        if self.path is None and self.factory is None:
            return None
        return DataConfig.model_validate(self.model_dump(exclude={"rows"}, exclude_unset=True))


class CheckpointConfig(Section):
    """One checkpoint: the weights, and the learning rate that the optimiser had then."""

    path: FilePath
    """The weights, relative to this config."""
    learning_rate: Annotated[Finite, Field(gt=0)] | None = None
    """The optimiser's learning rate there; tracin needs it."""

    @model_validator(mode="before")
    @classmethod
    def _bare_path(cls, value: object) -> object:
        return {"path": value} if isinstance(value, str) else value


class IndexConfig(Section):
    """An index of the training gradients, built once by `psgrad influence index` and asked many times.

    `path` is relative to the current directory, as `output` is. The rest is as in psgrad.engine.influence.index.IndexSpec.
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
    raise ValueError(f"there is no measurement {value!r}; {suggestion}known: {', '.join(MEASUREMENTS)}; or module:callable")


class MeasurementConfig(Section):
    """What of a query is explained: its loss, the margin or the logit of its class, or a callable of (output, target) that returns one
    number. `larger_is` says whether a large one is good for the query; it is known for the named ones."""

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
            raise ValueError("larger_is is missing: better, or worse as a loss has it; without it scores would have no sign")
        return self


class InfluenceConfig(Section):
    """`psgrad influence`: which training examples made the model do this."""

    not_taken: ClassVar[Mapping[str, str]] = {
        "damping": "damping is an option of the method: influence.method.damping",
        "learning_rate": "learning rates go with checkpoints: influence.checkpoints",
    }

    queries: QueriesConfig | None = None
    """The samples to explain; by default the training rows themselves."""
    method: MethodConfig = Field(default_factory=MethodConfig)
    """How influence is estimated; docs/explanation/influence.md lists the methods and their options."""
    measurement: MeasurementConfig = Field(default_factory=MeasurementConfig)
    """The number of a query that is explained."""
    parameters: ParameterPatterns = None
    """Patterns of parameter names, such as [head.*]; null for all trainable ones."""
    checkpoints: list[CheckpointConfig] | None = None
    """Checkpoints of one training run; by default only model.checkpoint."""
    top: Annotated[int, Field(ge=1)] = 10
    """Examples of either sign ranked for each query."""
    layers: Literal["none", "parameter", "module"] = "none"
    """Whether scores are also given for each parameter or module."""
    normalize: Literal["none", "self_influence", "preconditioned_norm"] = "none"
    """RelatIF: scores divided by the root of the example's self-influence, or by the norm of its preconditioned gradient."""
    index: IndexConfig | None = None
    """An index of the training gradients, built by `psgrad influence index`."""
    self_influence: Literal["auto", "always", "never"] = "auto"
    """Each example's influence on itself; auto leaves it out if it would cost one solve for each example."""
    check: Literal["auto", "always", "never"] = "auto"
    """Whether a few of the largest predicted changes are compared with training that continues without the row; auto takes as many steps
    as fit into ten seconds, or into half of the time of the scores."""
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
    def _tracin_needs_learning_rates(self) -> InfluenceConfig:
        if self.method.name == "tracin":
            missing = [str(checkpoint.path) for checkpoint in self.checkpoints or [] if checkpoint.learning_rate is None]
            if not self.checkpoints:
                raise ValueError("tracin sums over checkpoints of one training run: list them, each with path and learning_rate")
            if missing:
                raise ValueError(f"tracin weighs each checkpoint by its learning rate, and there is none for {', '.join(missing)}")
        return self
