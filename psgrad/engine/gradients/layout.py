"""Where numbers lie in a parameter: layouts, which map the axes of a term to those of the parameter, by
transposes, reshapes and slices that compute no value.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch


@dataclass(frozen=True)
class AxisSlice:
    """The places of an axis in a longer one: `start`, `start + 1`, ..., of `size`."""

    start: int
    size: int

    def is_apart(self, length: int, other: AxisSlice, other_length: int) -> bool:
        """Whether `length` places of this run have none in common with those of another."""
        return self.start + length <= other.start or other.start + other_length <= self.start


@dataclass(frozen=True)
class AxisLayout:
    """A relabelling of axes: canonical axes are cut into atoms, which are permuted and grouped into axes
    again.

    With a window, the result is a part of a larger value that is zero elsewhere, such as the gradient of a
    slice.
    """

    atoms: tuple[int, ...]  # sizes, in canonical order; their product is the number of elements
    order: tuple[int, ...]  # the atoms' places in the order of the labelled axes
    inner: tuple[int, ...]  # the labelled axes: each is a run of atoms in that order
    # for each labelled axis where its places lie in the parameter's
    window: tuple[AxisSlice, ...] | None = None

    @classmethod
    def identity(cls, shape: Sequence[int]) -> AxisLayout:
        return cls(tuple(shape), tuple(range(len(shape))), tuple(shape))

    @classmethod
    def of_plain(cls, values: Mapping[str, Any]) -> AxisLayout:
        """The layout of what `dataclasses.asdict` gives, lists in place of tuples."""
        window = values["window"] and tuple(AxisSlice(**run) for run in values["window"])
        atoms, order, inner = (tuple(values[name]) for name in ("atoms", "order", "inner"))
        return cls(atoms, order, inner, window)

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's shape."""
        return self.inner if self.window is None else tuple(run.size for run in self.window)

    @property
    def size(self) -> int:
        """The number of entries of the parameter."""
        return math.prod(self.shape)

    @property
    def is_identity(self) -> bool:
        return self.window is None and self._is_ordered

    @property
    def is_identity_but_for_ones(self) -> bool:
        """Whether all elements are in the parameter's order."""
        return self.without_ones.is_identity

    @property
    def _is_ordered(self) -> bool:
        return self.order == tuple(sorted(self.order))

    @property
    def bare(self) -> AxisLayout:
        """The layout without the window."""
        return self if self.window is None else replace(self, window=None)

    @property
    def without_ones(self) -> AxisLayout:
        """The layout without atoms of size one."""
        atoms = [atom for atom, size in enumerate(self.atoms) if size != 1]
        if len(atoms) == len(self.atoms):
            return self
        place = {atom: number for number, atom in enumerate(atoms)}
        return replace(
            self,
            atoms=tuple(self.atoms[a] for a in atoms),
            order=tuple(place[a] for a in self.order if a in place),
        )

    @property
    def slices(self) -> tuple[slice, ...]:
        """The window, as an index into the parameter."""
        return tuple(slice(run.start, run.start + length) for run, length in self.runs)

    @property
    def runs(self) -> tuple[tuple[AxisSlice, int], ...]:
        """For each labelled axis its places in the parameter's, and their number."""
        window = self.window or [AxisSlice(0, size) for size in self.inner]
        return tuple(zip(window, self.inner, strict=True))

    def apply(self, value: torch.Tensor, lead: int = 0) -> torch.Tensor:
        """[*lead, *canonical] -> [*lead, *shape]; `lead`: the number of axes in front that do not change."""
        front = value.shape[:lead]
        if self.window is None and value.shape[lead:] == self.inner and self._is_ordered:
            return value
        value = value.reshape((*front, *self.atoms))
        if not self._is_ordered:
            value = value.permute(*range(lead), *(lead + i for i in self.order))
        value = value.reshape((*front, *self.inner))
        for axis, (run, at) in enumerate(zip(self.window or (), self.slices, strict=False), lead):
            if run.size != value.shape[axis]:
                shape = [*value.shape[:axis], run.size, *value.shape[axis + 1 :]]
                value = torch.ops.aten.slice_backward.default(value, shape, axis, at.start, at.stop, 1)
        return value

    def invert(self, value: torch.Tensor, canonical: Sequence[int], lead: int = 0) -> torch.Tensor:
        """[*lead, *shape] -> [*lead, *canonical]: the transpose of `apply`. Within the window it is the
        inverse.
        """
        if self.window is not None:
            value = value[(slice(None),) * lead + self.slices]
        front = value.shape[:lead]
        value = value.reshape((*front, *(self.atoms[i] for i in self.order)))
        if not self._is_ordered:
            back = sorted(range(len(self.order)), key=lambda place: self.order[place])
            value = value.permute(*range(lead), *(lead + place for place in back))
        return value.reshape((*front, *canonical))

    def reshape(self, shape: Sequence[int]) -> AxisLayout | None:
        """The layout of the same elements under another shape; None if an axis would cut an atom unevenly, or
        there is a window.
        """
        return _reshape(self, tuple(shape))

    def permute(self, dims: Sequence[int]) -> AxisLayout | None:
        groups = self.groups()
        if groups is None:
            return None
        window = None if self.window is None else tuple(self.window[d] for d in dims)
        return AxisLayout(
            self.atoms, tuple(i for d in dims for i in groups[d]), tuple(self.inner[d] for d in dims), window
        )

    def embed(self, dim: int, start: int, size: int) -> AxisLayout:
        """The layout in a larger value, whose axis `dim` has length `size`."""
        window = [run for run, _ in self.runs]
        window[dim] = AxisSlice(start + window[dim].start, size)
        if all(run.size == length for run, length in zip(window, self.inner, strict=True)):
            return self.bare
        return replace(self, window=tuple(window))

    def groups(self) -> list[list[int]] | None:
        """The atoms of each labelled axis."""
        groups: list[list[int]] = []
        rest = list(self.order)
        for size in self.inner:
            group: list[int] = []
            product = 1
            while product < size and rest:
                group.append(rest.pop(0))
                product *= self.atoms[group[-1]]
            if product != size:
                return None
            groups.append(group)
        if rest and groups:  # atoms of size one belong to the axis before them
            groups[-1] += rest
        return groups


