"""Datasets of the `datasets` library: a folder of save_to_disk, an id in the local cache, or what a factory
returns. The library is imported where a config asks for it. No torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from psgrad.config import DataConfig, did_you_mean
from psgrad.data.sources.arrow_columns import errors_of_damage
from psgrad.data.sources.file_checks import Wanted, require_columns
from psgrad.data.sources.source_rows import Array, SourceRows
from psgrad.errors import ConfigError, DataError
from psgrad.models.hub import is_hub_id, library
from psgrad.wording import first_line


class LibraryRows(SourceRows):
    """The named columns of a `datasets.Dataset`, mapped into memory.

    Args:
        dataset: without a transform of its own.
        named: the dataset in words.
    """

    def __init__(self, dataset: Any, columns: Sequence[str], named: str) -> None:
        require_columns(columns, dataset.column_names, named)
        self._dataset = dataset.select_columns(list(columns)).with_format("arrow")
        super().__init__(dataset.features.arrow_schema.empty_table().select(columns).schema, len(dataset), [])
        self.source = named
        self.class_names = class_names_of(dataset.features, columns)

    def read(self, start: int, stop: int) -> pa.Table:
        return self._dataset[start:stop].cast(self.schema)

    def _take_rising(self, rows: Array) -> pa.Table:
        return self._dataset[rows.tolist()].cast(self.schema)


def class_names_of(features: Mapping[str, Any], columns: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """column -> the names of its classes, where a `ClassLabel`, or a list of them, says them."""
    inner = {name: getattr(features.get(name), "feature", features.get(name)) for name in columns}
    labels = {name: each for name, each in inner.items() if type(each).__name__ == "ClassLabel"}
    return {name: tuple(names) for name, each in labels.items() if (names := getattr(each, "names", None))}


def library_hashes(config: DataConfig, dataset: Any) -> list[str]:
    """The note for manifest.json on a dataset of the library: the SHA-256 of the columns that are named."""
    return [LibraryRows(dataset, Wanted.of(config).columns, str(config.dataset)).fingerprint]


def is_library_dataset(value: object) -> bool:
    """Whether an object is a `datasets.Dataset` whose rows can be read as they are stored."""
    there = sys.modules.get("datasets")
    return there is not None and isinstance(value, there.Dataset) and value.format["type"] in (None, "arrow")


def library_dataset(config: DataConfig, base: Path, allow_download: bool = False) -> Any:
    """The `datasets.Dataset` that data.dataset, data.config and data.split name; with data.streaming its
    `IterableDataset`.

    Raises ConfigError for a folder, an id or a split that is not there, DataError for a damaged one,
    ModelError where the library is not installed.
    """
    assert config.dataset is not None
    library("datasets")
    folder = base / config.dataset
    if config.streaming:
        return _streamed(config, folder, allow_download)
    if folder.is_dir():
        if config.config is not None:
            raise ConfigError(f"data.config belongs to a hub id, and data.dataset is the folder {folder}")
        with errors_of_damage(folder, "a folder of save_to_disk"):
            return _of_folder(folder, config.split)
    if folder.exists() or not is_hub_id(config.dataset):
        raise ConfigError(
            f"data.dataset: there is no folder {folder}",
            expected="a folder as datasets' save_to_disk writes it, or a cached hub id",
            next_step="name data files in data.path"
            if folder.exists()
            else "check the path; it is relative to the config file's folder",
        )
    return _of_cache(config, allow_download)


def library_splits(folder: Path) -> list[str] | None:
    """The splits of a folder of save_to_disk; None for one without splits. Raises ConfigError."""
    if (folder / "dataset_dict.json").is_file():
        return [str(name) for name in json.loads((folder / "dataset_dict.json").read_bytes())["splits"]]
    if (folder / "state.json").is_file():
        return None
    raise ConfigError(
        f"data.dataset: the folder {folder} is not one that datasets' save_to_disk writes",
        expected="state.json or dataset_dict.json in it",
        next_step=f"name data files in data.path, such as {folder / '*.parquet'}, or a folder of images in"
        " data.images",
    )


def _of_folder(folder: Path, split: str | None) -> Any:
    datasets = library("datasets")
    names = library_splits(folder)
    if names is None:
        whole = datasets.load_from_disk(str(folder))
        name = str(whole.split or "train")
        return whole if split is None else _part({name: whole}, split, folder)
    if split is None and len(names) > 1:
        raise _no_split(folder, names)
    parts = {name: datasets.load_from_disk(str(folder / name)) for name in names}
    return parts[names[0]] if split is None else _part(parts, split, folder)


def _part(parts: Mapping[str, Any], split: str, where: object) -> Any:
    """The rows that a split names, such as train[:10%] or train+test."""
    datasets = library("datasets")
    try:
        wanted = datasets.ReadInstruction.from_spec(split)
        found = wanted.to_absolute({name: len(part) for name, part in parts.items()})
    except (ValueError, AssertionError, KeyError) as error:
        meant = did_you_mean(split.partition("[")[0], list(parts))
        raise ConfigError(
            f"data.split: {where} has no rows {split!r}{meant}",
            expected=f"one of {', '.join(parts)}, or a part such as {next(iter(parts))}[:10%]",
        ) from error
    taken = [parts[each.splitname].select(range(each.from_, each.to)) for each in found]
    return taken[0] if len(taken) == 1 else datasets.concatenate_datasets(taken)


def _of_cache(config: DataConfig, allow_download: bool) -> Any:
    named = f"{config.dataset}" + ("" if config.config is None else f", config {config.config}")
    try:
        return _loaded(str(config.dataset), config, allow_download)
    except _Unloadable as error:
        if allow_download:
            raise DataError(f"data.dataset: {named} can't be loaded: {error}") from error
        raise ConfigError(
            f"data.dataset: {named} is not in the local cache of datasets, or not whole: {error}",
            expected="a cached dataset, or a folder of save_to_disk",
            next_step="set allow_download: true to download it, or load it once with"
            f" datasets.load_dataset({config.dataset!r})",
        ) from error


def _streamed(config: DataConfig, folder: Path, allow_download: bool) -> Any:
    if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
        raise ConfigError(
            f"data.streaming: {folder} is a folder of save_to_disk, which is mapped into memory",
            expected="a hub id, or a folder of data files as the hub has them",
            next_step="leave streaming out, and name a part in data.split, such as train[:1000]",
        )
    if config.split is not None and "[" in config.split:
        raise ConfigError(
            f"data.split: {config.split!r} is a part of a split, and a stream is read from its beginning",
            expected="the name of a split; data.stream_rows says how many rows are read",
        )
    named = str(folder) if folder.is_dir() else str(config.dataset)
    try:
        return _loaded(named, config, allow_download)
    except _Unloadable as error:
        raise ConfigError(
            f"data.dataset: {named} can't be streamed: {error}",
            expected="a folder of data files, or a hub id with allow_download: true",
        ) from error


class _Unloadable(Exception):
    """The first line of the library's error for a dataset that it can't load."""


def _loaded(name: str, config: DataConfig, allow_download: bool) -> Any:
    """The split that the config names, or the only one. Raises ConfigError where there are several."""
    try:
        with _offline(not allow_download):
            found = library("datasets").load_dataset(
                name, config.config, split=config.split, streaming=config.streaming
            )
    except Exception as error:  # of datasets, huggingface_hub, fsspec and the network
        raise _Unloadable(first_line(error)) from error
    if isinstance(found, Mapping) and len(found) > 1:
        raise _no_split(name, list(found))
    return next(iter(found.values())) if isinstance(found, Mapping) else found


def _no_split(where: object, names: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"data.split is missing: {where} has the splits {', '.join(names)}",
        expected=f"one of them, or a part such as {names[0]}[:10%]",
    )


@contextmanager
def _offline(yes: bool) -> Iterator[None]:
    """The libraries of Hugging Face do without the network."""
    settings = [library("datasets").config, library("huggingface_hub").constants]
    before = [each.HF_HUB_OFFLINE for each in settings]
    try:
        for each in settings if yes else []:
            each.HF_HUB_OFFLINE = True
        yield
    finally:
        for each, value in zip(settings, before, strict=True):
            each.HF_HUB_OFFLINE = value
