"""What a user may write in the YAML file, and how every mistake in it is told: all at once, with file, line and a suggestion."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError, model_validator
from pydantic_core import ErrorDetails

from psgrad.errors import ConfigError
from psgrad.yaml12 import KeyPath, parse

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


# The fields -----------------------------------------------------------------------------------------------------------------------


def is_callable_spec(text: str) -> bool:
    """Whether `text` has the form `module:callable` or `file.py:callable`."""
    location, _, name = text.rpartition(":")
    dotted = r"[^\W\d]\w*(\.[^\W\d]\w*)*"
    return bool(re.fullmatch(dotted, name)) and (location.endswith(".py") or bool(re.fullmatch(dotted, location)))


def nearest(word: str, known: Sequence[str]) -> str | None:
    """The one of `known` that `word` was most likely meant to be; None where nothing comes close."""
    close = difflib.get_close_matches(word, known, n=1)
    return close[0] if close else None


def _callable_spec(value: str) -> str:
    if not is_callable_spec(value):
        raise ValueError(f"{value!r} does not name a callable; expected module:callable or file.py:callable")
    return value


def _chunk_size(value: object) -> object:
    if value == "auto" or (type(value) is int and value >= 1):
        return value
    raise ValueError(f"got {_describe(value)}, expected a whole number of at least 1, or auto")


_BYTES = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_LEAST_MEMORY = 1 << 20  # less is a forgotten unit


def _memory(value: object) -> object:
    """Bytes: a whole number of them, or a number with a unit."""
    if value == "auto":
        return value
    written = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+)\s*([a-z]+)", value.strip().lower()) if isinstance(value, str) else None
    size = value if type(value) is int else int(float(written[1]) * _BYTES[written[2]]) if written and written[2] in _BYTES else None
    if size is None:
        raise ValueError(f"got {_describe(value)}, expected auto, or a size such as 2GiB or 500 MB (B, KB, MB, GB, TB; KiB, MiB, GiB, TiB)")
    if size < _LEAST_MEMORY:
        raise ValueError(f"got {_describe(value)}, which is {size:,} bytes; expected at least 1MiB; is its unit right?")
    return size


def _column_names(value: object) -> object:
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"got {_describe(value)}, expected one column name or a list of them")
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


def _version(value: object) -> object:
    if type(value) is not int or value != 1:
        raise ValueError(f"got {_describe(value)}, expected 1, the only version of the config's format")
    return value


CallableSpec = Annotated[str, AfterValidator(_callable_spec)]
FilePath = Annotated[Path, Field(strict=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ModelConfig(_Section):
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


class LossConfig(_Section):
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


class DataConfig(_Section):
    """The dataset: a file, or a factory of a torch Dataset, and which columns are which."""

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


class EngineConfig(_Section):
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


class AnalyzeConfig(_Section):
    """`psgrad analyze`: how many samples to show, and which share of the dataset to put on the review list."""

    top: Annotated[int, Field(ge=1)] = 20
    review_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.01


class ReportConfig(_Section):
    """The report."""

    include_inputs: bool = True
    title: str | None = None


class Config(_Section):
    """One whole config. Paths of the model, data and factories are relative to `base`, `output` to the current directory."""

    version: Annotated[Literal[1], BeforeValidator(_version)]  # a Literal alone takes true for 1
    model: ModelConfig
    loss: LossConfig
    data: DataConfig
    engine: EngineConfig = Field(default_factory=EngineConfig)
    analyze: AnalyzeConfig = Field(default_factory=AnalyzeConfig)
    report: ReportConfig = Field(default_factory=ReportConfig)
    output: FilePath
    # Private, so that no file can set it.
    _base: Path = PrivateAttr(default_factory=Path)

    @property
    def base(self) -> Path:
        """The folder of the config file; the current directory for a config that was not read from a file."""
        return self._base

    @model_validator(mode="after")
    def _named_loss_needs_a_target(self) -> Config:
        if self.data.path is not None and self.data.target is None and self.loss.name in LOSS_OPTIONS:
            raise ValueError(f"data.target is missing: the loss {self.loss.name!r} compares the output with a target column")
        return self


# From the file to the fields ------------------------------------------------------------------------------------------------------


def load_config(path: Path, overrides: Sequence[str] = ()) -> Config:
    """The validated config of a YAML file.

    `overrides` are `dotted.path=value` strings, the value in YAML, applied to the file's content and validated like it. Raises
    ConfigError with every problem found, each with its file and line (or its `--set`).
    """
    document = _read_document(path)
    if isinstance(document.content.get("loss"), str):
        document.content["loss"] = {"name": document.content["loss"]}  # so that --set loss.weight=... has a place to go
    problems = [problem for text in overrides for problem in document.override(text)]
    try:
        config = Config.model_validate(document.content)
    except ValidationError as error:
        problems += [document.problem(details) for details in error.errors(include_url=False)]
    if problems:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ConfigError("\n".join([f"the config {path} has {count}:", *(f"  {problem}" for problem in problems)]))
    config._base = path.parent
    return config


def _read_document(path: Path) -> _Document:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(
            f"there is no config file {path}",
            next_step=f"check the path; it is relative to {Path.cwd()}",
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"the config file {path} can't be read: {error}", expected="a YAML file in UTF-8") from error
    value = parse(text, str(path))
    if not isinstance(value.content, dict):
        got = "is empty" if value.content is None else f"holds {_describe(value.content)}"
        raise ConfigError(f"the config {path} {got}", expected=f"the keys {', '.join(Config.model_fields)}")
    return _Document(str(path), value.content, value.places)


@dataclass
class _Document:
    """A config before validation: plain values, and the place (`file:line`, or `--set ...`) that each of them came from."""

    name: str
    content: dict[Any, Any]
    places: dict[KeyPath, str] = field(default_factory=dict)

    def override(self, text: str) -> Iterator[str]:
        """Applies one `a.b=value`; yields what is wrong with it."""
        place = f"--set {text}"
        dotted, equals, value_text = text.partition("=")
        keys = dotted.strip().split(".")
        if not equals or not all(keys):
            yield f"{place}: expected a dotted path, an equals sign and a value, such as --set engine.verify=0"
            return
        try:
            value = parse(value_text, "value").content
        except ConfigError as error:
            yield f"{place}: {error.arrived}"
            return
        group = self.content
        for depth, key in enumerate(keys[:-1], start=1):
            group = group.setdefault(key, {})
            self.places.setdefault(tuple(keys[:depth]), place)
            if not isinstance(group, dict):
                yield f"{place}: {'.'.join(keys[:depth])} is {_describe(group)}, which has no keys below it"
                return
        group[keys[-1]] = value
        self.places[tuple(keys)] = place

    def problem(self, details: ErrorDetails) -> str:
        """One of pydantic's errors in our words."""
        path = details["loc"]
        where = ".".join(str(part) for part in path)
        return f"{self._place(path)}: {where + ': ' if where else ''}{_explain(details)}"

    def _place(self, path: KeyPath) -> str:
        while path and path not in self.places:
            path = path[:-1]
        return self.places.get(path, self.name)


