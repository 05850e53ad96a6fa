"""The dataset of a config: the rows of its files, its folder or its library, or what its factory returns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from psgrad.config import DataConfig
from psgrad.data.columns import ColumnRoles, require_rows, target_names
from psgrad.data.loss import Criterion
from psgrad.data.rows import Samples
from psgrad.data.sources.files import read_files
from psgrad.data.sources.table_rows import TableRows
from psgrad.data.sources.table_samples import TableSamples
from psgrad.data.targets import Labels
from psgrad.errors import ConfigError

if TYPE_CHECKING:
    from psgrad.models.pretrained import Pretrained


def open_rows(config: DataConfig, base: Path, unit: str | None = None, made: Any = None) -> TableRows:
    """The columns that a config names, of any type, as a table; paths are relative to `base`. made: what the
    config's factory returned.

    Raises ConfigError where a file or column is not there, DataError where the data can't be used.
    """
    roles = ColumnRoles.of(config, unit)
    if config.images is not None:
        from psgrad.data.image_files import folder_rows

        rows = folder_rows(config, base, unit)
    elif config.path is not None:
        rows = read_files(config, base, roles)
    else:
        from psgrad.data.sources.library_datasets import library_dataset, library_rows

        made = library_dataset(config, base) if made is None else made
        named = f"of {config.factory}" if config.factory is not None else f"{config.dataset}"
        rows = library_rows(made, roles.columns, f"the dataset {named}")
    require_rows(rows.count, rows.source)
    return rows


def load_data(
    config: DataConfig,
    base: Path,
    unit: str | None = None,
    pretrained: Pretrained | None = None,
    *,
    criterion: Criterion | None = None,
    trained_on: Mapping[str, Any] | None = None,
) -> Samples:
    """The dataset that a config names; paths are relative to `base`.

    Args:
        unit: the column that says whom each row belongs to (privacy.unit.column); what it holds is in
            `Samples.units`.
        pretrained: the model that texts and images are prepared for.
        criterion: the loss that the targets are for; None for one of the user's own.
        trained_on: timm's pretrained_cfg of a model, where it has one: how its images are prepared.

    Raises ConfigError where a file, column or factory is not there, DataError where the data can't be used.
    """
    made = None
    if config.factory is not None:
        from psgrad.data.sources.datasets import DatasetSamples, made_by_factory
        from psgrad.data.sources.library_datasets import is_library_dataset

        made = made_by_factory(config, base)
        if not is_library_dataset(made):
            _require_no_texts(made, config)
            return DatasetSamples(made, config, unit, labels_for(config, criterion))
    if config.reads_texts:
        return _texts(config, base, unit, pretrained, made)
    rows, labels = open_rows(config, base, unit, made), labels_for(config, criterion)
    if config.images is None and config.image is None:
        _require_order(rows, config, labels.names)
        return TableSamples(rows, config, unit, labels)
    return _images(rows, config, base, unit, labels, pretrained or trained_on)


def _require_no_texts(made: Any, config: DataConfig) -> None:
    """Raises ConfigError for columns of text, or of images, of a Dataset that has tensors."""
    if config.reads_texts or config.image is not None:
        raise ConfigError(
            f"the factory {config.factory} returned an object of type {type(made).__name__}, and data"
            " names columns of text or images; expected a datasets.Dataset, whose columns may be such",
        )


def labels_for(config: DataConfig, criterion: Criterion | None) -> Labels:
    """How the targets of a config become what its loss compares with."""
    names = None if config.class_names is None else tuple(config.class_names)
    return Labels(names=names) if criterion is None else Labels(criterion.kind, criterion.ignore_index, names)


def _require_order(rows: TableRows, config: DataConfig, names: Sequence[str] | None) -> None:
    """Raises DataError where the dataset and the model have the names of classes in another order."""
    targets = target_names(config)
    if len(targets) == 1 and targets[0] in rows.class_names:
        from psgrad.data.sources.library_datasets import require_order

        require_order(rows, targets[0], names)


def _images(
    rows: TableRows,
    config: DataConfig,
    base: Path,
    unit: str | None,
    labels: Labels,
    trained: Pretrained | Mapping[str, Any] | None,
) -> Samples:
    from psgrad.data.image_files import with_names
    from psgrad.data.image_samples import ImageSamples, preparation

    folder = rows.files[0].parent if rows.files else base  # that paths of images are relative to
    if config.images is not None:
        folder, config = base / config.images, with_names(config, base)
    if trained is not None and not isinstance(trained, Mapping):
        from psgrad.data.tasks.classification import names_of_head

        labels = replace(labels, names=names_of_head(trained.config, config) or labels.names)
        if not isinstance(config.inputs, dict):
            config = config.model_copy(update={"inputs": {"pixel_values": config.image}})
    _require_order(rows, config, labels.names)
    return ImageSamples(rows, config, labels, unit, folder=folder, prepared=preparation(config, trained))


def _texts(
    config: DataConfig, base: Path, unit: str | None, pretrained: Pretrained | None, made: Any
) -> Samples:
    if pretrained is None:
        raise ConfigError(
            "data names columns of text, and the model is not a pretrained one; expected model.pretrained"
            " and model.task, whose tokenizer makes numbers of texts",
            hint="name columns of numbers in data.inputs for a model of your own",
        )
    from psgrad.data.text_samples import TextSamples, text_task

    task = text_task(config, base, pretrained)
    rows = open_rows(config, base, unit, made)
    _require_order(rows, config, task.class_names)
    return TextSamples(rows, task, config, unit)
