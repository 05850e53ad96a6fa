"""The data section: where the rows are, and which columns are which; and the queries of an influence run:
rows of their own, or some of these.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from psgrad.config.values import (
    CallableSpec,
    ConfigSection,
    FilePath,
    Finite,
    described,
    first_twice,
    names_in_condition,
)
from psgrad.errors import ConfigError

DATA_FORMATS = ("csv", "tsv", "jsonl", "json", "txt", "parquet", "arrow", "feather", "npz", "safetensors")
"""The formats of data files, by suffix; the reader of each is in psgrad/data/sources/files.py."""
COMPRESSIONS = (".gz", ".bz2", ".zst", ".lz4")
"""Suffixes of compressed files; the one before them picks the reader."""


def _column_names(value: object) -> object:
    if value is None:
        return None
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"got {described(value)}, expected one column name or a list of them")
    if len(set(names)) < len(names):
        raise ValueError("a column is named twice")
    return value


def _distinct(names: list[str] | None) -> list[str] | None:
    """The names of classes; a name that stands there twice would belong to two classes."""
    twice = first_twice(names or ())
    if twice is not None:
        raise ValueError(f"the name {twice!r} is there twice, expected a name of its own for each class")
    return names


def _inputs(value: object) -> object:
    if not isinstance(value, dict):
        return _column_names(value)
    if not value or not all(isinstance(name, str) for name in value):
        raise ValueError(f"got {described(value)}, expected keyword: column")
    return value


SOURCE_KEYS = ("path", "dataset", "images", "factory")
"""The keys of which one says where the rows are."""


class LengthOf(ConfigSection):
    """An input that is not a column: how many positions each row of a column has."""

    length_of: str
    """The column."""


def data_format(path: Path) -> str:
    """The format of a data file: its suffix in lower case, without the dot; not that of a compression."""
    name = path.with_suffix("") if path.suffix.lower() in COMPRESSIONS else path
    return name.suffix.lower().removeprefix(".")


def _data_paths(value: object) -> object:
    if value is None:
        return value
    paths: list[Any] = value if isinstance(value, list) else [value]
    if not paths or not all(isinstance(path, str | Path) and str(path) for path in paths):
        raise ValueError(f"got {described(value)}, expected a file, a glob such as train-*.jsonl, or a list")
    for path in map(Path, paths):
        if data_format(path) == "tar":
            raise ValueError(
                f"{path.name!r} is a tar, which is not read; save it as a folder, and name that in dataset:"
                " datasets.load_dataset('webdataset', data_files=FILE, split='train').save_to_disk(FOLDER)"
            )
        if data_format(path) not in DATA_FORMATS:
            raise ValueError(
                f"{path.name!r} does not end in one of .{', .'.join(DATA_FORMATS)} (text also with .gz or"
                " .zst); the suffix picks the reader, and a factory reads all else"
            )
    formats = sorted({data_format(path) for path in map(Path, paths)})
    if len(formats) > 1:
        raise ValueError(f"the files are of several formats, {' and '.join(formats)}; expected one")
    return [Path(path) for path in paths] if isinstance(value, list) else Path(paths[0])


_IN_ORDER = "rows are read in the order of the dataset; a private run draws its batches by privacy.sampling"
_STREAMS = "streams are not read; save the rows that you want with datasets' save_to_disk, or name data.split"
# Keys that mean nothing without one of others.
_READ_WITH = {
    ("tokenizer", "max_length", "truncation"): ("text", "prompt", "messages"),
    ("size", "crop", "mean", "std"): ("image", "images"),
}


class DataConfig(ConfigSection):
    """The dataset: a file, or a factory of a torch Dataset, and which columns are which."""

    not_taken: ClassVar[Mapping[str, str]] = {
        "shuffle": _IN_ORDER,
        "sampler": _IN_ORDER,
        "stack": "columns of one number a row are one tensor; name inputs as keyword: column for one of each",
        "workers": "rows are read in one process; save slow items once, as npz or safetensors",
        "batch_size": (
            "rows that are computed together are engine.chunk_size; a private run draws its batches by"
            " privacy.sampling"
        ),
        "streaming": _STREAMS,
        "stream_rows": _STREAMS,
        "config": "save the configuration that you want with datasets' save_to_disk, and name the folder",
        "masked": "15 % of the tokens are hidden, as BERT was trained",
        "seed": "the tokens that are hidden follow from a row's text",
        "group": "a sample is a row; influence.groups ranks groups of rows, and privacy.unit clips them",
        "user": "the column of a private run's users is privacy.unit.column",
    }

    path: Annotated[FilePath | list[FilePath] | None, BeforeValidator(_data_paths)] = None
    """A file, relative to this config, a glob such as train-*.jsonl, or a list; by suffix."""
    factory: CallableSpec | None = None
    """In place of a path: module:callable or file.py:callable that returns a torch Dataset."""
    kwargs: dict[str, Any] = Field(default_factory=dict)
    """Arguments of the factory."""
    dataset: str | None = None
    """In place of a path: a folder of datasets' save_to_disk, relative to this config, or a cached hub id."""
    split: str | None = None
    """The split of `dataset`, such as train or train[:10%]."""
    images: FilePath | None = None
    """In place of a path: a folder of images, a folder for each class, or with a metadata file."""
    inputs: Annotated[str | list[str] | dict[str, str | LengthOf] | None, BeforeValidator(_inputs)] = None
    """The column that the model reads, a list of them, or keyword: column where it takes them by name."""
    target: Annotated[str | list[str] | None, BeforeValidator(_column_names)] = None
    """The column that the loss compares the output with, or a list of them for a loss of your own."""
    text: Annotated[str | list[str] | None, BeforeValidator(_column_names)] = None
    """The column of text, or two for pairs; a tokenizer makes the inputs of it."""
    prompt: str | None = None
    """Of causal-lm: the column of prompts, which the loss leaves out."""
    completion: str | None = None
    """Of causal-lm: the column of completions, of which the loss is."""
    messages: str | None = None
    """Of causal-lm: the column of chats; the loss is of the assistant's turns."""
    tokenizer: str | None = None
    """The folder or cached hub id of the tokenizer; null for the pretrained model's."""
    max_length: Annotated[int, Field(ge=1)] | None = None
    """The largest number of tokens in a row; null for what the model takes."""
    truncation: Literal["right", "left", "error"] = "error"
    """Where longer rows are cut."""
    image: str | None = None
    """The column of images, as paths or bytes; the model's image processor prepares them."""
    size: Annotated[int, Field(ge=1)] | list[Annotated[int, Field(ge=1)]] | None = None
    """Of images: the shorter side after resizing, or [height, width]; null for the processor's."""
    crop: Annotated[int, Field(ge=1)] | list[Annotated[int, Field(ge=1)]] | None = None
    """Of images: the middle that is cut out, a side or [height, width]; null for the processor's."""
    mean: list[Finite] | None = None
    """Of images: the mean of each channel; null for the processor's."""
    std: list[Annotated[Finite, Field(gt=0)]] | None = None
    """Of images: the standard deviation of each channel; null for the processor's."""
    weight: str | None = None
    """The column of weights: the loss of each row is multiplied by its own."""
    id: str | None = None
    """The column that names each row; without it a row is known by its number and content."""
    class_names: Annotated[list[str] | None, AfterValidator(_distinct)] = None
    """Names of the model's outputs 0, 1, 2, ..., by which labels that are names are numbered."""

    @model_validator(mode="after")
    def _one_source(self) -> DataConfig:
        if len(self.sources_given) != 1:
            raise ValueError(
                "give exactly one of path (a file), dataset (of the datasets library), images (a folder) and"
                " factory (a callable that returns a torch Dataset)"
            )
        self._check_columns()
        return self

    @property
    def paths(self) -> list[Path]:
        """The files and globs of `path`."""
        return self.path if isinstance(self.path, list) else [] if self.path is None else [self.path]

    @property
    def target_column(self) -> str | None:
        """The column of targets, where there is one. Raises ConfigError where there are several."""
        if isinstance(self.target, list):
            if len(self.target) > 1:
                raise ConfigError(
                    f"data.target names {len(self.target)} columns, {', '.join(self.target)}; expected one"
                    " column for a task of a pretrained model",
                )
            return self.target[0]
        return self.target

    @property
    def reads_texts(self) -> bool:
        """Whether a tokenizer makes the inputs of columns of text."""
        return any(each is not None for each in (self.text, self.prompt, self.messages))

    @property
    def source(self) -> str:
        """Where the rows are, in words."""
        given = self.dataset or self.images or self.factory
        return str(given) if given is not None else ", ".join(map(str, self.paths))

    @property
    def sources_given(self) -> list[str]:
        """The keys that say where the rows are."""
        return [name for name in SOURCE_KEYS if getattr(self, name) is not None]

    def _check_columns(self) -> None:
        """Raises ValueError where no column is named for the inputs, or for keys that nothing reads."""
        if self.factory is None and self.kwargs:
            raise ValueError("kwargs are the arguments of a factory; a path takes none")
        if self.dataset is None and self.split is not None:
            raise ValueError("split belongs to dataset, and there is none")
        made_of = ("inputs", "text", "prompt", "messages", "image")
        if self.factory is None and self.images is None and not any(getattr(self, name) for name in made_of):
            raise ValueError(
                "inputs is missing: the name of the column that the model reads, or a list of names; or text,"
                " prompt, messages or image for a pretrained model"
            )
        texts = [name for name in ("text", "prompt", "messages") if getattr(self, name)]
        unread = [name for name in ("inputs", "image") if getattr(self, name)]
        if texts and unread:
            raise ValueError(
                f"{texts[0]} and {unread[0]} are both given, and a tokenizer makes all inputs of {texts[0]};"
                " expected one of them"
            )
        given = self.not_default()
        for keys, users in _READ_WITH.items():
            for key in keys if not any(getattr(self, user) for user in users) else ():
                if key in given:
                    raise ValueError(
                        f"{key} is given, and nothing reads it; expected {' or '.join(users)} beside it, or"
                        f" no {key}"
                    )
        if (self.prompt is None) != (self.completion is None):
            raise ValueError(
                "prompt and completion go together: the loss is of the completion after the prompt"
            )


