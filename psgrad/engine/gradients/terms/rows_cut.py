"""Rows of a table with their columns cut into the atoms of a layout, as in product_cut.py."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from psgrad.engine.gradients.layout import Layout
from psgrad.engine.gradients.terms.axes import named_axes, owners
from psgrad.engine.gradients.terms.base import Names


@dataclass
class CutRows:
    """Rows that are changed in place by the maps below; the axis of the table is one axis of the layout."""

    index: torch.Tensor  # [n, t]
    rows: torch.Tensor  # [n, t, *columns]
    count: int
    table: int  # the table's axis
    columns: Names
    axes: list[Names]
    shape: list[int]

    @classmethod
    def of(cls, index: torch.Tensor, rows: torch.Tensor, count: int, layout: Layout) -> CutRows | None:
        """Rows [n, t, b] of a table of `count`, cut; None where the layout mixes axes of the term."""
        axes = named_axes(layout)
        if axes is None:
            return None
        owner = owners(layout, (count, rows.shape[2]))
        tables, columns = ([name for name in owner if owner[name] == axis] for axis in range(2))
        if len(tables) != 1 or tables not in axes:
            return None
        rows = rows.reshape(*rows.shape[:2], *(layout.atoms[name] for name in columns))
        return cls(index, rows, count, tables[0], columns, axes, list(layout.inner))

    def slice(self, name: int, at: slice) -> None:
        if name == self.table:
            start, stop, step = at.indices(self.count)
            inside = (self.index >= start) & (self.index < stop) & ((self.index - start) % step == 0)
            self.count = len(range(start, stop, step))
            self.index = torch.where(inside, (self.index - start) // step, 0)
            self.rows = self.rows.masked_fill(~inside.reshape(*inside.shape, *(1,) * len(self.columns)), 0)
        else:
            self.rows = self.rows[(slice(None),) * (2 + self.columns.index(name)) + (at,)]

    def sum(self, name: int) -> None:
        if name == self.table:
            self.count = 1  # all rows are one then
        else:
            self.rows = self.rows.sum(2 + self.columns.index(name))
            self.columns.remove(name)
