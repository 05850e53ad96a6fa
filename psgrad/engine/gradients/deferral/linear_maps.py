"""What a kind of term says of linear maps, and how a term is put together again after one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from psgrad.engine.gradients.deferred import Placed
from psgrad.engine.gradients.layout import Layout, split_run
from psgrad.engine.gradients.terms import Dense, Term

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # torch.mul or torch.div
Names = list[int]  # of atoms; those of size one have none


class Maps:
    """Linear maps of one kind of term, carried out on its factors. None stands for: not without writing the
    value out.

    Layouts have no window here. A labelled axis is known by its place.
    """

    def narrow(
        self, term: Any, layout: Layout, dim: int, start: int, step: int, length: int
    ) -> Placed | None:
        """`length` places of an axis."""
        return None

    def sum(self, term: Any, layout: Layout, dims: set[int]) -> Placed | None:
        """The sum over some axes, which stay, one long."""
        return None

    def times(
        self, term: Any, layout: Layout, by: torch.Tensor, product: Product, *, each: bool
    ) -> Placed | None:
        """Element by element times `by`, of the layout's rank and one long where it does not vary; each: with
        a sample axis in front.
        """
        return None

    def scatter(self, term: Any, layout: Layout, dim: int, index: torch.Tensor, size: int) -> Placed | None:
        """An axis' places added into those that an index [length] names, of `size`."""
        return None

    def contract(self, term: Any, layout: Layout, dim: int, matrix: torch.Tensor) -> Placed | None:
        """An axis contracted with a matrix's first of two, [size, k]; or, with [*lead, size, k], of the axes
        in front each with its own.
        """
        return None


def named_axes(layout: Layout) -> list[Names] | None:
    """For each labelled axis the names (places in `layout.atoms`) of its atoms that are longer than one."""
    groups = layout.groups()
    return (
        None if groups is None else [[atom for atom in group if layout.atoms[atom] != 1] for group in groups]
    )


def owners(layout: Layout, canonical: Sequence[int]) -> dict[int, int]:
    """For each atom longer than one, the canonical axis that it is a part of."""
    found: dict[int, int] = {}
    axis, left = -1, 1
    for atom, size in enumerate(layout.atoms):
        if size == 1:
            continue
        while left == 1:
            axis += 1
            left = canonical[axis]
        found[atom] = axis
        left //= size
    return found


def arranged(
    term: Term, names: Names, sizes: Sequence[int], axes: list[Names], shape: Sequence[int]
) -> Placed:
    """A term whose canonical axes are those of `names`, in order and of these sizes, placed under axes that
    are runs of names.
    """
    kept = [(name, size) for name, size in zip(names, sizes, strict=True) if size != 1]
    place = {name: number for number, (name, _) in enumerate(kept)}
    order = tuple(place[name] for axis in axes for name in axis if name in place)
    return Placed(term, Layout(tuple(size for _, size in kept), order, tuple(shape)))


def dense(value: torch.Tensor, names: Names, axes: list[Names], shape: Sequence[int]) -> Placed:
    """A value [n, *names] that is there."""
    n = value.shape[0]
    sizes = list(value.shape[1:])
    layout = arranged(Dense(value), names, sizes, axes, shape).layout
    return Placed.plain(Dense(layout.apply(value.reshape(n, *layout.atoms), lead=1)))


def by_atoms(
    by: torch.Tensor, layout: Layout, axes: list[Names], names: Names, *, each: bool
) -> torch.Tensor:
    """A multiplier of the labelled rank, one long where it does not vary, as [*names] in that order (with the
    sample axis in front).
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
    """Whether a multiplier [*names] differs along one of some names."""
    return any(by.shape[int(each) + names.index(name)] != 1 for name in among)


def of_one_dtype(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Factors that a multiplier has promoted, and the others with them."""
    kind = tensors[0].dtype
    for tensor in tensors[1:]:
        kind = torch.promote_types(kind, tensor.dtype)
    return [tensor.to(kind) for tensor in tensors]


def count(sizes: Sequence[int]) -> int:
    return math.prod(sizes)


def cut_out(cut: Any, layout: Layout, dim: int, start: int, step: int, length: int) -> Placed | None:
    """`length` places of an axis of a term that was cut into its atoms: each atom keeps its run of them."""
    runs = split_run(start, step, length, [layout.atoms[name] for name in cut.axes[dim]])
    if runs is None:
        return None
    for name, (run, count) in zip(cut.axes[dim], runs, strict=True):
        if not run.covers(count):
            cut.slice(name, slice(run.start, run.end(count), run.step))
    cut.shape[dim] = length
    placed: Placed | None = cut.placed()
    return placed
