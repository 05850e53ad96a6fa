"""Walking over a deferred gradient in slices: a few entries of all samples' gradients at a time, never one
sample's whole gradient.

Where a term's elements stand in the parameter, counted in the parameter's own row-major order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from psgrad.engine.gradients.deferred import Placed
from psgrad.engine.gradients.layout import Layout
from psgrad.engine.gradients.projections.base import Workspace
from psgrad.engine.gradients.terms import Convolution, Dense, Product, Rows, Term
from psgrad.engine.gradients.terms.elementwise import Hadamard, Multiples


class Places:
    """Places in a term's own row-major order to places in the parameter's, by arithmetic: no table of them is
    made.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    @cached_property
    def _steps(self) -> tuple[list[int], int]:
        """How far each atom's neighbours are apart in the parameter, and where the first element stands."""
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
        """How far all elements are shifted alike; None where they are in another order."""
        steps, first = self._steps
        atoms = self.layout.atoms
        own = [math.prod(atoms[place + 1 :]) for place in range(len(atoms))]
        same = all(step == wanted for step, wanted, size in zip(steps, own, atoms, strict=True) if size > 1)
        return first if same else None

    def of(self, places: range | torch.Tensor, device: torch.device) -> range | torch.Tensor:
        """The places in the parameter of places in the term; a range of them stays one where it can."""
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


# Fewer channels a slice would write a convolution's patches out too often.
_CHANNELS = 32


@dataclass(frozen=True)
class Slice:
    """Some entries of some samples' gradients of one parameter. The slices of a gradient add up to it.

    Attributes:
        values: [m, q] places: q places in the parameter, row-major: a range where they are neighbours, else
            int64 [q].
        samples: whose they are: a slice of the samples, or int64 [m] without repetition.
    """

    values: torch.Tensor
    places: range | torch.Tensor
    samples: slice | torch.Tensor

    def cut(self, width: int) -> Iterator[Slice]:
        """The same in slices of at most `width` places."""
        for start in range(0, len(self.places), width):
            yield Slice(
                self.values[:, start : start + width], self.places[start : start + width], self.samples
            )

    def place_tensor(self) -> torch.Tensor:
        """The places as int64 [q]."""
        if isinstance(self.places, torch.Tensor):
            return self.places
        return torch.arange(self.places.start, self.places.stop, device=self.values.device)


def slices(
    placed: Placed, dtype: torch.dtype, room: int, width: int, samples: slice = slice(None)
) -> Iterator[Slice]:
    """A placed term in slices, in a precision, of neighbouring samples or all. A slice's values hold until
    the next is asked for.

    Args:
        room: how many values a slice may have, where it can be helped.
        width: how many places a slice of a table's looked-up rows may have: samples that looked up none of
            them don't take part.
    """
    term, places = placed.term.at(samples, dtype), Places(placed.layout)
    first = samples.start or 0
    for found in _walk(term, room, width):
        whose = (
            found.samples + first
            if isinstance(found.samples, torch.Tensor)
            else _shifted(found.samples, first, term.samples)
        )
        yield Slice(found.values, places.of(found.places, term.device), whose)


def _shifted(some: slice, by: int, count: int) -> slice:
    start, stop, _ = some.indices(count)
    return slice(start + by, stop + by)


def _walk(term: Term, room: int, width: int) -> Iterator[Slice]:
    """A term in slices, in its own order."""
    if isinstance(term, Rows):
        return _of_rows(term, width)
    if isinstance(term, Hadamard):
        return _of_hadamard(term, room, width)
    ways: dict[type, Callable[[Any, int], Iterator[Slice]]] = {
        Product: _of_product,
        Convolution: _of_convolution,
        Multiples: _of_multiples,
        Dense: _of_dense,
    }
    return ways.get(type(term), _of_any)(term, room)


