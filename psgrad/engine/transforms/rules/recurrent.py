"""Recurrent layers: one matrix product for the inputs of all times, then the steps (recurrence.py).

PyTorch's kernels for whole layers (oneDNN, cuDNN) do not return what a per-sample gradient needs. Here a
recurrent weight is multiplied by the states of all times in one product, whose gradient is one term with a
position for each time.

Time is packed throughout: a piece for each time holds the sequences that are still running, the longest
first, as PyTorch packs them. If all sequences have equal length, all pieces are alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from psgrad.engine.transforms import diagnostics
from psgrad.engine.transforms.rules.families import aten
from psgrad.engine.transforms.rules.recurrence import GRU, LSTM, RELU, TANH, recurrence
from psgrad.engine.transforms.rules.registry import replace
from psgrad.errors import TransformError

State = tuple[Tensor, ...]  # of an LSTM its output and its memory, of the others the output


@dataclass(frozen=True)
class Weights:
    """The weights of one layer in one direction.

    Attributes:
        inner, outer: of the inputs and of the states.
        inner_bias, outer_bias: as the kernels add them; the second is apart where a gate stands between.
        projection: of an LSTM's output, if it has one.
    """

    inner: Tensor
    outer: Tensor
    inner_bias: Tensor | None = None
    outer_bias: Tensor | None = None
    projection: Tensor | None = None

    @classmethod
    def of(cls, cell: str, inner: Tensor, outer: Tensor, *rest: Tensor) -> Weights:
        """rest: two biases or none, then the projection, if any."""
        projection = rest[-1] if len(rest) % 2 else None
        if len(rest) < 2:
            return cls(inner, outer, projection=projection)
        if cell == GRU:
            return cls(inner, outer, *rest)
        return cls(inner, outer, rest[0] + rest[1], None, projection)


def _steps(
    cell: str, weights: Weights, x: Tensor, sizes: list[int], start: State, lengths: Tensor | None = None
) -> State:
    """The states after each time, packed. x: packed inputs; lengths: as for `layers`."""
    projected = F.linear(x, weights.inner, weights.inner_bias)
    if weights.projection is not None:
        return _projected_steps(weights, projected, sizes, start)
    hidden, *memory = start
    memory = memory or [hidden[:, :0]]
    found = recurrence(projected, hidden, *memory, weights.outer, weights.outer_bias, sizes, lengths, cell)
    return tuple(found[: len(start)])


def _projected_steps(weights: Weights, projected: Tensor, sizes: list[int], start: State) -> State:
    """The steps of an LSTM whose output is projected before it becomes the state of the next step."""
    (hidden, memory), states = start, []
    for piece in projected.split(sizes):
        sums = piece + F.linear(hidden[: len(piece)], weights.outer)
        write, keep, value, show = sums.chunk(4, -1)
        memory = torch.sigmoid(keep) * memory[: len(piece)] + torch.sigmoid(write) * torch.tanh(value)
        hidden = F.linear(torch.sigmoid(show) * torch.tanh(memory), weights.projection)  # type: ignore[arg-type]
        states.append((hidden, memory))
    return tuple(torch.cat(parts) for parts in zip(*states, strict=True))


@dataclass(frozen=True)
class Packing:
    """How many sequences run at each time, the longest first.

    lengths: [1], where one sequence of each sample has an end of its own, and `sizes` are of the longest.
    """

    sizes: list[int]
    lengths: Tensor | None = None

    @property
    def even(self) -> bool:
        return self.sizes[0] == self.sizes[-1]

    def reversed(self, x: Tensor) -> Tensor:
        """Each sequence from its end to its beginning."""
        if self.lengths is not None:
            times = torch.arange(len(self.sizes), device=x.device)
            lengths = self.lengths.to(x.device)
            return x.index_select(0, torch.where(times < lengths, lengths - 1 - times, times))
        if self.even:
            return x.unflatten(0, (len(self.sizes), self.sizes[0])).flip(0).flatten(0, 1)
        return x.index_select(0, self._places([list(range(length))[::-1] for length in self._lengths], x))

    def ends(self, states: Tensor) -> Tensor:
        """The last state of each sequence."""
        if self.lengths is not None:
            return states.index_select(0, self.lengths.to(states.device) - 1)
        if self.even:
            return states[len(states) - self.sizes[0] :]
        starts = self._starts
        places = [starts[length - 1] + row for row, length in enumerate(self._lengths)]
        return states.index_select(0, torch.tensor(places, device=states.device))

    @property
    def _lengths(self) -> list[int]:
        return [sum(size > row for size in self.sizes) for row in range(self.sizes[0])]

    @property
    def _starts(self) -> list[int]:
        return [sum(self.sizes[:time]) for time in range(len(self.sizes))]

    def _places(self, times: list[list[int]], x: Tensor) -> Tensor:
        """Where these times of each sequence stand, in the order of a packed sequence."""
        starts = self._starts
        return torch.tensor(
            [starts[times[row][time]] + row for time, size in enumerate(self.sizes) for row in range(size)],
            device=x.device,
        )


def layers(
    cell: str,
    x: Tensor,
    sizes: list[int],
    starts: Sequence[Tensor],
    weights: Sequence[Tensor],
    count: int,
    dropout: float,
    bidirectional: bool,
    lengths: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """The last layer's outputs, packed, and the states at the end, [layers * directions, b, width] each.

    x: packed inputs [sum(sizes), width]; starts: the states to begin with, shaped as those at the end;
    lengths: [1], where the only sequence ends before `sizes` do: its outputs are zero from there on.
    """
    directions, packing = 2 if bidirectional else 1, Packing(sizes, lengths)
    each = len(weights) // (count * directions)
    ends: list[State] = []
    for layer in range(count):
        if layer and dropout:
            x = F.dropout(x, dropout)
        found = []
        for number in range(layer * directions, (layer + 1) * directions):
            own = Weights.of(cell, *weights[number * each : (number + 1) * each])
            start = tuple(first[number] for first in starts)
            backwards = number % directions == 1
            states = _steps(cell, own, packing.reversed(x) if backwards else x, sizes, start, lengths)
            ends.append(tuple(packing.ends(value) for value in states))
            found.append(packing.reversed(states[0]) if backwards else states[0])
        x = torch.cat(found, -1) if bidirectional else found[0]
    return x, [torch.stack(states) for states in zip(*ends, strict=True)]


def _declare(name: str, cell: str) -> None:
    """The two operators of a kind of layer: on an array with an axis of time, and on a packed sequence."""

    def padded(x: Tensor, start: Any, weights: Sequence[Tensor], *rest: Any) -> tuple[Tensor, ...]:
        *options, batch_first = rest
        x = x.transpose(0, 1) if batch_first else x
        times, b = x.shape[:2]
        if not times:
            raise TransformError(
                f"{name} on sequences of length 0{diagnostics.where()}; expected at least one time"
            )
        out, *ends = of_sizes(x.flatten(0, 1), [b] * times, start, weights, *options)
        out = out.unflatten(0, (times, b))
        return out.transpose(0, 1) if batch_first else out, *ends

    def of_sizes(
        x: Tensor,
        sizes: list[int],
        start: Any,
        weights: Sequence[Tensor],
        has_biases: bool,
        count: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
    ) -> tuple[Tensor, ...]:
        starts = start if cell == LSTM else (start,)
        out, ends = layers(cell, x, sizes, starts, weights, count, dropout if train else 0.0, bidirectional)
        return out, *ends

    layer = getattr(aten, name)
    replace(layer.input)(padded)
    replace(layer.data)(lambda x, sizes, *rest: of_sizes(x, sizes.tolist(), *rest))


# By the names of the functions and operators.
LAYERS = {"lstm": LSTM, "gru": GRU, "rnn_tanh": TANH, "rnn_relu": RELU}
for _name, _cell in LAYERS.items():
    _declare(_name, _cell)


@replace(aten.lstm_cell.default)
def _lstm_cell(x: Tensor, state: Sequence[Tensor], *weights: Tensor | None) -> State:
    own = Weights.of(LSTM, *(weight for weight in weights if weight is not None))
    return _steps(LSTM, own, x, [x.shape[0]], tuple(state))


@replace(aten.gru_cell.default)
def _gru_cell(x: Tensor, hidden: Tensor, *weights: Tensor | None) -> Tensor:
    own = Weights.of(GRU, *(weight for weight in weights if weight is not None))
    return _steps(GRU, own, x, [x.shape[0]], (hidden,))[0]