_CHOICES = ("rows", "ids", "where", "worst")
QUERY_NAMES = ("id", "index", "target", "label", "loss", "prediction", "confidence", "correct")
"""The columns that influence.queries.where can name; label is another name of target."""


def _query_condition(value: str) -> str:
    names_in_condition(value, QUERY_NAMES)
    return value


class QueriesConfig(DataConfig):
    """The queries: a dataset of their own, described as `data` is, whose keys it has where it leaves them
    out; without a source of their own, they are rows of the training data.

    `rows` or `ids` are the rows to ask about, of which `where` and `worst`, in this order, keep
    some; left out, all of them.
    """

    not_taken: ClassVar[Mapping[str, str]] = {
        **DataConfig.not_taken,
        "wrong": "set where: not correct",
        "contrast": "give each completion a row of its own, and name the pairs in influence.contrast",
    }

    rows: list[Annotated[int, Field(ge=0)]] | None = None
    """The rows that are queries, counted from 0; left out, all of them."""
    ids: list[str | int] | None = None
    """In place of rows: the ids of the rows that are queries."""
    where: Annotated[str, AfterValidator(_query_condition)] | None = None
    """A condition on id, index, target (or label), loss, prediction, confidence and correct."""
    worst: Annotated[int, Field(ge=1)] | None = None
    """Take only this number of rows, those with the largest loss."""

    @model_validator(mode="after")
    def _one_source(self) -> QueriesConfig:
        if len(self.sources_given) > 1:
            raise ValueError(f"give one of {', '.join(self.sources_given)}, not several")
        if self.sources_given:
            self._check_columns()
        elif not self.choice_given:
            raise ValueError(
                "neither path, dataset, images, factory nor rows, ids, where, worst says what the"
                " queries are; leave queries out to ask about all training rows"
            )
        return self

    @property
    def choice_given(self) -> set[str]:
        """The keys that choose among rows, those that are given."""
        return {key for key in _CHOICES if getattr(self, key) is not None}

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
        """The queries' own dataset, without weights; None where they are rows of the training data."""
        if not self.sources_given:
            return None
        return DataConfig.model_validate(self.model_dump(exclude={*_CHOICES, "weight"}, exclude_unset=True))
