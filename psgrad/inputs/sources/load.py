"""The dataset of a config, by the suffix of its file or the factory that makes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from psgrad.config import DataConfig
from psgrad.errors import DataError
from psgrad.inputs.rows import Block, Samples
from psgrad.inputs.sources.arrays import load_npz, load_safetensors
from psgrad.inputs.sources.datasets import load_dataset
from psgrad.inputs.sources.files import require_file
from psgrad.inputs.sources.tables import load_csv, load_parquet

__all__ = ["Block", "Samples", "load_data"]

_READERS: dict[str, Callable[[Path, DataConfig, str | None], Samples]] = {
    ".npz": load_npz,
    ".csv": load_csv,
    ".parquet": load_parquet,
    ".safetensors": load_safetensors,
}


def load_data(config: DataConfig, base: Path, unit: str | None = None) -> Samples:
    """The dataset that a config names; paths are relative to `base`.

    `unit` names the column that says whom each row belongs to (privacy.unit.column); what it holds is in
    `Samples.units`. Raises ConfigError where a file, column or factory is not there, DataError where the data
    can't be used.
    """
    if config.path is None:
        return load_dataset(config, base, unit)
    path = require_file(base / config.path, "dataset", DataError)
    return _READERS[path.suffix.lower()](path, config, unit)
