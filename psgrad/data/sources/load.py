"""The dataset of a config: its files, read by the source of their suffix, or what its factory returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from psgrad.config import DataConfig
from psgrad.data.columns import ColumnRoles, require_rows, target_names
from psgrad.data.loss import Criterion
from psgrad.data.rows import Samples
from psgrad.data.sources.arrow_types import common_schema, errors_of_damage
from psgrad.data.sources.source import source_of
from psgrad.data.sources.table_rows import TableRows, mapped
from psgrad.data.sources.table_samples import TableSamples
from psgrad.data.targets import Labels
from psgrad.errors import ConfigError
from psgrad.run.identity import files_sha256
from psgrad.run.input_files import Stamp, require_unchanged

if TYPE_CHECKING:
    from psgrad.models.pretrained import Pretrained


def open_rows(
    config: DataConfig, base: Path, unit: str | None = None, *, allow_download: bool = False
) -> TableRows:
    """The columns that a config names, of any type, as a table; paths are relative to `base`.

    Raises ConfigError where a file or column is not there, DataError where the data can't be used.
    """
    roles = ColumnRoles.of(config, unit)
    if config.images is not None:
        from psgrad.data.image_files import folder_rows

        rows = folder_rows(config, base, unit)
    elif config.dataset is not None:
        from psgrad.data.sources.library_datasets import library_dataset, library_rows

        named = f"the dataset {config.dataset}"
        rows = library_rows(library_dataset(config, base, allow_download), roles.columns, named)
    elif config.factory is not None:
        from psgrad.data.sources.datasets import made_by_factory

        rows = _rows_of_factory(made_by_factory(config, base), config, roles)
    else:
        rows = _rows_of_files(config, base, roles)
    require_rows(rows.count, rows.source)
    return rows


def _rows_of_files(config: DataConfig, base: Path, roles: ColumnRoles) -> TableRows:
    """The rows of all files, one file after another."""
    source, paths = source_of(config, base)
    stamps = tuple(Stamp.of(path) for path in paths)
    tables = [source.table(path, roles) for path in paths]
    if len(tables) > 1:  # files without rows have no types
        filled = [(path, each.schema) for path, each in zip(paths, tables, strict=True) if each.num_rows]
        schema = common_schema(filled, {*roles.ids, *roles.texts})
        tables = [
            _converted(table, schema, path)
            for path, table in zip(paths, tables, strict=True)
            if table.num_rows
        ] or tables[:1]
    table = pa.concat_tables(tables)
    if source.ids_are_spelled:
        table = _with_whole_ids(table, roles.ids)
    starts = tuple(accumulate((each.num_rows for each in tables[:-1]), initial=0))
    named = str(paths[0]) + (f" and {len(paths) - 1} more" if len(paths) > 1 else "")
    fingerprint = files_sha256(paths)
    require_unchanged(stamps)
    mapped_files = stamps if source.stays_open else ()
    return TableRows(
        table, named, fingerprint, tuple(paths), starts, stamps=mapped_files, stacks=source.stacks
    )


def _converted(table: pa.Table, schema: pa.Schema, path: Path) -> pa.Table:
    """The table of a file with the types of all files."""
    if table.schema.equals(schema):
        return table
    with errors_of_damage(path, "rows like those of the other files"):
        return mapped(schema, table.select(schema.names).to_batches())


def _with_whole_ids(table: pa.Table, names: Sequence[str]) -> pa.Table:
    """The table with ids of text as whole numbers, where all of a column keep their spelling so."""
    for name in names:
        texts = table.column(name)
        try:
            numbers = texts.cast(pa.int64())
        except pa.ArrowInvalid:
            continue
        if numbers.cast(pa.string()).equals(texts):
            table = table.set_column(table.schema.get_field_index(name), name, numbers)
    return table


def _rows_of_factory(made: Any, config: DataConfig, roles: ColumnRoles) -> TableRows:
    """What a factory returned, as a table. Raises ConfigError where it is none."""
    from psgrad.data.sources.library_datasets import is_library_dataset, library_rows

    if not is_library_dataset(made):
        raise ConfigError(
            f"the factory {config.factory} returned an object of type {type(made).__name__}, and data"
            " names columns of text; expected a datasets.Dataset, whose columns may be text",
        )
    return library_rows(made, roles.columns, f"the dataset of {config.factory}")


def load_data(
    config: DataConfig,
    base: Path,
    unit: str | None = None,
    pretrained: Pretrained | None = None,
    *,
    criterion: Criterion | None = None,
    trained_on: Mapping[str, Any] | None = None,
    allow_download: bool = False,
) -> Samples:
    """The dataset that a config names; paths are relative to `base`.

    Args:
        unit: the column that says whom each row belongs to (privacy.unit.column); what it holds is in
            `Samples.units`.
        pretrained: the model that texts and images are prepared for.
        criterion: the loss that the targets are for; None for one of the user's own.
        trained_on: timm's pretrained_cfg of a model, where it has one: how its images are prepared.
        allow_download: whether a dataset by a hub id may be downloaded.

    Raises ConfigError where a file, column or factory is not there, DataError where the data can't be used.
    """
    if config.text is not None or config.prompt is not None or config.messages is not None:
        return _load_texts(config, base, unit, pretrained)
    if config.images is not None or config.image is not None:
        return _load_images(config, base, unit, labels_for(config, criterion), pretrained or trained_on)
    return _load_numbers(config, base, unit, labels_for(config, criterion), allow_download)


def _load_numbers(
    config: DataConfig, base: Path, unit: str | None, labels: Labels, allow_download: bool
) -> Samples:
    if config.factory is not None:
        from psgrad.data.sources.datasets import DatasetSamples, made_by_factory
        from psgrad.data.sources.library_datasets import is_library_dataset

        made = made_by_factory(config, base)
        if not is_library_dataset(made):
            return DatasetSamples(made, config, unit, labels)
        rows = _rows_of_factory(made, config, ColumnRoles.of(config, unit))
    else:
        rows = open_rows(config, base, unit, allow_download=allow_download)
    return TableSamples(_numbered(rows, config, labels.names), config, unit, labels)


def labels_for(config: DataConfig, criterion: Criterion | None) -> Labels:
    """How the targets of a config become what its loss compares with."""
    names = None if config.class_names is None else tuple(config.class_names)
    return Labels(names=names) if criterion is None else Labels(criterion.kind, criterion.ignore_index, names)


def _load_images(
    config: DataConfig,
    base: Path,
    unit: str | None,
    labels: Labels,
    trained: Pretrained | Mapping[str, Any] | None,
) -> Samples:
    from psgrad.data.image_files import with_names
    from psgrad.data.image_samples import ImageSamples, preparation

    rows = open_rows(config, base, unit)
    folder = _folder_of_images(config, base, rows)
    config = config if config.images is None else with_names(config, base)
    if trained is not None and not isinstance(trained, Mapping):
        labels = labels_of_head(labels, trained.config, config)
        if not isinstance(config.inputs, dict):
            config = config.model_copy(update={"inputs": {"pixel_values": config.image}})
    rows = _numbered(rows, config, labels.names)
    return ImageSamples(rows, config, labels, unit, folder=folder, prepared=preparation(config, trained))


def _folder_of_images(config: DataConfig, base: Path, rows: TableRows) -> Path:
    """The folder that paths of images are relative to."""
    if config.images is not None:
        return base / config.images
    return rows.files[0].parent if rows.files else base


def labels_of_head(labels: Labels, settings: Any, config: DataConfig) -> Labels:
    """The labels with the names of a pretrained model's classes. settings: its config, of transformers."""
    from psgrad.data.tasks.classification import HeadLabels

    names = HeadLabels.of(settings, config).given
    return replace(labels, names=names) if names else labels


def _numbered(rows: TableRows, config: DataConfig, names: Sequence[str] | None) -> TableRows:
    """The rows with labels that are numbered as in `names`, where the dataset has names for its numbers."""
    targets = target_names(config)
    if len(targets) != 1 or targets[0] not in rows.class_names:
        return rows
    from psgrad.data.sources.library_datasets import numbered_as

    return numbered_as(rows, targets[0], names)


def _load_texts(config: DataConfig, base: Path, unit: str | None, pretrained: Pretrained | None) -> Samples:
    if pretrained is None:
        raise ConfigError(
            "data names columns of text, and the model is not a pretrained one; expected model.pretrained"
            " and model.task, whose tokenizer makes numbers of texts",
            hint="name columns of numbers in data.inputs for a model of your own",
        )
    from psgrad.data.text_samples import TextSamples, text_task

    task = text_task(config, base, pretrained)
    rows = open_rows(config, base, unit, allow_download=pretrained.allow_download)
    rows = _numbered(rows, config, task.class_names)
    return TextSamples(rows, task, config, unit)
