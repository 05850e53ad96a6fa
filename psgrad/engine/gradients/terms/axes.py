"""Linear maps of terms whose axes are cut into the atoms of a layout: a map along an atom is a map of one
factor.

An atom is a part of an axis that a layout keeps whole. Its name is its index in `layout.atoms`; atoms of size
one have no name. After a change of its factors the term has a new layout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from psgrad.engine.gradients.layout import AxisLayout, split_run
from psgrad.engine.gradients.terms.numerics import of_one_dtype, times_shared
from psgrad.engine.gradients.terms.term import Names, Placed, Term


def named_axes(layout: AxisLayout) -> list[Names] | None:
    """For each labelled axis the names (places in `layout.atoms`) of its atoms that are longer than one."""
    groups = layout.groups()
    return (
        None if groups is None else [[atom for atom in group if layout.atoms[atom] != 1] for group in groups]
    )


def owners(layout: AxisLayout, canonical: Sequence[int]) -> dict[int, int]:
    """For each atom longer than one, the canonical axis that it is a part of."""
    result: dict[int, int] = {}
    axis, left = -1, 1
    for atom, size in enumerate(layout.atoms):
        if size == 1:
            continue
        while left == 1:
            axis += 1
            left = canonical[axis]
        result[atom] = axis
        left //= size
    return result


def arranged(
    term: Term, names: Names, sizes: Sequence[int], axes: list[Names], shape: Sequence[int]
) -> Placed:
    """A term whose canonical axes are those of `names`, in order and of these sizes, placed under axes that
    are runs of names.
    """
    long = [(name, size) for name, size in zip(names, sizes, strict=True) if size != 1]
    place = {name: number for number, (name, _) in enumerate(long)}
    order = tuple(place[name] for axis in axes for name in axis if name in place)
    return Placed(term, AxisLayout(tuple(size for _, size in long), order, tuple(shape)))


def by_atoms(
    by: torch.Tensor, layout: AxisLayout, axes: list[Names], names: Names, *, each: bool
) -> torch.Tensor:
    """A multiplier of the layout's rank, with length one along axes on which it does not depend, as a tensor
    with one axis for each of `names`. each: whether it has a sample axis in front.
    """
    lead = tuple(by.shape[: int(each)])
    sizes: list[int] = []
    order: Names = []
    for axis, length in zip(axes, by.shape[len(lead) :], strict=True):
        order += axis
        sizes += [layout.atoms[name] if length != 1 else 1 for name in axis]
    by = by.reshape((*lead, *sizes))
    return by.permute((*range(len(lead)), *(len(lead) + order.index(name) for name in names)))


def varies(by: torch.Tensor, names: Names, among: Names, *, each: bool) -> bool:
    """Whether a multiplier [*names] depends on one of the axes `among`."""
    return any(by.shape[int(each) + names.index(name)] != 1 for name in among)


class Cut(Protocol):
    """A term whose factors' axes are cut into atoms."""

    axes: list[Names]  # for each axis of the layout its atoms
    shape: list[int]  # of the layout

    def slice(self, name: int, at: slice) -> None:
        """Restrict the term to these entries of an atom."""

    def sum(self, name: int) -> None:
        """Sum over an atom, which is removed."""


class CutMaps:
    """Linear maps of a kind of term for which a map along an atom is a map of its factors."""

    def cut(self, layout: AxisLayout) -> Any:
        """The term's factors, cut; None where the layout mixes axes of the term."""
        raise NotImplementedError

    @staticmethod
    def placed(cut: Any) -> Placed:
        """The term after changes of its cut factors."""
        raise NotImplementedError

    def narrow(self, layout: AxisLayout, dim: int, start: int, step: int, length: int) -> Placed | None:
        """By a run of each of the axis' atoms; None if the places are not a product of runs."""
        cut: Cut | None = self.cut(layout)
        if cut is None:
            return None
        runs = split_run(start, step, length, [layout.atoms[name] for name in cut.axes[dim]])
        if runs is None:
            return None
        for name, (run, count) in zip(cut.axes[dim], runs, strict=True):
            if not run.covers(count):
                cut.slice(name, slice(run.start, run.end(count), run.step))
        cut.shape[dim] = length
        return self.placed(cut)

    def sum(self, layout: AxisLayout, dims: set[int]) -> Placed | None:
        cut: Cut | None = self.cut(layout)
        if cut is None:
            return None
        for dim in dims:
            for name in cut.axes[dim]:
                cut.sum(name)
            cut.axes[dim], cut.shape[dim] = [], 1
        return self.placed(cut)


