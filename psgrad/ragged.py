"""Rows stacked as tensors, where rows may differ in length: padded, joined, trimmed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

Padding = float | int | bool
RowNumbers = Sequence[int] | npt.NDArray[Any]


@dataclass(frozen=True)
class RaggedAxes:
    """Which axes of the tensors of a block have a length of their own in each row.

    Attributes:
        axes: for each input, then for the target: pairs (axis, column of lengths). The axis is counted
            without the sample axis. A tensor whose rows are alike has none, as has a target that is not
            there.
        padding: for each input, then for the target, the value that stands after a row's own.
        masked: whether the model ignores what is padded. If so, rows that differ in length are computed
            together; else only rows of equal length are.
        limit: the length that the model takes at most, so that rows may be padded up to it; None where it is
            not known.
    """

    axes: tuple[tuple[tuple[int, int], ...], ...]
    padding: tuple[Padding, ...]
    masked: bool
    limit: int | None = None

    def extended(self, count: int) -> RaggedAxes:
        """These axes for a block with more inputs, which are not ragged, after its own."""
        return self._mapped(lambda each, none: (*each[:-1], *[none] * count, each[-1]))

    def without_target(self) -> RaggedAxes:
        """These axes for a block with another target, which is not ragged."""
        return self._mapped(lambda each, none: (*each[:-1], none))

    def of_first(self, inputs: int) -> RaggedAxes:
        """These axes for a block with this number of its inputs, and no target."""
        return self._mapped(lambda each, none: (*each[:inputs], none))

    def grouped(self) -> RaggedAxes:
        """These axes for tensors with one more axis in front of their own."""
        return replace(
            self, axes=tuple(tuple((axis + 1, column) for axis, column in pairs) for pairs in self.axes)
        )

    def _mapped(self, change: Callable[[tuple[Any, ...], Any], tuple[Any, ...]]) -> RaggedAxes:
        return replace(self, axes=change(self.axes, ()), padding=change(self.padding, 0))


@dataclass(frozen=True)
class Block:
    """Rows, stacked: every tensor is [n, ...]. As read they are on the CPU, whole numbers int64, all others
    float32.

    Attributes:
        inputs: of the model.
        target: None where the loss needs none.
        lengths: [n, a] int64, each row's own lengths; None where rows are alike. Tensors are padded to the
            longest row of the block.
        ragged: which axes have these lengths; None where rows are alike.
    """

    inputs: tuple[Tensor, ...]
    target: Tensor | None
    lengths: Tensor | None = None
    ragged: RaggedAxes | None = None

    def __post_init__(self) -> None:
        if (self.lengths is None) != (self.ragged is None):
            raise TypeError("a block has both lengths and ragged, or neither")
        if self.ragged is not None and not (
            len(self.ragged.axes) == len(self.ragged.padding) == len(self.inputs) + 1
        ):
            raise TypeError("ragged has one entry for each input, and one for the target")

    def __len__(self) -> int:
        return len(self.inputs[0])

    def at(self, places: Any, spare: int = 0) -> Block:
        """The rows at these places of the block, in this order, padded to the longest of them and no further:
        whole numbers [k], which are copied, or a slice, which is a view.

        spare: positions more, where lengths differ and the block has them.
        """
        index = places if isinstance(places, slice) else torch.as_tensor(places)
        if self.lengths is None or self.ragged is None:
            return self._with([x[index] for x in self._tensors], None)
        lengths = self.lengths[index]
        longest = [0] * lengths.shape[-1]
        if len(lengths):
            each = lengths.flatten(0, -2)
            longest = (each.amax(0) + spare * (each.amin(0) < each.amax(0))).tolist()
        tensors = []
        for x, axes in zip(self._tensors, self.ragged.axes, strict=False):
            for axis, column in axes:
                x = x.narrow(axis + 1, 0, min(longest[column], x.shape[axis + 1]))
            tensors.append(x[index])
        return self._with(tensors, lengths)

    def take(self, rows: RowNumbers) -> Block:
        """`at`, for a block that is the dataset (`Rows`)."""
        return self.at(slice(rows.start, rows.stop) if isinstance(rows, range) else rows)

    def filled(self, places: Tensor, rows: int, lengths: Sequence[int]) -> Block:
        """The rows at these places [k], and the last of them again until there are `rows`; padded to these
        lengths, one for each column of lengths.
        """
        assert self.ragged is not None
        found = self.at(torch.cat([places, places[-1:].expand(rows - len(places))]))
        tensors = []
        for x, axes, value in zip(found._tensors, self.ragged.axes, self.ragged.padding, strict=False):
            for axis, column in axes:
                if missing := lengths[column] - x.shape[axis + 1]:
                    shape = [*x.shape[: axis + 1], missing, *x.shape[axis + 2 :]]
                    x = torch.cat([x, x.new_full(shape, value)], axis + 1)
            tensors.append(x)
        return found._with(tensors, found.lengths)

    def grouped(self, places: Tensor) -> Block:
        """The rows at these places [n, k] as n groups: tensors are [n, k, ...], lengths the longest of k."""
        found = self.at(places)
        if found.lengths is None or found.ragged is None:
            return found
        return replace(found, lengths=found.lengths.amax(1), ragged=found.ragged.grouped())

    def without_padding(self) -> Block:
        """This block, marked so that only rows of equal length are computed together."""
        ragged = None if self.ragged is None else replace(self.ragged, masked=False)
        return replace(self, ragged=ragged)

    def with_inputs(self, *more: Tensor) -> Block:
        """This block with more inputs, [n, ...] each, after its own, which are not ragged."""
        ragged = None if self.ragged is None else self.ragged.extended(len(more))
        return Block((*self.inputs, *more), self.target, self.lengths, ragged)

    def inputs_alone(self, weighted: bool) -> Block:
        """This block without its target, and without its last input where that is a weight."""
        inputs = self.inputs[: -1 if weighted else None]
        ragged = None if self.ragged is None else self.ragged.of_first(len(inputs))
        return Block(inputs, None, self.lengths, ragged)

    def with_target(self, target: Tensor | None) -> Block:
        """This block with another target, [n, ...], which is not ragged."""
        ragged = None if self.ragged is None else self.ragged.without_target()
        return Block(self.inputs, target, self.lengths, ragged)

    @property
    def _tensors(self) -> tuple[Tensor, ...]:
        """The inputs, then the target where there is one."""
        return self.inputs if self.target is None else (*self.inputs, self.target)

    def _with(self, tensors: Sequence[Tensor], lengths: Tensor | None) -> Block:
        """Other tensors in place of `_tensors`."""
        count = len(self.inputs)
        target = None if self.target is None else tensors[count]
        return Block(tuple(tensors[:count]), target, lengths, self.ragged)


def joined(parts: Sequence[Block]) -> Block:
    """The rows of these blocks, one block after another, padded to the longest row of all."""
    first = parts[0]
    columns = zip(*(part._tensors for part in parts), strict=True)
    if first.ragged is None:
        return first._with([torch.cat(column) for column in columns], None)
    assert all(part.lengths is not None for part in parts)
    padding = iter(first.ragged.padding)
    tensors = [padded_and_joined(column, value) for column, value in zip(columns, padding, strict=False)]
    return first._with(tensors, torch.cat([part.lengths for part in parts if part.lengths is not None]))


def padded_and_stacked(rows: Sequence[Tensor], value: Padding = 0) -> Tensor:
    """[n, ...]: the tensors of rows, padded with `value` to the longest along each axis."""
    if len({row.shape for row in rows}) == 1:
        return torch.stack(list(rows))
    longest = map(max, zip(*(row.shape for row in rows), strict=True))
    whole = rows[0].new_full((len(rows), *longest), value)
    for own, row in zip(whole, rows, strict=True):
        own[tuple(slice(size) for size in row.shape)] = row
    return whole


def padded_and_joined(parts: Sequence[Tensor], value: Padding = 0) -> Tensor:
    """[n, ...]: tensors joined along their first axis; other axes are padded with `value` to the longest."""
    shapes = {part.shape[1:] for part in parts}
    if len(shapes) == 1:
        return torch.cat(list(parts))
    widths = [max(sizes) for sizes in zip(*shapes, strict=True)]
    whole = parts[0].new_full((sum(len(part) for part in parts), *widths), value)
    for rows, part in zip(_places(parts), parts, strict=True):
        whole[(rows, *(slice(size) for size in part.shape[1:]))] = part
    return whole


def _places(parts: Sequence[Tensor]) -> Iterator[slice]:
    start = 0
    for part in parts:
        yield slice(start, start + len(part))
        start += len(part)
