"""The dataset of a config: its file, read by the source of its suffix, or what its factory returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from psgrad.config import DataConfig, ModelConfig
from psgrad.data.loss import Criterion
from psgrad.data.rows import Block, Samples
from psgrad.data.sources.arrays import ArraySamples
from psgrad.data.sources.arrow_columns import plain
from psgrad.data.sources.datasets import DatasetSamples, made_by_factory
from psgrad.data.sources.file_checks import Wanted, require_rows, target_names
from psgrad.data.sources.library_datasets import LibraryRows, is_library_dataset, library_dataset
from psgrad.data.sources.renumbered import numbered_as
from psgrad.data.sources.source import ArraySource, TableSource, files_read_again, source_of
from psgrad.data.sources.source_rows import SourceRows, joined, save_rows, saved_rows
from psgrad.data.sources.streams import StreamedRows, is_library_stream
from psgrad.data.sources.table_samples import TableSamples
from psgrad.data.targets import Labels
from psgrad.data.tasks.classification import HeadLabels
from psgrad.errors import ConfigError
from psgrad.models.hub import located
from psgrad.models.pretrained import Pretrained, read_settings
from psgrad.run.host_files import made_once
from psgrad.run.input_files import Stamp

__all__ = ["Block", "Samples", "SourceRows", "load_data", "open_rows"]


def open_rows(
    config: DataConfig, base: Path, unit: str | None = None, *, allow_download: bool = False
) -> SourceRows:
    """The columns that a config names, of any type, as Arrow tables; paths are relative to `base`.

    Raises ConfigError where a file or column is not there, DataError where the data can't be used.
    """
    wanted = Wanted.of(config, unit)
    if config.images is not None:
        from psgrad.data.image_files import folder_rows

        rows = folder_rows(config, base, unit)
    elif config.dataset is not None or config.factory is not None:
        rows = _library_rows(config, base, wanted, allow_download)
    else:
        source, paths = source_of(config, base)
        if not isinstance(source, TableSource):
            raise ConfigError(
                f"{paths[0]} holds arrays of numbers",
                expected="a table, such as jsonl, csv or parquet, for texts and for several files",
            )
        rows = joined([_rows_of(source, path, wanted) for path in paths], {*wanted.ids, *wanted.texts})
    require_rows(rows.count, rows.source)
    return rows


def _rows_of(source: TableSource, path: Path, wanted: Wanted) -> SourceRows:
    """The rows of a file: of a format that is converted, by one process of each host."""
    if source.read_again:
        return source.rows(path, wanted)
    content = f"rows of {source.name}: {Stamp.of(path)} {wanted}"
    file = made_once(content, lambda target: save_rows(source.rows(path, wanted), target))
    return source.rows(path, wanted) if file is None else saved_rows(file, path)


def _arrays_of(source: ArraySource, path: Path, wanted: Wanted) -> dict[str, Any]:
    """The arrays of a file; those that are read into memory are read once on a host, and mapped by all."""
    if source.read_again:
        return source.arrays(path, wanted)

    def save(target: Path) -> None:
        target.mkdir()
        for place, array in enumerate(source.arrays(path, wanted).values()):
            np.save(target / f"{place}.npy", array, allow_pickle=False)

    folder = made_once(f"arrays of {source.name}: {Stamp.of(path)} {wanted}", save)
    if folder is None:
        return source.arrays(path, wanted)
    # Written to, a page becomes this process's own.
    files = (folder / f"{place}.npy" for place in range(len(wanted.columns)))
    return {
        name: np.load(file, mmap_mode="c", allow_pickle=False)
        for name, file in zip(wanted.columns, files, strict=True)
    }


def _library_rows(config: DataConfig, base: Path, wanted: Wanted, allow_download: bool) -> SourceRows:
    if config.dataset is not None:
        found = library_dataset(config, base, allow_download)
    elif not _is_table(found := made_by_factory(config, base)):
        raise ConfigError(
            f"the factory {config.factory} returned an object of type {type(found).__name__}, and data names"
            " columns of text",
            expected="a datasets.Dataset, whose columns may be text",
        )
    named = f"the dataset {config.dataset}" if config.dataset else f"the dataset of {config.factory}"
    return _table(found, wanted.columns, config, named)


def _is_table(value: object) -> bool:
    """Whether an object of the datasets library can be read as a table."""
    return is_library_dataset(value) or is_library_stream(value)


def _table(dataset: Any, columns: list[str], config: DataConfig, named: str) -> SourceRows:
    """A dataset of the library as a table; of a stream its first rows."""
    if is_library_stream(dataset):
        return StreamedRows(dataset, columns, config.stream_rows, named)
    return LibraryRows(dataset, columns, named)


def load_data(
    config: DataConfig,
    base: Path,
    unit: str | None = None,
    pretrained: Pretrained | None = None,
    kept: Path | None = None,
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
        kept: the folder of a run that keeps the tokens of texts.
        criterion: the loss that the targets are for; None for one of the user's own.
        trained_on: timm's pretrained_cfg of a model, where it has one: how its images are prepared.
        allow_download: whether a dataset by a hub id may be downloaded.

    Raises ConfigError where a file, column or factory is not there, DataError where the data can't be used.
    """
    if config.text is not None or config.prompt is not None or config.messages is not None:
        found = _load_texts(config, base, unit, pretrained, kept)
    elif config.images is not None or config.image is not None:
        found = _load_images(config, base, unit, labels_for(config, criterion), pretrained or trained_on)
    else:
        found = _load_numbers(config, base, unit, labels_for(config, criterion), allow_download)
    found.stamps = tuple(Stamp.of(file) for file in files_read_again(config, base))
    return found


