"""Linear maps of looked-up rows: what is shared is looked up, too."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from psgrad.engine.gradients.deferral.linear_maps import (
    Maps,
    Names,
    arranged,
    by_atoms,
    cut_out,
    dense,
    named_axes,
    of_one_dtype,
    owners,
    varies,
)
from psgrad.engine.gradients.deferral.linear_maps import Product as Multiply
from psgrad.engine.gradients.deferred import Placed
from psgrad.engine.gradients.layout import Layout
from psgrad.engine.gradients.terms import Product, Rows


@dataclass
class Cut:
    """Rows whose columns are cut as a layout cuts them; the table's own axis must be whole, and alone."""

    index: torch.Tensor  # [n, t]
    rows: torch.Tensor  # [n, t, *columns]
    count: int
    table: int  # the table's axis
    columns: Names
    axes: list[Names]
    shape: list[int]

    @classmethod
    def of(cls, term: Rows, layout: Layout) -> Cut | None:
        axes = named_axes(layout)
        if axes is None:
            return None
        owner = owners(layout, term.shape)
        tables, columns = ([name for name in owner if owner[name] == axis] for axis in range(2))
        if len(tables) != 1 or tables not in axes:
            return None
        rows = term.rows.reshape(*term.rows.shape[:2], *(layout.atoms[name] for name in columns))
        return cls(term.index, rows, term.count, tables[0], columns, axes, list(layout.inner))

    def slice(self, name: int, at: slice) -> None:
        if name == self.table:
            start, stop, step = at.indices(self.count)
            inside = (self.index >= start) & (self.index < stop) & ((self.index - start) % step == 0)
            self.count = len(range(start, stop, step))
            self.index = torch.where(inside, (self.index - start) // step, 0)
            self.rows = self.rows.masked_fill(~inside.reshape(*inside.shape, *(1,) * len(self.columns)), 0)
        else:
            self.rows = self.rows[(slice(None),) * (2 + self.columns.index(name)) + (at,)]

    def placed(self) -> Placed:
        n, t, *sizes = self.rows.shape
        if self.count == 1:
            return dense(self.rows.sum(1), self.columns, self.axes, self.shape)
        term = Rows(self.index, self.rows.reshape(n, t, math.prod(sizes)), self.count)
        return arranged(term, [self.table, *self.columns], [self.count, *sizes], self.axes, self.shape)


class RowsMaps(Maps):
    """Of `Rows`."""

    def narrow(
        self, term: Rows, layout: Layout, dim: int, start: int, step: int, length: int
    ) -> Placed | None:
        cut = Cut.of(term, layout)
        return None if cut is None else cut_out(cut, layout, dim, start, step, length)

    def sum(self, term: Rows, layout: Layout, dims: set[int]) -> Placed | None:
        cut = Cut.of(term, layout)
        if cut is None:
            return None
        for dim in dims:
            for name in cut.axes[dim]:
                if name == cut.table:
                    cut.count = 1  # all rows are one then
                else:
                    cut.rows = cut.rows.sum(2 + cut.columns.index(name))
                    cut.columns.remove(name)
            cut.axes[dim], cut.shape[dim] = [], 1
        return cut.placed()

    def times(
        self, term: Rows, layout: Layout, by: torch.Tensor, product: Multiply, *, each: bool
    ) -> Placed | None:
        cut = Cut.of(term, layout)
        if cut is None:
            return None
        names = [cut.table, *cut.columns]
        spread = by_atoms(
            by, layout, cut.axes, names, each=each
        )  # [n or nothing, count or 1, *columns or ones]
        if not varies(spread, names, [cut.table], each=each):
            cut.rows = product(cut.rows, spread if each else spread.unsqueeze(0))
        elif each:
            samples = torch.arange(spread.shape[0], device=cut.index.device).unsqueeze(1)
            cut.rows = product(cut.rows, spread[samples, cut.index])
        else:
            cut.rows = product(cut.rows, spread[cut.index])
        return cut.placed()

    def scatter(self, term: Rows, layout: Layout, dim: int, index: torch.Tensor, size: int) -> Placed | None:
        cut = Cut.of(term, layout)
        if cut is None or cut.axes[dim] != [cut.table]:
            return None
        cut.index, cut.count, cut.shape[dim] = index[cut.index], size, size
        return cut.placed()

    def contract(self, term: Rows, layout: Layout, dim: int, matrix: torch.Tensor) -> Placed | None:
        cut = Cut.of(term, layout)
        if cut is None or matrix.dim() != 2:
            return None
        new, names = len(layout.atoms), cut.axes[dim]
        n, t, *sizes = cut.rows.shape
        cut.axes[dim], cut.shape[dim] = [new], matrix.shape[1]
        if names == [cut.table]:  # sum over t of matrix[index] ⊗ rows
            left, right = of_one_dtype(matrix[cut.index], cut.rows)
            term_ = Product(left.unsqueeze(1), right.reshape(n, 1, t, math.prod(sizes)))
            return arranged(term_, [new, *cut.columns], [matrix.shape[1], *sizes], cut.axes, cut.shape)
        if names != cut.columns:
            return None
        rows, matrix = of_one_dtype(cut.rows.reshape(n, t, math.prod(sizes)), matrix)
        cut.rows, cut.columns = torch.matmul(rows, matrix), [new]
        return cut.placed()
