"""Rows of tables as tensors: columns of numbers or of lists of numbers, which may differ in length. Lists of
unequal length are padded, their lengths are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from psgrad.config import DataConfig
from psgrad.data.columns import input_names, length_inputs, require_rows, target_names
from psgrad.data.rows import Block, Samples, checked_weights, ids_and_units, stacked, to_tensor
from psgrad.data.sources.arrow_types import is_list, is_text, require_numbers
from psgrad.data.sources.table_rows import Array, TableRows
from psgrad.data.targets import Labels
from psgrad.errors import DataError
from psgrad.ragged import RaggedAxes, RowNumbers

RowName = Callable[[int], str]
_ROWS_PER_PART = 8192


def numbers(array: pa.Array, name: str, row_name: RowName, fill: float = 0) -> Array:
    """[n, ...] of a column of numbers or of (lists of) lists of them, padded with `fill` to the longest.

    An empty cell is NaN among fractions, so that its row is reported as nonfinite, and an error among whole
    numbers and lists, which have no NaN. `row_name` names the row of a place in messages.
    """
    _require_cells(array, name, row_name)
    if not is_list(array.type):
        return np.asarray(array.to_numpy(zero_copy_only=False))
    if pa.types.is_fixed_size_list(array.type):
        size = array.type.list_size
        values = array.values.slice(array.offset * size, len(array) * size)  # flatten() copies
        inner = numbers(values, name, lambda place: row_name(place // max(size, 1)), fill)
        return inner.reshape(len(array), size, *inner.shape[1:])
    lengths = _lengths(array)
    values = array.flatten()
    inner = numbers(values, name, _name_by_value(lengths, row_name), fill)
    width = int(lengths.max(initial=0))
    if width == 0:
        return np.empty((len(array), 0), dtype=np.float32)
    if (lengths == width).all():
        return inner.reshape(len(array), width, *inner.shape[1:])
    padded = np.full((len(array), width, *inner.shape[1:]), fill, inner.dtype)
    padded[np.arange(width) < lengths[:, None]] = inner
    return padded


def axis_lengths(rows: TableRows, name: str) -> Array:
    """[n, depth] int64: the length of each axis of each row of a column of lists; all rows are read.

    Raises DataError for a row that is missing, whose lists differ in length among themselves, or that is
    empty where others are not.
    """
    count = 1 if _is_fixed(rows.schema.field(name).type) else rows.count
    found = []
    for start in range(0, count, _ROWS_PER_PART):
        part = rows.take(range(start, min(start + _ROWS_PER_PART, count))).column(name).combine_chunks()

        def row_name(place: int, first: int = start) -> str:
            return rows.row_name(first + place)

        found.append(_shapes(part, name, row_name))
    lengths = np.concatenate(found)
    empty = (lengths == 0).any(axis=1)
    if empty.any() and not empty.all():
        raise DataError(
            f"{rows.row_name(int(np.argmax(empty)))} of the column {name!r} is an empty list; expected at"
            " least one value in each row",
        )
    return np.broadcast_to(lengths, (rows.count, lengths.shape[1]))


def _shapes(array: pa.Array, name: str, row_name: RowName) -> Array:
    """[n, depth]: the lengths of each row's lists, and of the lists in them."""
    _require_cells(array, name, row_name)
    lengths = _lengths(array)
    values, name_of_value = array.flatten(), _name_by_value(lengths, row_name)
    if not is_list(array.type.value_type):
        _require_cells(values, name, name_of_value)
        return lengths[:, None]
    inner = _shapes(values, name, name_of_value)
    filled = lengths > 0
    starts = (np.cumsum(lengths) - lengths)[filled]
    found = np.zeros((len(array), 1 + inner.shape[1]), np.int64)
    found[:, 0] = lengths
    if len(starts):
        shortest, longest = np.minimum.reduceat(inner, starts), np.maximum.reduceat(inner, starts)
        if (uneven := (shortest != longest).any(axis=1)).any():
            row = int(np.flatnonzero(filled)[np.argmax(uneven)])
            raise DataError(
                f"{row_name(row)} of the column {name!r} has lists of {shortest[uneven][0].max()} and"
                f" {longest[uneven][0].max()} values; expected lists of one length inside a row",
            )
        found[filled, 1:] = longest
    return found