def _load_numbers(
    config: DataConfig, base: Path, unit: str | None, labels: Labels, allow_download: bool
) -> Samples:
    if config.factory is not None:
        dataset = made_by_factory(config, base)
        if not _is_table(dataset):
            return DatasetSamples(dataset, config, unit, labels)
        columns = Wanted.of(config, unit).columns
        rows = _table(dataset, columns, config, f"the dataset of {config.factory}")
        rows = _numbered(rows, config, labels.names)
        return _noted(TableSamples(rows, config, unit, labels), rows)
    if config.dataset is not None:
        rows = _numbered(open_rows(config, base, unit, allow_download=allow_download), config, labels.names)
        return _noted(TableSamples(rows, config, unit, labels), rows)
    source, paths = source_of(config, base)
    if isinstance(source, ArraySource):
        wanted = Wanted.of(config, unit)
        parts = [(path, _arrays_of(source, path, wanted)) for path in paths]
        return ArraySamples(parts, config, unit, labels)
    if isinstance(source, TableSource) or len(paths) > 1:
        return TableSamples(open_rows(config, base, unit), config, unit, labels)
    return source.load(paths[0], config, unit)


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
    if isinstance(trained, Pretrained):
        labels = labels_of_head(labels, trained.config, config)
        if not isinstance(config.inputs, dict):
            config = config.model_copy(update={"inputs": {"pixel_values": config.image}})
    rows = _numbered(rows, config, labels.names)
    found = ImageSamples(rows, config, labels, unit, folder=folder, prepared=preparation(config, trained))
    return _noted(found, rows)


def _folder_of_images(config: DataConfig, base: Path, rows: SourceRows) -> Path:
    """The folder that paths of images are relative to."""
    if config.images is not None:
        return base / config.images
    return rows.files[0].parent if rows.files else base


def labels_of_head(labels: Labels, settings: Any, config: DataConfig) -> Labels:
    """The labels with the names of a pretrained model's classes. settings: its config, of transformers."""
    names = HeadLabels.of(settings, config).given
    return replace(labels, names=names) if names else labels


def _numbered(rows: SourceRows, config: DataConfig, names: Sequence[str] | None) -> SourceRows:
    """The rows with labels that are numbered as in `names`, where the dataset has names for its numbers."""
    targets = target_names(config)
    return numbered_as(rows, targets[0], names) if len(targets) == 1 else rows


def _noted(samples: Samples, rows: SourceRows) -> Samples:
    """The samples; their notes include the facts about the rows."""
    samples.notes = (*samples.notes, *rows.notes)
    return samples


def _load_texts(
    config: DataConfig, base: Path, unit: str | None, pretrained: Pretrained | None, kept: Path | None
) -> Samples:
    if pretrained is None:
        raise ConfigError(
            "data names columns of text, and the model is not a pretrained one",
            expected="model.pretrained and model.task, whose tokenizer makes numbers of texts",
            next_step="name columns of numbers in data.inputs for a model of your own",
        )
    from psgrad.data.text_samples import TextSamples, text_task

    task = text_task(config, base, pretrained)
    rows = open_rows(config, base, unit, allow_download=pretrained.allow_download)
    rows = _numbered(rows, config, task.class_names)
    return _noted(TextSamples(rows, task, config, unit, kept), rows)


# -- what is known without weights, for `psgrad validate` --------------------------------------------------

_LOOKED_AT = 2048  # rows of text, for their lengths


def text_facts(model: ModelConfig, data: DataConfig, base: Path) -> str:
    """The lengths of the first rows in tokens, in words. The columns, all labels that are one number or name
    a row, and these rows are looked at. Raises ConfigError and DataError as loading and reading them would.
    """
    from psgrad.data.text_samples import TextSamples, text_task

    task = text_task(data, base, _settings(model, base))
    samples = TextSamples(_numbered(open_rows(data, base), data, task.class_names), task, data)
    count = min(_LOOKED_AT, len(samples))
    lengths = samples.read(0, count).lengths
    assert lengths is not None
    limit = "" if task.tokenizer.limit is None else f", at most {task.tokenizer.limit:,} are taken"
    notes = "".join(f"; {note}" for note in task.tokenizer.notes)
    rows = f"the first {count:,} rows" if count < len(samples) else "rows"
    return f"{rows} of {int(lengths[:, 0].min()):,} to {int(lengths[:, 0].max()):,} tokens{limit}{notes}"


def image_facts(model: ModelConfig, data: DataConfig, base: Path) -> tuple[str, tuple[str, ...]]:
    """(how many images there are, in words; what is to be said of their folder). Labels by name are looked
    at, and no image is opened. Raises ConfigError and DataError as loading them would.
    """
    from psgrad.data.image_files import with_names

    settings = _settings(model, base).config
    rows = open_rows(data, base)
    named = data if data.images is None else with_names(data, base)
    labels = labels_of_head(Labels(kind="class"), settings, named)
    if named.target_column is not None:
        values = np.array(plain(rows.column(named.target_column)).to_pylist(), dtype=object)
        if len(values) and all(isinstance(value, str) for value in values):
            labels.encoded(values, named.target_column, rows.row_name)
    return f"{rows.count:,} images", rows.notes


def _settings(model: ModelConfig, base: Path) -> Pretrained:
    assert model.pretrained is not None
    assert model.task is not None
    found = located(
        model.pretrained, base, key="model.pretrained", holds=("*.json",), revision=model.revision
    )
    return Pretrained(found.folder, model.task, read_settings(found.folder, model))
