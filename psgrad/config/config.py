"""`Config`: all sections of the YAML file, and the rules between sections."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr, model_validator

from psgrad.config.analysis import AnalyzeConfig, GateConfig
from psgrad.config.data import SOURCE_KEYS, DataConfig
from psgrad.config.influence import InfluenceConfig
from psgrad.config.influence_queries import MEASUREMENTS
from psgrad.config.model import LABELS_FROM_TEXT, TASK_LOSSES, TASKS, ModelConfig
from psgrad.config.privacy import PrivacyConfig
from psgrad.config.shared_sections import (
    LOSS_OPTIONS,
    EngineConfig,
    LossConfig,
    ReportConfig,
)
from psgrad.config.values import ConfigSection, FilePath, described


def _version(value: object) -> object:
    if type(value) is not int or value != 1:
        raise ValueError(f"got {described(value)}, expected 1, the only version of the config's format")
    return value


def _inherited(content: Any, path: tuple[str, ...]) -> Any:
    """A config whose dataset at `path` has the keys of data that it leaves out, as far as both are of one
    kind: items of a factory have no columns that a file has.
    """
    groups = [content]
    for key in path:
        groups.append(groups[-1].get(key) if isinstance(groups[-1], dict) else None)
    given, own = groups[-1], content.get("data") if isinstance(content, dict) else None
    if not isinstance(given, dict) or not isinstance(own, dict):
        return content
    ours, theirs = ({key for key in SOURCE_KEYS if each.get(key) is not None} for each in (own, given))
    if path[-1] == "queries" and not theirs:
        return content  # rows of the data themselves
    if theirs and ("factory" in theirs) != ("factory" in ours):
        return content
    of_a_source = {*SOURCE_KEYS, "kwargs", "config", "split"} if theirs else set()
    found: Any = {key: each for key, each in own.items() if key not in of_a_source} | given
    for key, group in zip(reversed(path), reversed(groups[:-1]), strict=True):
        found = {**group, key: found}
    return found


class Config(ConfigSection):
    """One config. Paths of inputs are relative to `base`, `output` is relative to the current directory."""

    version: Annotated[Literal[1], BeforeValidator(_version)]  # a Literal alone takes true for 1
    """Version of this format."""
    model: ModelConfig
    """The model: a factory, its arguments, and the weights to put in."""
    loss: LossConfig
    """The loss of one sample; that of model.task where it is left out."""
    allow_download: bool = False
    """Whether models, tokenizers and datasets may be downloaded by their hub ids."""
    data: DataConfig
    """The dataset, and which of its columns are which."""
    engine: EngineConfig = Field(default_factory=EngineConfig)
    """How gradients are computed; the defaults suit most runs."""
    analyze: AnalyzeConfig = Field(default_factory=AnalyzeConfig)
    """What `psgrad analyze` measures of each sample."""
    gate: GateConfig = Field(default_factory=GateConfig)
    """What a run may hold and still pass `psgrad check` or `psgrad analyze --check`."""
    report: ReportConfig = Field(default_factory=ReportConfig)
    """What report.html shows."""
    privacy: PrivacyConfig | None = None
    """A differentially private run, `psgrad dp-step`."""
    influence: InfluenceConfig = Field(default_factory=InfluenceConfig)
    """`psgrad influence`: which training examples made the model do this."""
    output: FilePath
    """The run folder, relative to the current directory."""
    _base: Path = PrivateAttr(default_factory=Path)  # private, so that no file can set it

    def model_post_init(self, context: Any) -> None:
        """Takes `base` from the context: `Config.model_validate(content, context={"base": folder})`."""
        self._base = (context or {}).get("base", Path())

    @property
    def base(self) -> Path:
        """The folder of the config file; the current directory for a config that was not read from a file."""
        return self._base

    @model_validator(mode="before")
    @classmethod
    def _task_implies_the_loss(cls, value: Any) -> Any:
        model = value.get("model") if isinstance(value, dict) else None
        task = model.get("task") if isinstance(model, dict) else None
        return {"loss": TASK_LOSSES[task], **value} if task in TASKS else value

    @model_validator(mode="before")
    @classmethod
    def _other_data_are_read_as_the_data_are(cls, value: Any) -> Any:
        """Keys that the trusted data and the queries leave out are those of data, but for its source."""
        for path in (("analyze", "outliers", "reference", "data"), ("influence", "queries")):
            value = _inherited(value, path)
        return value

    @model_validator(mode="after")
    def _named_loss_needs_a_target(self) -> Config:
        wanted = self.loss.name in LOSS_OPTIONS and self.model.task not in LABELS_FROM_TEXT
        if self.data.path is not None and self.data.target is None and wanted:
            raise ValueError(
                f"data.target is missing: the loss {self.loss.name!r} compares the output with a target"
                " column"
            )
        return self

    @model_validator(mode="after")
    def _only_masked_lm_hides_tokens(self) -> Config:
        for key in sorted(self.data.not_default() & {"masked", "seed"}):
            if self.model.task != "masked-lm":
                raise ValueError(
                    f"data.{key} is given, and nothing reads it; expected the task masked-lm, or no {key}"
                )
        return self

    @model_validator(mode="after")
    def _queries_need_a_target(self) -> Config:
        queries, named = self.influence.queries, self.influence.measurement.name in MEASUREMENTS
        measured = named and (self.influence.measurement.name != "loss" or self.loss.name in LOSS_OPTIONS)
        measured &= self.model.task not in LABELS_FROM_TEXT
        if queries is not None and queries.path is not None and queries.target is None and measured:
            raise ValueError(
                f"influence.queries.target is missing: the measurement {self.influence.measurement.name!r}"
                " compares a query's output with its target; name the column, or measure by a callable of"
                " your own that does without"
            )
        return self
