"""The sections that every command shares: model, loss, data, engine, report."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from psgrad.config.values import CallableSpec, FilePath, Finite, Section, described, is_callable_spec, nearest

DATA_SUFFIXES = (".npz", ".csv", ".parquet", ".safetensors")

LOSS_OPTIONS: Mapping[str, frozenset[str]] = {
    "cross_entropy": frozenset({"label_smoothing", "weight", "ignore_index"}),
    "token_cross_entropy": frozenset({"label_smoothing", "weight", "ignore_index"}),
    "nll": frozenset({"weight", "ignore_index"}),
    "bce_with_logits": frozenset(),
    "mse": frozenset(),
    "l1": frozenset(),
    "smooth_l1": frozenset({"beta"}),
    "huber": frozenset({"delta"}),
}
"""The losses that a config may name, and the options that each of them takes."""


def _chunk_size(value: object) -> object:
    if value == "auto" or (type(value) is int and value >= 1):
        return value
    raise ValueError(f"got {described(value)}, expected a whole number of at least 1, or auto")


_BYTES = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_LEAST_MEMORY = 1 << 20  # less is a forgotten unit


def _memory(value: object) -> object:
    """Bytes: a whole number of them, or a number with a unit."""
    if value == "auto":
        return value
    written = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+)\s*([a-z]+)", value.strip().lower()) if isinstance(value, str) else None
    size = value if type(value) is int else int(float(written[1]) * _BYTES[written[2]]) if written and written[2] in _BYTES else None
    if size is None:
        raise ValueError(f"got {described(value)}, expected auto, or a size such as 2GiB or 500 MB (B, KB, MB, GB, TB; KiB, MiB, GiB, TiB)")
    if size < _LEAST_MEMORY:
        raise ValueError(f"got {described(value)}, which is {size:,} bytes; expected at least 1MiB; is its unit right?")
    return size


def _column_names(value: object) -> object:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"got {described(value)}, expected one column name or a list of them")
    if len(set(names)) < len(names):
        raise ValueError("a column is named twice")
    return value


def _data_path(value: Path) -> Path:
    if value.suffix.lower() not in DATA_SUFFIXES:
        raise ValueError(f"{value.name!r} does not end in one of {', '.join(DATA_SUFFIXES)}; the suffix picks the reader")
    return value


def _loss_name(value: str) -> str:
    if value in LOSS_OPTIONS or is_callable_spec(value):
        return value
    close = nearest(value, list(LOSS_OPTIONS))
    suggestion = f"did you mean {close}? " if close else ""
    raise ValueError(f"there is no loss {value!r}; {suggestion}known: {', '.join(LOSS_OPTIONS)}; or module:callable for one of your own")


class ModelConfig(Section):
    """The model: a factory, its arguments, and the weights to put in."""

    factory: CallableSpec
    kwargs: dict[str, Any] = Field(default_factory=dict)
    checkpoint: FilePath | None = None
    state_dict_key: str | None = None
    mode: Literal["eval", "train"] = "eval"

    @model_validator(mode="after")
    def _key_needs_a_checkpoint(self) -> ModelConfig:
        if self.state_dict_key is not None and self.checkpoint is None:
            raise ValueError("state_dict_key says where in the checkpoint the weights lie, but there is no checkpoint")
        return self


class LossConfig(Section):
    """The loss of one sample: a known name with its options, or a callable of the user's own. A bare string is the name alone."""

    name: Annotated[str, AfterValidator(_loss_name)]
    label_smoothing: Annotated[float, Field(ge=0, le=1)] = 0.0
    weight: list[Annotated[Finite, Field(ge=0)]] | None = None
    ignore_index: int | None = None
    beta: Annotated[Finite, Field(gt=0)] = 1.0
    delta: Annotated[Finite, Field(gt=0)] = 1.0

    @model_validator(mode="before")
    @classmethod
    def _bare_name(cls, value: object) -> object:
        return {"name": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _options_of_this_loss(self) -> LossConfig:
        takes = LOSS_OPTIONS.get(self.name, frozenset())
        # A default says nothing: a resolved config, written out in full, must load again.
        given = {option for option, info in LossConfig.model_fields.items() if getattr(self, option) != info.default}
        refused = sorted(given - {"name"} - takes)
        if refused:
            takes_text = f"it takes {', '.join(sorted(takes))}" if takes else "it takes no options"
            raise ValueError(f"the loss {self.name!r} does not take {', '.join(refused)}; {takes_text}")
        return self


class DataConfig(Section):
    """The dataset: a file, or a factory of a torch Dataset, and which columns are which."""

    not_taken: ClassVar[Mapping[str, str]] = {
        "shuffle": "rows are read in the order of the dataset; a private run draws its batches by privacy.sampling",
        "sampler": "rows are read in the order of the dataset; a private run draws its batches by privacy.sampling",
        "batch_size": "rows that are computed together are engine.chunk_size; a private run draws its batches by privacy.sampling",
        "user": "the column of a private run's users is privacy.unit.column",
    }

    path: Annotated[FilePath, AfterValidator(_data_path)] | None = None
    factory: CallableSpec | None = None
    kwargs: dict[str, Any] = Field(default_factory=dict)
    inputs: Annotated[str | list[str] | None, BeforeValidator(_column_names)] = None
    target: str | None = None
    id: str | None = None
    class_names: list[str] | None = None

    @model_validator(mode="after")
    def _one_source(self) -> DataConfig:
        if (self.path is None) == (self.factory is None):
            raise ValueError("give exactly one of path (a file) and factory (a callable that returns a torch Dataset)")
        if self.path is not None and self.inputs is None:
            raise ValueError("inputs is missing: the name of the column that the model reads, or a list of names")
        if self.path is not None and self.kwargs:
            raise ValueError("kwargs are the arguments of a factory; a path takes none")
        return self


class EngineConfig(Section):
    """How the gradients are computed."""

    device: str = "auto"
    chunk_size: Annotated[int | Literal["auto"], BeforeValidator(_chunk_size)] = "auto"
    # What a chunk of samples may take, in bytes; auto is a share of what is free.
    memory: Annotated[int | Literal["auto"], BeforeValidator(_memory)] = "auto"
    # bfloat16 is mixed precision: products in bfloat16, parameters, sums and norms in float32.
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    verify: Annotated[int, Field(ge=0)] = 3
    capture: Literal["auto", "off"] = "auto"
    compile: Literal["none", "inductor"] = "none"
    # A JSON file of this machine's constants, for the planner; by default those that `psgrad plan` measured, else built-in ones.
    machine: FilePath | None = None

    @model_validator(mode="after")
    def _memory_sizes_automatic_chunks(self) -> EngineConfig:
        if self.memory != "auto" and self.chunk_size != "auto":
            raise ValueError(f"memory says how large an automatic chunk may get, and chunk_size is {self.chunk_size}; set one of the two")
        return self

    @model_validator(mode="after")
    def _what_is_compiled_is_captured(self) -> EngineConfig:
        if self.compile != "none" and self.capture == "off":
            raise ValueError(f"compile: {self.compile} compiles what was captured, and capture is off")
        return self


class ReportConfig(Section):
    """The report."""

    include_inputs: bool = True
    title: str | None = None
