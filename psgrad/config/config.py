"""`Config`: all sections of the YAML file, and the rules between sections; and the sections that every
command shares besides model and data: loss, engine, report.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PrivateAttr, model_validator

from psgrad.config.analysis import AnalyzeConfig, GateConfig, ReviewConfig
from psgrad.config.data import SOURCE_KEYS, DataConfig
from psgrad.config.influence import MEASUREMENTS, InfluenceConfig
from psgrad.config.model import LABELS_FROM_TEXT, TASK_LOSSES, TASKS, ModelConfig
from psgrad.config.plugin_names import Group
from psgrad.config.privacy import PrivacyConfig
from psgrad.config.values import ConfigSection, FilePath, NamedSection, described, is_callable_spec

_ChunkSize = Annotated[int, Field(ge=1)] | Literal["auto"]


def _chunk_size(value: object) -> object:
    if value == "auto" or (type(value) is int and value >= 1):
        return value
    raise ValueError(f"got {described(value)}, expected a whole number of at least 1, or auto")


_BYTES = {
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)},
}
_LEAST_MEMORY = 1 << 20  # less is a forgotten unit


def _memory(value: object) -> object:
    """Bytes: a whole number of them, or a number with a unit."""
    if value == "auto":
        return value
    written = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+)\s*([a-z]+)", str(value).strip().lower())
    size = value if type(value) is int else None
    if isinstance(value, str) and written and written[2] in _BYTES:
        size = int(float(written[1]) * _BYTES[written[2]])
    if size is None:
        raise ValueError(
            f"got {described(value)}, expected auto, or a size such as 2GiB or 500 MB (B, KB, MB, GB, TB;"
            " KiB, MiB, GiB, TiB)"
        )
    if size < _LEAST_MEMORY:
        raise ValueError(
            f"got {described(value)}, which is {size:,} bytes; expected at least 1MiB; is its unit right?"
        )
    return size


class LossConfig(NamedSection):
    """The loss of one sample: a known name with options, or a callable. A bare string is the name alone."""

    group: ClassVar[Group] = "losses"

    name: str
    """A known loss, or module:callable(output, target) that returns one number for each sample; the other
    keys are its options.
    """

    @property
    def own(self) -> bool:
        """Whether it is a callable of the user's own."""
        return is_callable_spec(self.name)

    @model_validator(mode="after")
    def _no_options_of_a_callable(self) -> LossConfig:
        if self.own and self.options:
            instead = "; name the columns in data.target, as a list" if "columns" in self.options else ""
            raise ValueError(f"the loss {self.name!r} does not take {', '.join(self.options)}{instead}")
        return self


class EngineConfig(ConfigSection):
    """How the gradients are computed."""

    not_taken: ClassVar[Mapping[str, str]] = {
        "tokens_per_chunk": "set engine.memory, which bounds rows of any length",
    }

    device: str = "auto"
    """auto (a GPU if there is one), cpu, cuda or cuda:N."""
    chunk_size: Annotated[_ChunkSize, BeforeValidator(_chunk_size, json_schema_input_type=_ChunkSize)] = (
        "auto"
    )
    """Rows computed together; auto fits them to the memory."""
    memory: Annotated[
        int | Literal["auto"],
        BeforeValidator(_memory, json_schema_input_type=Annotated[int, Field(ge=_LEAST_MEMORY)] | str),
    ] = "auto"
    """The memory of a chunk, and of offloaded weights, up to half of it each: a size such as 2GiB; auto is a
    share of the free memory.
    """
    parameters: Literal["auto", "resident", "offloaded"] = "auto"
    """Where weights live: on the device (resident), or in their file or the host's memory (offloaded);
    auto is resident if they take at most half of the free memory.
    """
    process_timeout: Annotated[float, Field(gt=0, le=1e6)] = 3600.0
    """Seconds that one of several processes waits for the others, at most."""
    recompute: Literal["auto", "none", "blocks"] = "auto"
    """Whether the modules that repeat run again in the backward pass, to save memory; auto for offloaded
    weights, and when a row does not fit.
    """
    dtype: Literal["auto", "float32", "float64", "bfloat16"] = "auto"
    """Precision; auto is the one in which model.pretrained is saved, float32 for float16 and for other
    models. bfloat16 is mixed: products in it, trained parameters, sums and norms in float32.
    """
    verify: Annotated[int, Field(ge=0)] = 3
    """Rows whose gradient is checked against a plain one-sample gradient; 0 for none."""
    capture: Literal["auto", "off"] = "auto"
    """Whether a chunk's kernels are recorded once and replayed: off for models that change by row."""

    @model_validator(mode="after")
    def _memory_sizes_automatic_chunks(self) -> EngineConfig:
        if self.memory != "auto" and self.chunk_size != "auto" and self.parameters != "offloaded":
            raise ValueError(
                f"memory says how large an automatic chunk may get, and chunk_size is {self.chunk_size}; set"
                " one of the two"
            )
        return self


