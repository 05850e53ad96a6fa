"""Datasets of the `datasets` library: a folder of save_to_disk, an id in the local cache, or what a factory
returns. The library is imported where a config asks for it. No torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa

from psgrad.config import DataConfig, did_you_mean
from psgrad.data.columns import require_columns
from psgrad.data.sources.arrow_types import errors_of_damage
from psgrad.data.sources.table_rows import TableRows, content_sha256, mapped
from psgrad.errors import ConfigError, DataError
from psgrad.models.hub import is_hub_id, library
from psgrad.wording import first_line, first_of

_ROWS_PER_PART = 1024
_SHOWN = 20


def library_rows(dataset: Any, columns: Sequence[str], named: str) -> TableRows:
    """The named columns of a `datasets.Dataset` without a transform of its own, mapped from its files; where
    its rows are chosen by number, a copy. named: the dataset in words.
    """
    require_columns(columns, dataset.column_names, named)
    selected = dataset.select_columns(list(columns))
    if getattr(selected, "_indices", selected) is None:
        table = selected.data.table.select(list(columns)).replace_schema_metadata(None)
    else:
        schema = pa.schema(
            [(name, kind.type) for name in columns for kind in [selected.features.arrow_schema.field(name)]]
        )
        parts = selected.with_format("arrow").iter(_ROWS_PER_PART)
        table = mapped(schema, (batch for part in parts for batch in part.to_batches()))
    return TableRows(
        table, named, content_sha256(table), class_names=class_names_of(dataset.features, columns)
    )


def class_names_of(features: Mapping[str, Any], columns: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """column -> the names of its classes, where a `ClassLabel`, or a list of them, says them."""
    inner = {name: getattr(features.get(name), "feature", features.get(name)) for name in columns}
    labels = {name: each for name, each in inner.items() if type(each).__name__ == "ClassLabel"}
    return {name: tuple(names) for name, each in labels.items() if (names := getattr(each, "names", None))}


def require_order(rows: TableRows, column: str, names: Sequence[str] | None) -> None:
    """Raises DataError where the dataset has a name of `names` at another number than they have. Numbers
    without names, and names that are not known, are as they are.
    """
    declared, known = rows.class_names.get(column, ()), list(names or ())
    moved = [name for place, name in enumerate(declared) if name in known and known.index(name) != place]
    if moved:
        raise DataError(
            f"the labels {column!r} of {rows.source} have {moved[0]!r} as class {declared.index(moved[0])},"
            f" which is class {known.index(moved[0])} of the model; expected the model's order:"
            f" {first_of(known, _SHOWN)}",
            hint="number them anew by dataset.align_labels_with_mapping(model.config.label2id, column)",
        )


def is_library_dataset(value: object) -> bool:
    """Whether an object is a `datasets.Dataset` whose rows can be read as they are stored."""
    loaded = sys.modules.get("datasets")
    return (
        loaded is not None and isinstance(value, loaded.Dataset) and value.format["type"] in (None, "arrow")
    )


def library_dataset(config: DataConfig, base: Path) -> Any:
    """The `datasets.Dataset` that data.dataset and data.split name.

    Raises ConfigError for a folder, an id or a split that is not there, DataError for a damaged one,
    ModelError where the library is not installed.
    """
    assert config.dataset is not None
    library("datasets")
    folder = base / config.dataset
    if folder.is_dir():
        with errors_of_damage(folder, "a folder of save_to_disk"):
            return _of_folder(folder, config.split)
    if folder.exists() or not is_hub_id(config.dataset):
        raise ConfigError(
            f"data.dataset: there is no folder {folder}, as datasets' save_to_disk writes it",
            hint="check the path, relative to the config file's folder; data files are data.path",
        )
    return _of_cache(config)


def _of_folder(folder: Path, split: str | None) -> Any:
    """The rows of a folder of save_to_disk. Raises ConfigError for another folder, and for no such split."""
    if not any((folder / name).is_file() for name in ("dataset_dict.json", "state.json")):
        raise ConfigError(
            f"data.dataset: the folder {folder} is not one that datasets' save_to_disk writes",
            hint=f"name data files in data.path, such as {folder / '*.parquet'}, or images in data.images",
        )
    found = library("datasets").load_from_disk(str(folder))
    parts = found if isinstance(found, Mapping) else {str(found.split or "train"): found}
    if split is None and len(parts) > 1:
        raise _no_split(folder, list(parts))
    return next(iter(parts.values())) if split is None else _part(parts, split, folder)


def _part(parts: Mapping[str, Any], split: str, where: object) -> Any:
    """The rows that a split names, such as train[:10%] or train+test."""
    datasets = library("datasets")
    try:
        wanted = datasets.ReadInstruction.from_spec(split)
        found = wanted.to_absolute({name: len(part) for name, part in parts.items()})
    except (ValueError, AssertionError, KeyError) as error:
        meant = did_you_mean(split.partition("[")[0], list(parts))
        raise ConfigError(
            f"data.split: {where} has no rows {split!r}{meant}; expected one of {', '.join(parts)}, or a"
            f" part such as {next(iter(parts))}[:10%]",
        ) from error
    taken = [parts[each.splitname].select(range(each.from_, each.to)) for each in found]
    return taken[0] if len(taken) == 1 else datasets.concatenate_datasets(taken)


def _of_cache(config: DataConfig) -> Any:
    """The split of a hub id that the config names, or the only one. Raises ConfigError."""
    try:
        with _offline():
            found = library("datasets").load_dataset(config.dataset, split=config.split)
    except Exception as error:  # of datasets, huggingface_hub and fsspec
        raise ConfigError(
            f"data.dataset: {config.dataset} is not in the local cache of datasets, or not whole:"
            f" {first_line(error)}",
            hint="call datasets.load_dataset once to download it, or name a folder of save_to_disk",
        ) from error
    if isinstance(found, Mapping) and len(found) > 1:
        raise _no_split(config.dataset, list(found))
    return next(iter(found.values())) if isinstance(found, Mapping) else found


def _no_split(where: object, names: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"data.split is missing: {where} has the splits {', '.join(names)}; expected one of them, or a"
        f" part such as {names[0]}[:10%]",
    )


@contextmanager
def _offline() -> Iterator[None]:
    """The libraries of Hugging Face do without the network."""
    settings = [library("datasets").config, library("huggingface_hub").constants]
    before = [each.HF_HUB_OFFLINE for each in settings]
    try:
        for each in settings:
            each.HF_HUB_OFFLINE = True
        yield
    finally:
        for each, value in zip(settings, before, strict=True):
            each.HF_HUB_OFFLINE = value
