"""Helpers of the linear maps of terms: the axes of a term are cut into the atoms of a layout, and the term is
placed again after a change of its factors.

An atom is a part of an axis that a layout keeps whole. Its name is its place in `layout.atoms`; atoms of size
one have no name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from psgrad.engine.gradients.layout import Layout, split_run
from psgrad.engine.gradients.terms.base import Names, Placed, Term


def named_axes(layout: Layout) -> list[Names] | None:
    """For each labelled axis the names (places in `layout.atoms`) of its atoms that are longer than one."""
    groups = layout.groups()
    return (
        None if groups is None else [[atom for atom in group if layout.atoms[atom] != 1] for group in groups]
    )


def owners(layout: Layout, canonical: Sequence[int]) -> dict[int, int]:
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
    return Placed(term, Layout(tuple(size for _, size in long), order, tuple(shape)))


def by_atoms(
    by: torch.Tensor, layout: Layout, axes: list[Names], names: Names, *, each: bool
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

    def cut(self, layout: Layout) -> Any:
        """The term's factors, cut; None where the layout mixes axes of the term."""
        raise NotImplementedError

    @staticmethod
    def placed(cut: Any) -> Placed:
        """The term after changes of its cut factors."""
        raise NotImplementedError

    def narrow(self, layout: Layout, dim: int, start: int, step: int, length: int) -> Placed | None:
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

    def sum(self, layout: Layout, dims: set[int]) -> Placed | None:
        cut: Cut | None = self.cut(layout)
        if cut is None:
            return None
        for dim in dims:
            for name in cut.axes[dim]:
                cut.sum(name)
            cut.axes[dim], cut.shape[dim] = [], 1
        return self.placed(cut)