def _of_product(term: Product, room: int) -> Iterator[Slice]:
    n, groups, positions, rows = term.left.shape
    columns = term.right.shape[3]
    some_columns = max(1, min(columns, room // max(n, 1)))
    some_rows = max(1, min(rows, room // max(n * columns, 1)))
    memory, dtype = Workspace(term.device), term.dtype
    for group in range(groups):
        for i in range(0, rows, some_rows):
            left = term.left[:, group, :, i : i + some_rows]
            for j in range(0, columns, some_columns):  # less than a row only where a row by itself is a slice
                right = term.right[:, group, :, j : j + some_columns]
                a, b = left.shape[2], right.shape[2]
                if (
                    positions == 1
                    # with the samples last, which a sparse projection wants and a matrix product takes as
                    # well
                ):
                    value = memory.kept("values", (a, b, n), dtype)
                    torch.mul(
                        left[:, 0].t().contiguous().unsqueeze(1), right[:, 0].t().contiguous(), out=value
                    )
                    value = value.flatten(0, 1).t()
                else:
                    value = torch.bmm(
                        left.transpose(1, 2), right, out=memory.kept("values", (n, a, b), dtype)
                    ).flatten(1)
                start = (group * rows + i) * columns + j
                yield Slice(value, range(start, start + value.shape[1]), slice(None))


def _of_convolution(term: Convolution, room: int) -> Iterator[Slice]:
    """Whole groups, or some channels of one group: the gradient of a narrower convolution."""
    shape, groups = term.weight_shape, term.geometry.groups
    row = math.prod(shape[1:])
    channels = shape[0] // groups  # of the weight's first axis, in a group
    wanted = max(1, min(_CHANNELS, shape[0]), room // max(term.samples * row, 1))
    several = max(1, wanted // channels)
    step = wanted if wanted < channels else several * channels
    for group in range(0, groups, several):
        last = min(groups, group + several)
        for start in range(group * channels, last * channels, step):
            stop = min(start + step, last * channels)
            part = _narrowed(term, range(start, stop), range(group, last))
            yield Slice(part.materialise().flatten(1), range(start * row, stop * row), slice(None))


def _narrowed(term: Convolution, channels: range, groups: range) -> Convolution:
    """The convolution whose weight is some channels of some groups, counted along the weight's first axis."""
    first, other = (
        (term.inputs, term.cotangents) if term.geometry.transposed else (term.cotangents, term.inputs)
    )
    each = other.shape[2] // term.geometry.groups
    first = first[:, :, channels.start : channels.stop]
    other = other[:, :, groups.start * each : groups.stop * each]
    shape = torch.Size([len(channels), *term.weight_shape[1:]])
    cotangents, inputs = (other, first) if term.geometry.transposed else (first, other)
    return Convolution(cotangents, inputs, shape, term.geometry._replace(groups=len(groups)))


def _of_rows(term: Rows, width: int) -> Iterator[Slice]:
    """The rows of the table that any sample looked up, some at a time, for the samples that did."""
    n, positions, columns = term.rows.shape
    if not term.rows.numel():
        return
    found, ranks = torch.unique(term.index.reshape(-1), return_inverse=True)
    sorted_ranks, order = ranks.sort(stable=True)
    step = max(1, width // columns)
    starts = list(range(0, len(found), step))
    bounds = torch.searchsorted(
        sorted_ranks, torch.tensor([*starts, len(found)], device=ranks.device)
    ).tolist()
    rows = term.rows.reshape(n * positions, columns)
    for number, start in enumerate(starts):
        table_rows = found[start : start + step]
        uses = order[bounds[number] : bounds[number + 1]]
        samples, whose = torch.unique(uses // positions, return_inverse=True)
        values = torch.zeros(len(samples) * len(table_rows), columns, dtype=rows.dtype, device=rows.device)
        values.index_add_(0, whose * len(table_rows) + ranks[uses] - start, rows[uses])
        places = table_rows.unsqueeze(1) * columns + torch.arange(columns, device=rows.device)
        yield Slice(values.reshape(len(samples), -1), places.flatten(), samples)


def _of_hadamard(term: Hadamard, room: int, width: int) -> Iterator[Slice]:
    shared = term.shared.flatten()
    for part in _walk(term.term, room, width):
        places = part.places
        factor = shared[places] if isinstance(places, torch.Tensor) else shared[places.start : places.stop]
        yield Slice(part.values * factor, places, part.samples)


def _of_multiples(term: Multiples, room: int) -> Iterator[Slice]:
    """Some rows of what is shared, times all samples' coefficients."""
    coefficients, shared = term.coefficients, term.shared
    if not shared.dim():
        coefficients, shared = coefficients.unsqueeze(1), shared.unsqueeze(0)
    row = math.prod(shared.shape[1:])
    step = max(1, room // max(term.samples * row, 1))
    for start in range(0, shared.shape[0], step):
        some = shared[start : start + step]
        values = (
            coefficients if coefficients.shape[1] == 1 else coefficients[:, start : start + step]
        ) * some
        yield Slice(values.flatten(1), range(start * row, (start + len(some)) * row), slice(None))


def _of_dense(term: Dense, room: int) -> Iterator[Slice]:
    """Whole rows of the last axes where they fit."""
    values = term.value.flatten(1) if term.value.dim() > 1 else term.value.unsqueeze(1)
    row, width = math.prod(term.shape[1:]), max(1, room // max(term.samples, 1))
    yield from Slice(values, range(values.shape[1]), slice(None)).cut(
        width // row * row if 0 < row <= width else width
    )


def _of_any(term: Term, room: int) -> Iterator[Slice]:
    """What has no way of its own is written out, as few samples at a time as the room asks for."""
    size = math.prod(term.shape)
    step = max(1, room // max(size, 1))
    for start in range(0, term.samples, step):
        samples = slice(start, min(start + step, term.samples))
        values = term.at(samples).materialise()
        yield Slice(values.reshape(values.shape[0], size), range(size), samples)
