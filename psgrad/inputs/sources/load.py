"""The dataset of a config: its file, read by the source of its suffix, or what its factory returns."""

from __future__ import annotations

from pathlib import Path

from psgrad.config import DataConfig
from psgrad.inputs.rows import Block, Samples
from psgrad.inputs.sources.datasets import load_dataset
from psgrad.inputs.sources.source import source_of

__all__ = ["Block", "Samples", "load_data"]


def load_data(config: DataConfig, base: Path, unit: str | None = None) -> Samples:
    """The dataset that a config names; paths are relative to `base`.

    `unit` names the column that says whom each row belongs to (privacy.unit.column); what it holds is in
    `Samples.units`. Raises ConfigError where a file, column or factory is not there, DataError where the data
    can't be used.
    """
    if config.path is None:
        return load_dataset(config, base, unit)
    source, path = source_of(config, base)
    return source.load(path, config, unit)
