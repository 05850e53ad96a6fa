"""Datasets in npz and safetensors: one array per column, its first axis the rows; of one file or of many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from psgrad.config import DataConfig
from psgrad.data.rows import (
    Array,
    Block,
    Samples,
    checked_weights,
    ids_and_units,
    stacked,
    to_tensor,
)
from psgrad.data.sources.file_checks import (
    input_names,
    length_inputs,
    named_files,
    require_rows,
    target_names,
)
from psgrad.data.sources.source import common_length
from psgrad.data.targets import Labels
from psgrad.errors import ConfigError, DataError
from psgrad.run.identity import files_sha256


class ArraySamples(Samples):
    """Columns that can be indexed: arrays in memory, or tensors mapped from a file."""

    def __init__(
        self,
        parts: Sequence[tuple[Path, Mapping[str, Any]]],
        config: DataConfig,
        unit: str | None = None,
        labels: Labels | None = None,
    ) -> None:
        """parts: (file, its columns by name) of each file, in the order of the rows."""
        columns = _joined(parts)
        path = named_files([file for file, _ in parts])
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
        require_rows(count, path)
        for name in (config.id, unit, config.weight, *(self._targets if len(self._targets) > 1 else ())):
            if name is not None and len(shapes[name]) != 1:
                what = "ids" if name in (config.id, unit) else "numbers"
                raise DataError(
                    f"the {what} {name!r} in {path} have the shape {list(shapes[name])}",
                    expected="one per row",
                )
        ids, units = ids_and_units(config, unit, count, lambda name: _decoded(columns[name][:]))
        targets = None
        if len(self._targets) == 1 and len(shapes[self._targets[0]]) == 1:
            (name,) = self._targets
            encoded = (labels or Labels()).encoded(_decoded(columns[name][:]), name)
            targets = to_tensor(encoded.values, name).numpy()
            self.class_names, self.names_found = encoded.class_names, encoded.found
            self.notes = (encoded.note,) if encoded.note else ()
        super().__init__(ids, targets, files_sha256([file for file, _ in parts]), units)
        self.keywords = tuple(config.inputs) if isinstance(config.inputs, dict) else ()
        self.weighted = config.weight is not None
        self.read(0, 1)  # a column of the wrong type is an error now, and not in the middle of the run

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


class JoinedArray:
    """The arrays of one column in several files, as one: rows are read from the file that they are in.

    Args:
        parts: (file, array) of each file that has rows; all of numpy or all of torch.

    Raises DataError where they are of different shapes, or hold numbers in one file and text in another.
    """

    def __init__(self, name: str, parts: Sequence[tuple[Path, Any]]) -> None:
        first, arrays = parts[0], [array for _, array in parts]
        for file, array in parts:
            shapes = [list(each.shape[1:]) for each in (first[1], array)]
            if shapes[0] != shapes[1]:
                raise DataError(
                    f"the rows of {name!r} have the shape {shapes[0]} in {first[0]}, {shapes[1]} in {file}",
                    expected="one shape in all files",
                )
            if _kind(array) != _kind(first[1]):
                raise DataError(
                    f"the column {name!r} has mixed types: {first[1].dtype} in {first[0]}, {array.dtype} in"
                    f" {file}",
                    expected="one type in all files",
                )
        self._parts = arrays
        self._starts = np.cumsum([0, *(len(array) for array in arrays)])
        self.shape = (int(self._starts[-1]), *arrays[0].shape[1:])
        kinds = [array.dtype for array in arrays]
        self.dtype: Any = (
            reduce(torch.promote_types, kinds) if isinstance(arrays[0], Tensor) else np.result_type(*kinds)
        )
        if np.dtype(np.uint64) in kinds and len({*kinds}) > 1:  # numpy makes fractions of them and int64
            raise DataError(
                f"the column {name!r} is of the types {', '.join(sorted(map(str, {*kinds})))}",
                expected="one type of whole numbers in all files, such as int64",
            )

    def __getitem__(self, rows: slice | Array) -> Any:
        numbers = np.arange(*rows.indices(self.shape[0])) if isinstance(rows, slice) else rows
        shape = (len(numbers), *self.shape[1:])
        torches = isinstance(self._parts[0], Tensor)
        found: Any = torch.empty(shape, dtype=self.dtype) if torches else np.empty(shape, self.dtype)
        part_of = np.searchsorted(self._starts[1:], numbers, side="right")
        for part in np.unique(part_of):
            there = np.flatnonzero(part_of == part)
            rows_there = self._parts[part][numbers[there] - self._starts[part]]
            found[there] = rows_there.to(self.dtype) if torches else rows_there
        return found


def _joined(parts: Sequence[tuple[Path, Mapping[str, Any]]]) -> dict[str, Any]:
    """name -> a column of all files. Files without rows are left out where another has some."""
    if len(parts) == 1:
        return dict(parts[0][1])
    for file, columns in parts:
        common_length({name: tuple(column.shape) for name, column in columns.items()}, file)
    names = list(parts[0][1])
    with_rows = [each for each in parts if len(each[1][names[0]])] or parts[:1]
    return {name: JoinedArray(name, [(file, columns[name]) for file, columns in with_rows]) for name in names}


def _kind(array: Array | Tensor) -> str:
    """What an array holds, in a word; whole numbers and fractions go together."""
    if isinstance(array, Tensor):
        return "booleans" if array.dtype == torch.bool else "numbers"
    return {"b": "booleans", **dict.fromkeys("iuf", "numbers")}.get(array.dtype.kind, "text")


def _decoded(values: Array | Tensor) -> Array:
    """Ids as numpy has them; those in bfloat16, which numpy lacks, become fractions."""
    if isinstance(values, Tensor):
        return (values.float() if values.is_floating_point() else values).numpy()
    return np.char.decode(values, "utf-8") if values.dtype.kind == "S" else values
