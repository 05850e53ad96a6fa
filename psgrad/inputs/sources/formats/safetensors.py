"""Datasets in safetensors: one tensor for each column, whose rows are read from the disk when asked for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import safetensors

from psgrad.config import DataConfig
from psgrad.errors import ConfigError, DataError
from psgrad.inputs.sources.files import named_columns, require_columns
from psgrad.inputs.sources.source import Column, DataHeader, Source, row_count

if TYPE_CHECKING:
    from psgrad.inputs.rows import Samples


class Safetensors(Source):
    """Named tensors, as safetensors' save_file writes them."""

    name: ClassVar[str] = "safetensors"

    def header(self, path: Path) -> DataHeader:
        columns = {}
        try:
            with safetensors.safe_open(path, framework="numpy") as file:
                for name in sorted(file.keys()):
                    found = file.get_slice(name)
                    kind = (
                        "boolean"
                        if found.get_dtype() == "BOOL"
                        else "integer"
                        if found.get_dtype()[0] in "IU"
                        else "fraction"
                    )
                    columns[name] = Column(kind, found.get_dtype(), tuple(found.get_shape()))
        except Exception as error:
            raise damaged(path, error) from error
        return DataHeader(path, list(columns), columns, row_count(columns))

    def load(self, path: Path, config: DataConfig, unit: str | None = None) -> Samples:
        """A safetensors file; its rows are read from the disk when they are asked for."""
        from psgrad.inputs.sources.arrays import ArraySamples

        try:
            file: Any = safetensors.safe_open(path, framework="pt", device="cpu")
            require_columns(named_columns(config, unit), sorted(file.keys()), str(path))
            columns = {
                name: file.get_tensor(name) for name in named_columns(config, unit)
            }  # mapped: nothing is read yet
        except ConfigError:
            raise
        except Exception as error:
            raise damaged(path, error) from error
        return ArraySamples(columns, config, path, unit)


def damaged(path: Path, error: Exception) -> DataError:
    """The error for a safetensors file that can't be read."""
    return DataError(
        f"{path} is damaged: {error}",
        expected="a whole safetensors file",
        cause="an interrupted copy or download",
    )