@lru_cache(maxsize=4096)
def _reshape(layout: AxisLayout, shape: tuple[int, ...]) -> AxisLayout | None:
    if layout.window is not None:
        return layout if shape == layout.shape else None
    sizes = [layout.atoms[i] for i in layout.order]
    if 0 in sizes or math.prod(sizes) != math.prod(shape):
        return None
    cuts = sorted(set(_suffix_products(sizes)) | set(_suffix_products(shape)), reverse=True)
    if any(outer % inner for outer, inner in itertools.pairwise(cuts)):
        return None
    # each old atom is the run of new pieces between its own two cuts
    pieces: dict[int, list[int]] = {}
    bounds = [math.prod(sizes[k:]) for k in range(len(sizes) + 1)]
    for place, atom in enumerate(layout.order):
        outer, inner_bound = bounds[place], bounds[place + 1]
        inside = [c for c in cuts if inner_bound <= c <= outer]
        pieces[atom] = [a // b for a, b in itertools.pairwise(inside)]
    first: dict[int, int] = {}
    atoms: list[int] = []
    for atom in range(len(layout.atoms)):
        first[atom] = len(atoms)
        atoms += pieces[atom]
    order = [first[atom] + k for atom in layout.order for k in range(len(pieces[atom]))]
    return AxisLayout(tuple(atoms), tuple(order), shape)


def _suffix_products(sizes: Sequence[int]) -> list[int]:
    return [math.prod(sizes[k:]) for k in range(len(sizes) + 1)]
