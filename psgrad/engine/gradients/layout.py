"""How a parameter's axes lie over those of a term: transposes and reshapes as bookkeeping, without touching a value."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Layout:
    """A relabelling of axes: canonical axes are cut into atoms, the atoms put in another order and grouped into axes again."""

    atoms: tuple[int, ...]  # sizes, in canonical order; their product is the number of elements
    order: tuple[int, ...]  # the atoms' places in the order of the labelled axes
    shape: tuple[int, ...]  # the labelled axes: each is a run of atoms in that order

    @classmethod
    def identity(cls, shape: Sequence[int]) -> Layout:
        return cls(tuple(shape), tuple(range(len(shape))), tuple(shape))

    @property
    def is_identity(self) -> bool:
        return self.order == tuple(sorted(self.order))

    def apply(self, value: torch.Tensor, lead: int = 0) -> torch.Tensor:
        """[*lead, *canonical] -> [*lead, *shape]; `lead` axes in front are left alone."""
        front = value.shape[:lead]
        value = value.reshape((*front, *self.atoms))
        if not self.is_identity:
            value = value.permute(*range(lead), *(lead + i for i in self.order))
        return value.reshape((*front, *self.shape))

    def invert(self, value: torch.Tensor, canonical: Sequence[int], lead: int = 0) -> torch.Tensor:
        """[*lead, *shape] -> [*lead, *canonical]."""
        front = value.shape[:lead]
        value = value.reshape((*front, *(self.atoms[i] for i in self.order)))
        if not self.is_identity:
            back = sorted(range(len(self.order)), key=lambda place: self.order[place])
            value = value.permute(*range(lead), *(lead + place for place in back))
        return value.reshape((*front, *canonical))

    def reshape(self, shape: Sequence[int]) -> Layout | None:
        """The same elements under another shape, None where an axis would cut an atom unevenly."""
        sizes = [self.atoms[i] for i in self.order]
        if 0 in sizes or math.prod(sizes) != math.prod(shape):
            return None
        cuts = sorted(set(_suffix_products(sizes)) | set(_suffix_products(shape)), reverse=True)
        if any(outer % inner for outer, inner in itertools.pairwise(cuts)):
            return None
        # each old atom is the run of new pieces between its own two cuts
        pieces: dict[int, list[int]] = {}
        bounds = [math.prod(sizes[k:]) for k in range(len(sizes) + 1)]
        for place, atom in enumerate(self.order):
            outer, inner = bounds[place], bounds[place + 1]
            inside = [c for c in cuts if inner <= c <= outer]
            pieces[atom] = [a // b for a, b in itertools.pairwise(inside)]
        first: dict[int, int] = {}
        atoms: list[int] = []
        for atom in range(len(self.atoms)):
            first[atom] = len(atoms)
            atoms += pieces[atom]
        order = [first[atom] + k for atom in self.order for k in range(len(pieces[atom]))]
        return Layout(tuple(atoms), tuple(order), tuple(shape))

    def permute(self, dims: Sequence[int]) -> Layout | None:
        groups = self._groups()
        if groups is None:
            return None
        return Layout(self.atoms, tuple(i for d in dims for i in groups[d]), tuple(self.shape[d] for d in dims))

    def _groups(self) -> list[list[int]] | None:
        """The atoms of each labelled axis."""
        groups: list[list[int]] = []
        rest = list(self.order)
        for size in self.shape:
            group: list[int] = []
            product = 1
            while product < size and rest:
                group.append(rest.pop(0))
                product *= self.atoms[group[-1]]
            if product != size:
                return None
            groups.append(group)
        if rest and groups:  # atoms of size one belong to whatever stands before them
            groups[-1] += rest
        return groups


def _suffix_products(sizes: Sequence[int]) -> list[int]:
    return [math.prod(sizes[k:]) for k in range(len(sizes) + 1)]
