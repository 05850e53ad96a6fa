"""Datasets in safetensors: one tensor for each column, whose rows are read from the disk when asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import safetensors

from psgrad.errors import ConfigError, DataError
from psgrad.inputs.sources.file_checks import Wanted, require_columns
from psgrad.inputs.sources.source import (
    ArraySource,
    Column,
    DataHeader,
    KeptRows,
    Source,
    require_same_columns,
    row_count,
)


class Safetensors(ArraySource):
    """Named tensors, as safetensors' save_file writes them."""

    name: ClassVar[str] = "safetensors"
    read_again: ClassVar[bool] = True

    def header(self, path: Path) -> DataHeader:
        columns = {}
        try:
            with safetensors.safe_open(path, framework="numpy") as file:
                for name in sorted(file.keys()):
                    found = file.get_slice(name)
                    dtype = found.get_dtype()
                    kind = "boolean" if dtype == "BOOL" else "integer" if dtype[0] in "IU" else "fraction"
                    columns[name] = Column(kind, dtype, tuple(found.get_shape()))
        except Exception as error:
            raise damaged(path, error) from error
        return DataHeader(path, list(columns), columns, row_count(columns))

    def arrays(self, path: Path, wanted: Wanted) -> dict[str, Any]:
        """The columns that are named; rows are read from the disk when they are asked for."""
        try:
            file: Any = safetensors.safe_open(path, framework="pt", device="cpu")
            require_columns(wanted.columns, sorted(file.keys()), str(path))
            return {name: file.get_tensor(name) for name in wanted.columns}  # mapped: nothing is read yet
        except ConfigError:
            raise
        except Exception as error:
            raise damaged(path, error) from error

    def write(self, files: Sequence[Path], kept: KeptRows, target: BinaryIO, output: Source) -> None:
        import torch
        from safetensors.torch import save

        found: list[dict[str, Any]] = []
        metadata = None
        for path in files:
            with safetensors.safe_open(path, framework="pt") as file:
                metadata = file.metadata() if metadata is None else metadata
                columns = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
                rows = kept.next(len(next(iter(columns.values()))))
                found.append({name: each[rows].contiguous() for name, each in columns.items()})
                require_same_columns(found, files)
        target.write(save({name: torch.cat([part[name] for part in found]) for name in found[0]}, metadata))


def damaged(path: Path, error: Exception) -> DataError:
    """The error for a safetensors file that can't be read."""
    return DataError(
        f"{path} is damaged: {error}",
        expected="a whole safetensors file",
        cause="an interrupted copy or download",
    )
