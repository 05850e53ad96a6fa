"""Datasets in npz and safetensors: one array per column, its first axis the rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from psgrad.config import DataConfig
from psgrad.errors import ConfigError, DataError
from psgrad.inputs.labels import Labels
from psgrad.inputs.rows import (
    Array,
    Block,
    Samples,
    checked_weights,
    row_numbers,
    stacked,
    to_tensor,
    unique_ids,
    unit_ids,
)
from psgrad.inputs.sources.files import input_names, length_inputs, require_rows, sha256_of, target_names
from psgrad.inputs.sources.source import common_length


class ArraySamples(Samples):
    """Columns that can be indexed: arrays in memory, or tensors mapped from a file, whose rows are read when
    they are asked for.
    """

    def __init__(
        self,
        columns: dict[str, Any],
        config: DataConfig,
        path: Path,
        unit: str | None = None,
        labels: Labels | None = None,
    ) -> None:
        self._columns = columns
        self._inputs = input_names(config)
        self._stack = isinstance(config.inputs, list) and bool(config.stack)
        self._targets = target_names(config)
        self._weight = config.weight
        if length_inputs(config):
            raise ConfigError(
                f"length_of: {path} holds arrays, whose rows are of one length",
                expected="lists of unequal length, as in jsonl, csv, parquet and arrow files",
            )
        shapes = {name: tuple(column.shape) for name, column in columns.items()}
        count = common_length(shapes, path)
        assert count is not None  # a config names at least one column
        require_rows(count, str(path))
        for name in (config.id, unit, config.weight, *(self._targets if len(self._targets) > 1 else ())):
            if name is not None and len(shapes[name]) != 1:
                what = "ids" if name in (config.id, unit) else "numbers"
                raise DataError(
                    f"the {what} {name!r} in {path} have the shape {list(shapes[name])}",
                    expected="one per row",
                )
        ids = row_numbers(count) if config.id is None else unique_ids(_decoded(columns[config.id]), config.id)
        units = None if unit is None else unit_ids(_decoded(columns[unit]), unit)
        targets = None
        if len(self._targets) == 1 and len(shapes[self._targets[0]]) == 1:
            (name,) = self._targets
            encoded = (labels or Labels()).encoded(_decoded(columns[name][:]), name)
            targets = to_tensor(encoded.values, name).numpy()
            self.class_names, self.notes = encoded.class_names, (encoded.note,) if encoded.note else ()
        super().__init__(ids, targets, sha256_of(path), units)
        self.keywords = tuple(config.inputs) if isinstance(config.inputs, dict) else ()
        self.weighted = config.weight is not None
        self.read(0, 1)  # so that a column of the wrong type is told now, and not in the middle of the run

    def read(self, start: int, stop: int) -> Block:
        return self._block(slice(start, stop))

    def take(self, rows: Array) -> Block:
        return self._block(self._existing(rows))

    def input_names(self) -> list[str]:
        return list(self._inputs)

    def _block(self, rows: slice | Array) -> Block:
        inputs = [to_tensor(self._columns[name][rows], name) for name in self._inputs]
        if self._stack:
            inputs = [stacked(inputs, self._inputs, "data.stack")]
        if self._weight is not None:
            weights = to_tensor(self._columns[self._weight][rows], self._weight)
            numbers = range(len(self))[rows] if isinstance(rows, slice) else rows
            inputs.append(checked_weights(weights, self._weight, lambda place: f"row {numbers[place]}"))
        if self.targets is not None:
            return Block(tuple(inputs), torch.from_numpy(np.array(self.targets[rows])))
        targets = [to_tensor(self._columns[name][rows], name) for name in self._targets]
        if len(targets) > 1:
            return Block(tuple(inputs), stacked(targets, self._targets, "data.target"))
        return Block(tuple(inputs), targets[0] if targets else None)


def _decoded(values: Array | Tensor) -> Array:
    """Ids as numpy has them; those in bfloat16, which it has not, are told as the fractions that they are."""
    if isinstance(values, Tensor):
        return (values.float() if values.is_floating_point() else values).numpy()
    return np.char.decode(values, "utf-8") if values.dtype.kind == "S" else values
