"""Walks over a deferred gradient in slices: a few entries of all samples' gradients at a time, with their
places in the parameter's row-major order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property

import torch

from psgrad.engine.gradients.deferred import Placed
from psgrad.engine.gradients.layout import AxisLayout
from psgrad.engine.gradients.terms import Slice as Slice


class ParameterIndices:
    """Converts places in a term's row-major order to places in the parameter's, by arithmetic."""

    def __init__(self, layout: AxisLayout) -> None:
        self.layout = layout

    @cached_property
    def _steps(self) -> tuple[list[int], int]:
        """The distance of each atom's neighbours in the parameter, and the place of the first element."""
        layout = self.layout
        steps = [0] * len(layout.atoms)
        window = layout.slices
        left = list(reversed(layout.order))
        first, behind = 0, 1  # `behind`: the size of the parameter's axes so far, from the last on
        for axis in reversed(range(len(layout.shape))):
            run, count = window[axis], 1
            while left and (count < layout.inner[axis] or layout.atoms[left[0]] == 1):
                atom = left.pop(0)
                steps[atom] = behind * (run.step or 1) * count
                count *= layout.atoms[atom]
            first += behind * run.start
            behind *= layout.shape[axis]
        return steps, first

    @cached_property
    def _shift(self) -> int | None:
        """The distance of each element's places, if it is the same for all; else None."""
        steps, first = self._steps
        atoms = self.layout.atoms
        own = [math.prod(atoms[place + 1 :]) for place in range(len(atoms))]
        same = all(step == wanted for step, wanted, size in zip(steps, own, atoms, strict=True) if size > 1)
        return first if same else None

    def of(self, places: range | torch.Tensor, device: torch.device) -> range | torch.Tensor:
        """The places in the parameter of places in the term; a range of them stays one if possible."""
        shift = self._shift
        if shift is not None:
            return (
                range(places.start + shift, places.stop + shift)
                if isinstance(places, range)
                else places + shift
            )
        steps, first = self._steps
        rest = torch.arange(places.start, places.stop, device=device) if isinstance(places, range) else places
        out = torch.full_like(rest, first)
        for size, step in zip(reversed(self.layout.atoms), reversed(steps), strict=True):
            out += (rest % size) * step
            rest = rest // size
        return out


def slices(
    placed: Placed, dtype: torch.dtype, limit: int, width: int, samples: slice = slice(None)
) -> Iterator[Slice]:
    """A placed term in slices, in a precision, of neighbouring samples or all. The values of a slice are
    valid until the next slice.

    Args:
        limit: the largest number of values of a slice, if possible.
        width: the largest number of places of a slice of a table's looked-up rows; such a slice leaves out
            samples that looked up none of them.
    """
    term, places = placed.term.at(samples, dtype), ParameterIndices(placed.layout)
    first = samples.start or 0
    for part in term.slices(limit, width):
        whose = (
            part.samples + first
            if isinstance(part.samples, torch.Tensor)
            else _shifted(part.samples, first, term.samples)
        )
        yield Slice(part.values, places.of(part.places, term.device), whose)


def _shifted(some: slice, by: int, count: int) -> slice:
    start, stop, _ = some.indices(count)
    return slice(start + by, stop + by)
