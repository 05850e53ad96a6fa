"""Linear maps of products: each axis belongs to a factor, and what is done along it is done to the factor."""

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
from psgrad.engine.gradients.terms import Hadamard, Product
from psgrad.engine.gradients.terms.base import times_shared


@dataclass
class Cut:
    """A product whose factors' axes are cut as a layout cuts them. Groups that are summed over become
    positions.
    """

    left: torch.Tensor  # [n, *groups, t, *rows]
    right: torch.Tensor  # [n, *groups, t, *columns]
    groups: Names
    rows: Names
    columns: Names
    axes: list[Names]
    shape: list[int]

    @classmethod
    def of(cls, term: Product, layout: Layout) -> Cut | None:
        axes = named_axes(layout)
        if axes is None:
            return None
        owner = owners(layout, term.shape)
        names: list[Names] = [[name for name in owner if owner[name] == axis] for axis in range(3)]
        sizes = [[layout.atoms[name] for name in some] for some in names]
        n, _, t, _ = term.left.shape
        left = term.left.reshape(n, *sizes[0], t, *sizes[1])
        right = term.right.reshape(n, *sizes[0], t, *sizes[2])
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
        """Sum over an atom, which is gone then."""
        left, right = self._places(name)
        if left is not None and right is not None:  # over groups, which is to say over positions
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
        """Put an axis, of which the atoms all lie in one factor, through a matrix [*groups or nothing, size,
        k].
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
        """Add the places of an atom into those of a longer one."""
        left, right = self._places(name)
        if left is not None and right is not None:
            return False
        if left is not None:
            self.left = _scattered(self.left, left, index, size)
        elif right is not None:
            self.right = _scattered(self.right, right, index, size)
        return True

    def placed(self) -> Placed:
        """The product again; written out where one of its factors has no axis left, as the value is then no
        larger than the other.
        """
        names = [*self.groups, *self.rows, *self.columns]
        behind = self.positions + 1
        groups, t = self.left.shape[1 : self.positions], self.left.shape[self.positions]
        rows, columns = self.left.shape[behind:], self.right.shape[behind:]
        n = self.left.shape[0]
        left, right = of_one_dtype(self.left, self.right)
        left = left.reshape(n, math.prod(groups), t, math.prod(rows))
        right = right.reshape(n, math.prod(groups), t, math.prod(columns))
        if left.shape[3] == 1 or right.shape[3] == 1:
            value = torch.matmul(left.transpose(2, 3), right)
            return dense(value.reshape(n, *groups, *rows, *columns), names, self.axes, self.shape)
        return arranged(Product(left, right), names, [*groups, *rows, *columns], self.axes, self.shape)


def _scattered(x: torch.Tensor, axis: int, index: torch.Tensor, size: int) -> torch.Tensor:
    return torch.ops.aten.index_select_backward.default(
        x, [*x.shape[:axis], size, *x.shape[axis + 1 :]], axis, index
    )


class ProductMaps(Maps):
    """Of `Product`."""

    def narrow(
        self, term: Product, layout: Layout, dim: int, start: int, step: int, length: int
    ) -> Placed | None:
        cut = Cut.of(term, layout)
        return None if cut is None else cut_out(cut, layout, dim, start, step, length)

    def sum(self, term: Product, layout: Layout, dims: set[int]) -> Placed | None:
        cut = Cut.of(term, layout)
        if cut is None:
            return None
        for dim in dims:
            for name in cut.axes[dim]:
                cut.sum(name)
            cut.axes[dim], cut.shape[dim] = [], 1
        return cut.placed()

    def times(
        self, term: Product, layout: Layout, by: torch.Tensor, product: Multiply, *, each: bool
    ) -> Placed | None:
        cut = Cut.of(term, layout)
        if cut is None:
            return None
        names = [*cut.groups, *cut.rows, *cut.columns]
        spread = by_atoms(by, layout, cut.axes, names, each=each)
        front = int(each) + len(cut.groups)
        if not varies(spread, names, cut.columns, each=each):
            shape = spread.shape[: front + len(cut.rows)]
            cut.left = product(cut.left, spread.reshape(*shape[:front], 1, *shape[front:]))
        elif not varies(spread, names, cut.rows, each=each):
            shape = spread.shape
            cut.right = product(cut.right, spread.reshape(*shape[:front], 1, *shape[front + len(cut.rows) :]))
        elif each:
            return None
        else:
            return hadamard(term, layout, by, product)
        return cut.placed()

    def scatter(
        self, term: Product, layout: Layout, dim: int, index: torch.Tensor, size: int
    ) -> Placed | None:
        cut = Cut.of(term, layout)
        if cut is None or len(cut.axes[dim]) != 1 or not cut.scatter(cut.axes[dim][0], index, size):
            return None
        cut.shape[dim] = size
        return cut.placed()

    def contract(self, term: Product, layout: Layout, dim: int, matrix: torch.Tensor) -> Placed | None:
        cut = Cut.of(term, layout)
        if cut is None:
            return None
        new = len(layout.atoms)
        if matrix.dim() > 2:
            lead = [name for axis in cut.axes[: matrix.dim() - 2] for name in axis]
            if lead != cut.groups or matrix.shape[:-2] != layout.inner[: matrix.dim() - 2]:
                return None
            matrix = matrix.reshape(*(layout.atoms[name] for name in lead), *matrix.shape[-2:])
        if not cut.contract(cut.axes[dim], matrix, new):
            return None
        cut.axes[dim], cut.shape[dim] = [new], matrix.shape[-1]
        return cut.placed()


def hadamard(term: Product, layout: Layout, by: torch.Tensor, product: Multiply) -> Placed:
    """The term times a multiplier that no factor can take."""
    ones = torch.ones((), dtype=by.dtype, device=by.device)
    full = product(ones, by).expand(layout.inner)
    return Placed(Hadamard(term, layout.invert(full, term.shape)), layout)
