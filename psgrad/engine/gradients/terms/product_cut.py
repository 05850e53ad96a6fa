"""A product with the axes of its factors cut into the atoms of a layout. A linear map along an atom is then a
map of one factor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from psgrad.engine.gradients.layout import Layout
from psgrad.engine.gradients.terms.axes import named_axes, owners
from psgrad.engine.gradients.terms.base import Names
from psgrad.engine.gradients.terms.numerics import of_one_dtype, times_shared


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
    def of(cls, left: torch.Tensor, right: torch.Tensor, layout: Layout) -> CutProduct | None:
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
        """Of the atoms in `names`."""
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
