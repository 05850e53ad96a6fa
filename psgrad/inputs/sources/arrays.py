"""Datasets in npz and safetensors: one array per column, its first axis the rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from psgrad.config import DataConfig
from psgrad.errors import DataError
from psgrad.inputs.rows import Array, Block, Samples, row_numbers, to_tensor, unique_ids, unit_ids
from psgrad.inputs.sources.files import (
    input_names,
    require_rows,
    sha256_of,
)
from psgrad.inputs.sources.source import common_length


class ArraySamples(Samples):
    """Columns that can be indexed: arrays in memory, or tensors mapped from a file, whose rows are read when
    they are asked for.
    """

    def __init__(
        self, columns: dict[str, Any], config: DataConfig, path: Path, unit: str | None = None
    ) -> None:
        self._columns = columns
        self._inputs = input_names(config)
        self._target = config.target
        shapes = {name: tuple(column.shape) for name, column in columns.items()}
        count = common_length(shapes, path)
        assert count is not None  # a config names at least one column
        require_rows(count, str(path))
        for name in (config.id, unit):
            if name is not None and len(shapes[name]) != 1:
                raise DataError(
                    f"the ids {name!r} in {path} have the shape {list(shapes[name])}", expected="one per row"
                )
        ids = row_numbers(count) if config.id is None else unique_ids(_decoded(columns[config.id]), config.id)
        units = None if unit is None else unit_ids(_decoded(columns[unit]), unit)
        scalar_targets = config.target is not None and len(shapes[config.target]) == 1
        targets = (
            to_tensor(columns[config.target][:], config.target).numpy()
            if config.target is not None and scalar_targets
            else None
        )
        super().__init__(ids, targets, sha256_of(path), units)
        self.read(0, 1)  # so that a column of the wrong type is told now, and not in the middle of the run

    def read(self, start: int, stop: int) -> Block:
        inputs = tuple(to_tensor(self._columns[name][start:stop], name) for name in self._inputs)
        return Block(
            inputs,
            (
                None
                if self._target is None
                else to_tensor(self._columns[self._target][start:stop], self._target)
            ),
        )

    def input_names(self) -> list[str]:
        return list(self._inputs)

    def take(self, rows: Array) -> Block:
        rows = self._existing(rows)
        inputs = tuple(to_tensor(self._columns[name][rows], name) for name in self._inputs)
        return Block(
            inputs,
            None if self._target is None else to_tensor(self._columns[self._target][rows], self._target),
        )


def _decoded(values: Array | Tensor) -> Array:
    """Ids as numpy has them; those in bfloat16, which it has not, are told as the fractions that they are."""
    if isinstance(values, Tensor):
        return (values.float() if values.is_floating_point() else values).numpy()
    return np.char.decode(values, "utf-8") if values.dtype.kind == "S" else values
