"""Rows of tables as tensors: columns of numbers or of lists of numbers."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from psgrad.config import DataConfig
from psgrad.errors import DataError
from psgrad.inputs.rows import Block, Samples, row_numbers, to_tensor, unique_ids, unit_ids
from psgrad.inputs.sources.arrow import is_list, plain, require_numbers
from psgrad.inputs.sources.files import input_names, named_columns, require_rows
from psgrad.inputs.sources.tables import Array, Rows


class TableSamples(Samples):
    """Rows of a table as tensors. A list of scalar columns is one feature vector; any other column is a
    tensor of its own.
    """

    def __init__(self, rows: Rows, config: DataConfig, unit: str | None = None) -> None:
        require_rows(rows.count, rows.source)
        self._rows = rows
        self._inputs = input_names(config)
        self._target = config.target
        self._shapes: dict[str, tuple[int, ...]] = {}
        kinds = {name: rows.schema.field(name).type for name in named_columns(config)}
        for name in (*self._inputs, *([config.target] if config.target is not None else ())):
            require_numbers(name, kinds[name])
        self._one_vector = isinstance(config.inputs, list) and not any(
            is_list(kinds[name]) for name in self._inputs
        )
        ids = (
            row_numbers(rows.count)
            if config.id is None
            else unique_ids(plain(rows.column(config.id)).to_pandas(), config.id)
        )
        units = None if unit is None else unit_ids(plain(rows.column(unit)).to_pandas(), unit)
        targets = None
        if config.target is not None and not is_list(kinds[config.target]):
            targets = to_tensor(_numbers(rows.column(config.target), config.target, 0), config.target).numpy()
        super().__init__(ids, targets, rows.fingerprint, units)
        self.read(0, 1)  # the first row's shapes are what every other row must have

    def read(self, start: int, stop: int) -> Block:
        return self._block(self._rows.read(start, stop), start)

    def input_names(self) -> list[str]:
        return list(self._inputs)

    def take(self, rows: Array) -> Block:
        distinct, places = np.unique(self._existing(rows), return_inverse=True)
        table = self._rows.take(distinct)
        try:
            return self._block(table, 0).at(places)
        except DataError:
            for row in distinct.tolist():  # one of them is at fault, and is told with its own number
                self.read(row, row + 1)
            raise

    def _block(self, table: pa.Table, start: int) -> Block:
        arrays = [self._array(table, name, start) for name in self._inputs]
        if self._one_vector:
            inputs = [to_tensor(np.stack(arrays, axis=1), ", ".join(self._inputs))]
        else:
            inputs = [to_tensor(array, name) for name, array in zip(self._inputs, arrays, strict=True)]
        return Block(
            tuple(inputs),
            (
                None
                if self._target is None
                else to_tensor(self._array(table, self._target, start), self._target)
            ),
        )

    def _array(self, table: pa.Table, name: str, start: int) -> Array:
        array = _numbers(table.column(name), name, start, self._shapes.get(name))
        self._shapes.setdefault(name, array.shape[1:])
        return array


# -- Arrow to numpy ------------------------------------------------------------------------------------------


def _numbers(
    column: pa.ChunkedArray | pa.Array,
    name: str,
    first_row: int,
    shape: tuple[int, ...] | None = None,
    values_per_row: int = 1,
) -> Array:
    """[n, *shape] of a column of numbers or of (lists of) lists of them; its first value belongs to
    `first_row`.

    Without a `shape` the first row's is taken. An empty cell is NaN among fractions, so that its row is
    reported as nonfinite, and an error among whole numbers and lists, which have no NaN. `values_per_row` is
    more than one inside a list.
    """
    array = plain(column)
    if array.null_count and not pa.types.is_floating(array.type):
        row = first_row + _first(array.is_null().to_numpy(zero_copy_only=False)) // values_per_row
        raise DataError(
            f"row {row} of the column {name!r} is empty", expected=f"a value of type {array.type}"
        )
    if not is_list(array.type):
        return np.asarray(array.to_numpy(zero_copy_only=False))
    lengths = pc.list_value_length(array).to_numpy(zero_copy_only=False)
    width = int(lengths[0]) if shape is None else shape[0]
    if (lengths != width).any():
        index = _first(lengths != width)
        raise DataError(
            f"row {first_row + index // values_per_row} of the column {name!r} has a list of {lengths[index]}"
            f" values, row 0 of {width}",
            expected="one length in all rows",
            next_step="pad or cut the rows to one length before they are saved",
        )
    if width == 0:
        return np.empty((len(array), 0), dtype=np.float32)
    values = _numbers(
        array.flatten(), name, first_row, None if shape is None else shape[1:], values_per_row * width
    )
    return values.reshape(len(array), width, *values.shape[1:])


def _first(mask: Array) -> int:
    return int(np.argmax(mask))
