"""Labels that a dataset has as numbers with names of its own: numbered as the classes of the model are."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import pyarrow as pa

from psgrad.data.sources.source_rows import Array, SourceRows
from psgrad.errors import DataError
from psgrad.wording import first_of

_SHOWN = 20


def numbered_as(rows: SourceRows, column: str, names: Sequence[str] | None) -> SourceRows:
    """The rows with the labels of a column numbered as in `names`, where the dataset has names for them and
    these are in another order. Numbers without names, and names that are not known, change nothing.

    Raises DataError where some names are known at another place, and others are not known.
    """
    declared = rows.class_names.get(column)
    if declared is None or names is None:
        return rows
    moved = [name for place, name in enumerate(declared) if name in names and names.index(name) != place]
    if not moved:
        return rows
    unknown = [name for name in declared if name not in names]
    if unknown:
        raise DataError(
            f"the labels {column!r} of {rows.source} have {moved[0]!r} as class {declared.index(moved[0])},"
            f" which is class {names.index(moved[0])} of the model, and {unknown[0]!r}, which is no class",
            expected=f"names out of {first_of(names, _SHOWN)}",
        )
    return _Renumbered(rows, column, [names.index(name) for name in declared], names)


class _Renumbered(SourceRows):
    """Rows of which a column has other numbers. numbers: the new one of each old one."""

    def __init__(self, rows: SourceRows, column: str, numbers: Sequence[int], names: Sequence[str]) -> None:
        super().__init__(rows.schema, rows.count, rows.files)
        self._rows, self._column, self._numbers = rows, column, numbers
        self.source, self.groups = rows.source, rows.groups
        self.notes = (*rows.notes, f"{column}: labels by their names, as the classes are known")
        self.class_names = {**rows.class_names, column: tuple(names)}

    @cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(f"{self._rows.fingerprint} {self._numbers}".encode()).hexdigest()

    def read(self, start: int, stop: int) -> pa.Table:
        return self._renumbered(self._rows.read(start, stop))

    def take(self, rows: Array) -> pa.Table:
        return self._renumbered(self._rows.take(rows))

    def column(self, name: str) -> pa.ChunkedArray:
        found = self._rows.column(name)
        return pa.chunked_array([self._changed(found)]) if name == self._column else found

    def place(self, row: int) -> str:
        return self._rows.place(row)

    def _renumbered(self, table: pa.Table) -> pa.Table:
        place = table.schema.get_field_index(self._column)
        if place < 0:
            return table
        return table.set_column(place, table.schema.field(place), self._changed(table.column(place)))

    def _changed(self, column: pa.ChunkedArray) -> pa.Array:
        return pa.array([self._number(value) for value in column.to_pylist()], column.type)

    def _number(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._number(each) for each in value]
        return self._numbers[value] if value is not None and 0 <= value < len(self._numbers) else value