def _require_cells(array: pa.Array, name: str, row_name: RowName) -> None:
    if array.null_count and not pa.types.is_floating(array.type):
        row = int(np.argmax(array.is_null().to_numpy(zero_copy_only=False)))
        raise DataError(
            f"{row_name(row)} of the column {name!r} is empty; expected a value of type {array.type}"
        )


def _lengths(array: pa.Array) -> Array:
    return np.asarray(pc.list_value_length(array).to_numpy(zero_copy_only=False), np.int64)


def _name_by_value(lengths: Array, row_name: RowName) -> RowName:
    """Names the row that a value belongs to, of lists of these lengths."""
    return lambda place: row_name(int(np.searchsorted(np.cumsum(lengths), place, side="right")))


def _is_fixed(kind: pa.DataType) -> bool:
    return not is_list(kind) or (pa.types.is_fixed_size_list(kind) and _is_fixed(kind.value_type))


@dataclass(frozen=True)
class _Layout:
    """Which columns make which tensors.

    inputs: the columns of each input; `stacked`: along a new last axis. lengths: the inputs that are the
    lengths of their column.
    """

    inputs: tuple[tuple[str, ...], ...]
    stacked: bool
    lengths: frozenset[int]
    target: tuple[str, ...]


class TableSamples(Samples):
    """Rows of a table as tensors. A list of scalar columns is one feature vector; any other column is a
    tensor of its own.
    """

    def __init__(
        self, rows: TableRows, config: DataConfig, unit: str | None = None, labels: Labels | None = None
    ) -> None:
        require_rows(rows.count, rows.source)
        self._rows, self._labels = rows, Labels() if labels is None else labels
        self.input_names = tuple(input_names(config))
        self._layout = self._laid_out(config)
        self._weight = config.weight
        self.notes, self.stamps = rows.notes, rows.stamps
        self._lengths = {name: axis_lengths(rows, name) for name in self._columns() if self._is_list(name)}
        ids, units = ids_and_units(config, unit, rows.count, lambda name: rows.column(name).to_pandas())
        super().__init__(ids, self._scalar_targets(), rows.fingerprint, units)
        self.keywords = tuple(config.inputs) if isinstance(config.inputs, dict) else ()
        self.weighted = config.weight is not None
        self.ragged, self._row_lengths = self._ragged()
        self.take([0])  # a column of the wrong type is an error now, and not in the middle of the run

    def take(self, rows: RowNumbers) -> Block:
        rows = self._existing(rows)
        return self._block(self._rows.take(rows), rows)

    def row_name(self, row: int) -> str:
        return self._rows.row_name(row)

    def _is_number(self, name: str) -> bool:
        """Whether an input is a column of numbers, or of lists of them."""
        return True

    def _input(self, table: pa.Table, name: str, rows: Array, row_name: RowName) -> Tensor:
        """[n, ...]: a column of inputs. rows: their numbers [n], row_name: of a place among them."""
        return _tensors(table, [name], row_name)[0]

    def _laid_out(self, config: DataConfig) -> _Layout:
        """The layout of a config. Raises DataError where columns can't be numbers, or can't be stacked."""
        schema, names, targets = self._rows.schema, self.input_names, target_names(config)
        lengths = length_inputs(config)
        for place, name in enumerate(names):
            kind = schema.field(name).type
            if self._is_number(name):
                require_numbers(name, kind)
            if place in lengths and not is_list(kind):
                raise DataError(f"length_of: {name!r} is of type {kind}; expected a column of lists")
        for name in targets:
            kind = schema.field(name).type
            if len(targets) > 1 or not is_text(kind):
                require_numbers(name, kind)
            if len(targets) > 1 and is_list(kind):
                raise DataError(f"data.target: {name!r} holds lists; expected one number a row in each")
        lists = [name for name in names if is_list(schema.field(name).type) or not self._is_number(name)]
        if not isinstance(config.inputs, list) or lists or not self._rows.stacks:
            return _Layout(tuple((name,) for name in names), False, lengths, tuple(targets))
        return _Layout((names,), True, lengths, tuple(targets))

    def _columns(self) -> list[str]:
        names = [name for each in self._layout.inputs for name in each]
        return list(dict.fromkeys([*names, *self._layout.target]))

    def _is_list(self, name: str) -> bool:
        return is_list(self._rows.schema.field(name).type)

    def _scalar_targets(self) -> Array | None:
        """The targets [n] as numbers, where each is one."""
        if len(self._layout.target) != 1 or self._is_list(self._layout.target[0]):
            return None
        (name,) = self._layout.target
        column, kind = self._rows.column(name), self._rows.schema.field(name).type
        if is_text(kind):
            values = np.array(column.to_pylist(), dtype=object)
        else:
            values = numbers(column, name, self._rows.row_name)
        encoded = self._labels.encoded(values, name, self.row_name)
        declared = self._rows.class_names.get(name)
        self.class_names = encoded.class_names or self._labels.names or declared
        self.names_found = encoded.found or ("declared" if declared and self._labels.names is None else "")
        self.notes = (*((encoded.note,) if encoded.note else ()), *self.notes)
        return to_tensor(encoded.values, name).numpy()

    def _ragged(self) -> tuple[RaggedAxes | None, Tensor | None]:
        """Which axes differ from row to row, and [n, a] the lengths of those."""
        columns: list[Array] = []

        def axes_of(names: Sequence[str]) -> tuple[tuple[int, int], ...]:
            pairs = []
            for axis in range(self._lengths[names[0]].shape[1] if names and names[0] in self._lengths else 0):
                lengths = self._lengths[names[0]][:, axis]
                if (lengths == lengths[0]).all():
                    continue
                place = next((at for at, each in enumerate(columns) if np.array_equal(each, lengths)), None)
                if place is None:
                    columns.append(lengths)
                pairs.append((axis, len(columns) - 1 if place is None else place))
            return tuple(pairs)

        inputs = [
            () if place in self._layout.lengths else axes_of(names)
            for place, names in enumerate(self._layout.inputs)
        ]
        inputs += [()] if self.weighted else []
        axes = (*inputs, axes_of(self._layout.target))
        if not columns:
            return None, None
        padding = (*[0] * len(inputs), self._labels.padding)
        return RaggedAxes(axes, padding, masked=False), torch.from_numpy(np.stack(columns, axis=1))

    def _block(self, table: pa.Table, rows: Array) -> Block:
        def row_name(place: int) -> str:
            return self._rows.row_name(int(rows[place]))

        inputs = []
        for place, names in enumerate(self._layout.inputs):
            if place in self._layout.lengths:
                inputs.append(torch.from_numpy(self._lengths[names[0]][rows, 0]))
                continue
            found = [self._input(table, name, rows, row_name) for name in names]
            inputs.append(stacked(found, names, "data.inputs") if self._layout.stacked else found[0])
        if self._weight is not None:
            weights = _tensors(table, [self._weight], row_name)[0]
            inputs.append(checked_weights(weights, self._weight, row_name))
        target = None
        if self.targets is not None:
            target = torch.from_numpy(self.targets[rows])
        elif self._layout.target:
            found = _tensors(table, self._layout.target, row_name, self._labels.padding)
            target = stacked(found, self._layout.target, "data.target") if len(found) > 1 else found[0]
        lengths = None if self._row_lengths is None else self._row_lengths[torch.from_numpy(rows)]
        return Block(tuple(inputs), target, lengths, self.ragged)


def _tensors(table: pa.Table, names: Sequence[str], row_name: RowName, fill: float = 0) -> list[Tensor]:
    columns = (table.column(name) for name in names)
    return [
        to_tensor(numbers(_whole(column), name, row_name, fill), name)
        for name, column in zip(names, columns, strict=True)
    ]


def _whole(column: pa.ChunkedArray) -> pa.Array:
    """A column as one array, which is copied only where it has several parts."""
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