@dataclass
class CutProduct:
    """A product that is changed in place by the maps below. Groups that are summed over become positions."""

    left: torch.Tensor  # [n, *groups, t, *rows]
    right: torch.Tensor  # [n, *groups, t, *columns]
    groups: Names
    rows: Names
    columns: Names
    axes: list[Names]
    shape: list[int]

    @classmethod
    def of(cls, left: torch.Tensor, right: torch.Tensor, layout: AxisLayout) -> CutProduct | None:
        """Factors [n, g, t, a] and [n, g, t, b], cut; None where the layout mixes axes of the term."""
        axes = named_axes(layout)
        if axes is None:
            return None
        owner = owners(layout, (left.shape[1], left.shape[3], right.shape[3]))
        names: list[Names] = [[name for name in owner if owner[name] == axis] for axis in range(3)]
        sizes = [[layout.atoms[name] for name in some] for some in names]
        n, _, t, _ = left.shape
        left = left.reshape(n, *sizes[0], t, *sizes[1])
        right = right.reshape(n, *sizes[0], t, *sizes[2])
        groups, rows, columns = names
        return cls(left, right, groups, rows, columns, axes, list(layout.inner))

    @property
    def positions(self) -> int:
        """The axis of positions, in both factors."""
        return 1 + len(self.groups)

    def _places(self, name: int) -> tuple[int | None, int | None]:
        """The axes of an atom in the two factors."""
        if name in self.groups:
            return 1 + self.groups.index(name), 1 + self.groups.index(name)
        if name in self.rows:
            return self.positions + 1 + self.rows.index(name), None
        return None, self.positions + 1 + self.columns.index(name)

    def slice(self, name: int, at: slice) -> None:
        left, right = self._places(name)
        if left is not None:
            self.left = self.left[(slice(None),) * left + (at,)]
        if right is not None:
            self.right = self.right[(slice(None),) * right + (at,)]

    def sum(self, name: int) -> None:
        """Sum over an atom, which is removed."""
        left, right = self._places(name)
        if left is not None and right is not None:  # a sum over groups: they become positions
            self.left, self.right = (
                x.movedim(left, self.positions - 1).flatten(self.positions - 1, self.positions)
                for x in (self.left, self.right)
            )
            self.groups.remove(name)
        elif left is not None:
            self.left = self.left.sum(left)
            self.rows.remove(name)
        elif right is not None:
            self.right = self.right.sum(right)
            self.columns.remove(name)

    def contract(self, names: Names, matrix: torch.Tensor, new: int) -> bool:
        """Contract an axis with a matrix, [size, k] or [*groups, size, k]. False if its atoms are not all in
        one factor.
        """
        in_rows = set(names) <= set(self.rows) and (bool(names) or not self.rows)
        if not in_rows and not set(names) <= set(self.columns):
            return False
        own = self.rows if in_rows else self.columns
        factor = self.left if in_rows else self.right
        rest = [name for name in own if name not in names]
        behind = self.positions + 1
        factor = factor.permute(*range(behind), *(behind + own.index(name) for name in (*rest, *names)))
        front = factor.shape[: behind + len(rest)]
        groups = matrix.shape[:-2]
        factor = factor.reshape(front[0], math.prod(groups), -1 if factor.numel() else 0, matrix.shape[-2])
        factor, matrix = of_one_dtype(factor, matrix)
        factor = times_shared(factor, matrix.reshape(-1, *matrix.shape[-2:])).reshape(
            *front, matrix.shape[-1]
        )
        if in_rows:
            self.left, self.rows = factor, [*rest, new]
        else:
            self.right, self.columns = factor, [*rest, new]
        return True

    def scatter(self, name: int, index: torch.Tensor, size: int) -> bool:
        """Add the entries of an atom at the index in a longer one. False for an atom of groups."""
        left, right = self._places(name)
        if left is not None and right is not None:
            return False
        if left is not None:
            self.left = _scattered(self.left, left, index, size)
        elif right is not None:
            self.right = _scattered(self.right, right, index, size)
        return True

    @property
    def names(self) -> Names:
        return [*self.groups, *self.rows, *self.columns]

    def sizes(self) -> list[int]:
        """The sizes of the atoms in `names`."""
        behind = self.positions + 1
        return [*self.left.shape[1 : self.positions], *self.left.shape[behind:], *self.right.shape[behind:]]

    def factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[n, g, t, a] and [n, g, t, b], of one type."""
        behind, n = self.positions + 1, self.left.shape[0]
        front = n, math.prod(self.left.shape[1 : self.positions]), self.left.shape[self.positions]
        left, right = of_one_dtype(self.left, self.right)
        return tuple(x.reshape(*front, math.prod(x.shape[behind:])) for x in (left, right))  # type: ignore[return-value]


def _scattered(x: torch.Tensor, axis: int, index: torch.Tensor, size: int) -> torch.Tensor:
    return torch.ops.aten.index_select_backward.default(
        x, [*x.shape[:axis], size, *x.shape[axis + 1 :]], axis, index
    )


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
    def of(cls, index: torch.Tensor, rows: torch.Tensor, count: int, layout: AxisLayout) -> CutRows | None:
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