def _explain(details: ErrorDetails) -> str:
    kind, context = details["type"], details.get("ctx", {})
    if kind == "extra_forbidden":
        return _unknown_key(details["loc"])
    if kind == "missing":
        return "missing; it is required"
    if kind == "value_error":
        return str(context["error"])
    got = _describe(details["input"])
    if kind == "literal_error":
        allowed = context["expected"].replace("'", "").replace(" or ", ", ").split(", ")
        close = nearest(str(details["input"]), allowed)
        return f"got {got}, expected one of {', '.join(allowed)}" + (f"; did you mean {close}?" if close else "")
    expected = _EXPECTED[kind].format(**context) if kind in _EXPECTED else details["msg"]
    return f"got {got}, expected {expected}"


_EXPECTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "a string",
    "bool_type": "true or false",
    "list_type": "a list",
    "invalid_key": "a string as the key",
    "dict_type": "a group of keys and values",
    "model_type": "a group of keys and values",
    "path_type": "a path",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
}


def _unknown_key(path: KeyPath) -> str:
    section: type[BaseModel] = Config
    for part in path[:-1]:
        section = _sections(section)[str(part)]
    key, known = str(path[-1]), list(section.model_fields)
    meant = nearest(key, known)
    if meant is None:
        # The right key in the wrong group is the second most common slip.
        meant = next((f"{name}.{key}" for name, other in _sections(Config).items() if key in other.model_fields), None)
    return f"unknown key; {f'did you mean {meant}? ' if meant else ''}known here: {', '.join(known)}"


def _sections(section: type[BaseModel]) -> dict[str, type[BaseModel]]:
    annotations = {name: info.annotation for name, info in section.model_fields.items()}
    return {name: kind for name, kind in annotations.items() if isinstance(kind, type) and issubclass(kind, BaseModel)}


def _describe(value: object) -> str:
    """A value as its writer would call it."""
    if value is None:
        return "nothing (an empty value)"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, dict):
        return "a group of keys"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
