"""The samples of a run: the rows of a dataset, with the columns that the loss takes, and in groups."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from psgrad.config import Config, DataConfig
from psgrad.errors import ConfigError
from psgrad.inputs.derived import GroupedSamples, SamplesWithColumns
from psgrad.inputs.loss import Criterion
from psgrad.inputs.models.loaded import LoadedModel
from psgrad.inputs.rows import Samples
from psgrad.inputs.sources.load import load_data


def images_trained_on(config: Config, loaded: LoadedModel) -> Mapping[str, Any] | None:
    """What timm says of the images that a model of its was trained on; None for other models."""
    found: Mapping[str, Any] | None = getattr(loaded.model, "pretrained_cfg", None)
    return found if config.model.timm is not None else None


def samples_of(
    data: DataConfig,
    base: Path,
    unit: str | None = None,
    *arguments: Any,
    criterion: Criterion,
    trained_on: Mapping[str, Any] | None,
    allow_download: bool,
) -> Samples:
    """The dataset as `load_data` has it, with the columns that the loss takes; of groups where data.group
    names them.
    """

    def loaded(column: str | None) -> Samples:
        return load_data(
            data,
            base,
            column,
            *arguments,
            criterion=criterion,
            trained_on=trained_on,
            allow_download=allow_download,
        )

    found = _with_columns(loaded(data.group or unit), data, base, criterion, allow_download)
    if data.group is None:
        return found
    return GroupedSamples(found, data.group, None if unit is None else loaded(unit).units)


def _with_columns(
    found: Samples, data: DataConfig, base: Path, criterion: Criterion, allow_download: bool
) -> Samples:
    """Rows with the columns that the loss takes, if it takes any."""
    if not criterion.columns:
        return found
    columns = load_data(data.with_inputs(criterion.columns), base, allow_download=allow_download)
    if len(columns) != len(found):
        raise ConfigError(
            f"loss.columns: the columns have {len(columns):,} rows, and there are {len(found):,} samples",
            expected="one row each",
        )
    return SamplesWithColumns(found, columns, criterion.columns)