class ReportConfig(ConfigSection):
    """The report."""

    include_inputs: bool = True
    """Whether the report shows the inputs of samples."""
    title: str | None = None
    """Heading of the report."""


def _version(value: object) -> object:
    if type(value) is not int or value != 1:
        raise ValueError(f"got {described(value)}, expected 1, the only version of the config's format")
    return value


def _inherited(content: dict[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """The queries with the keys of data that they leave out, as far as both are of one kind: items of a
    factory have no columns that a file has. content: the queries. own: data.
    """
    ours, theirs = ({key for key in SOURCE_KEYS if each.get(key) is not None} for each in (own, content))
    # Without a source of their own they are rows of the data themselves.
    if not theirs or ("factory" in theirs) != ("factory" in ours):
        return content
    of_a_source = {*SOURCE_KEYS, "kwargs", "split"}
    return {key: each for key, each in own.items() if key not in of_a_source} | content


class Config(ConfigSection):
    """One config. Paths of inputs are relative to `base`, `output` is relative to the current directory."""

    not_taken: ClassVar[Mapping[str, str]] = {
        "allow_download": "download a model first by `hf download NAME`, a dataset by datasets.load_dataset",
    }
    filled_in: ClassVar[tuple[str, ...]] = ("loss",)

    version: Annotated[Literal[1], BeforeValidator(_version)]  # a Literal alone takes true for 1
    """Version of this format."""
    model: ModelConfig
    """The model: a factory, its arguments, and the weights to put in."""
    loss: LossConfig
    """The loss of one sample; that of model.task where it is left out."""
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
    review: ReviewConfig = Field(default_factory=ReviewConfig)
    """`psgrad review`: what a change of the training data may do and still pass."""
    output: FilePath
    """The run folder, relative to the current directory."""
    _base: Path = PrivateAttr(default_factory=Path)  # private, so that no file can set it

    def model_post_init(self, context: Any) -> None:
        """Takes `base` from the context: `Config.model_validate(content, context={"base": folder})`."""
        self._base = (context or {}).get("base", Path())

    def changed(self, section: str, **values: Any) -> Config:
        """This config with other values, which are known to be valid, in one section."""
        return self.model_copy(update={section: getattr(self, section).model_copy(update=values)})

    def output_of(self, kind: str) -> Path:
        """Where an evaluation or an audit is written by default: beside the run's folder."""
        return self.output.with_name(f"{self.output.name}-{kind}")

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
    def _queries_are_read_as_the_data_are(cls, value: Any) -> Any:
        """Keys that the queries leave out are those of data, but for its source."""
        if not isinstance(value, dict):
            return value
        influence, data = value.get("influence"), value.get("data")
        if not isinstance(influence, dict) or not isinstance(data, dict):
            return value
        queries = influence.get("queries")
        if not isinstance(queries, dict):
            return value
        return {**value, "influence": influence | {"queries": _inherited(queries, data)}}

    @model_validator(mode="after")
    def _named_loss_needs_a_target(self) -> Config:
        wanted = not self.loss.own and self.model.task not in LABELS_FROM_TEXT
        if self.data.path is not None and self.data.target is None and wanted:
            raise ValueError(
                f"data.target is missing: the loss {self.loss.name!r} compares the output with a target"
                " column"
            )
        return self

    @model_validator(mode="after")
    def _queries_need_a_target(self) -> Config:
        queries, named = self.influence.queries, self.influence.measurement.name in MEASUREMENTS
        measured = named and (self.influence.measurement.name != "loss" or not self.loss.own)
        measured &= self.model.task not in LABELS_FROM_TEXT
        if queries is not None and queries.path is not None and queries.target is None and measured:
            raise ValueError(
                f"influence.queries.target is missing: the measurement {self.influence.measurement.name!r}"
                " compares a query's output with its target; name the column, or measure by a callable of"
                " your own that does without"
            )
        return self
