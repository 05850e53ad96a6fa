"""Recurrent layers as programs: one matrix product for the inputs of all times, then a step for each time.

PyTorch's kernels for whole layers (oneDNN, cuDNN) do not return what a per-sample gradient needs. Here a
recurrent weight is multiplied by each time's state in a product of its own, and those products collect as one
term with a position for each time.

Time is packed throughout: a piece for each time holds the sequences that are still running, the longest
first, as PyTorch packs them. If all sequences have equal length, all pieces are alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from psgrad.engine.transforms import diagnostics
from psgrad.engine.transforms.rules.families import aten
from psgrad.engine.transforms.rules.registry import replace
from psgrad.errors import TransformError

State = tuple[Tensor, ...]  # of an LSTM its output and its memory, of the others the output
Step = Callable[[Tensor, State], State]  # a time's projected inputs and the state before, to the state after
Cell = Callable[..., tuple[Tensor, Step]]  # inputs of all times and the weights, to projected inputs and step


def _lstm(x: Tensor, inner: Tensor, outer: Tensor, *rest: Tensor) -> tuple[Tensor, Step]:
    """rest: two biases or none, then the projection of the output, if any."""
    bias = rest[0] + rest[1] if len(rest) > 1 else None
    projection = rest[-1] if len(rest) % 2 else None

    def step(projected: Tensor, state: State) -> State:
        hidden, memory = state
        write, keep, value, show = (projected + F.linear(hidden, outer)).chunk(4, -1)
        memory = torch.sigmoid(keep) * memory + torch.sigmoid(write) * torch.tanh(value)
        hidden = torch.sigmoid(show) * torch.tanh(memory)
        return hidden if projection is None else F.linear(hidden, projection), memory

    return F.linear(x, inner, bias), step


def _gru(
    x: Tensor, inner: Tensor, outer: Tensor, bias: Tensor | None = None, outer_bias: Tensor | None = None
) -> tuple[Tensor, Step]:
    def step(projected: Tensor, state: State) -> State:
        (hidden,) = state
        reset, update, value = projected.chunk(3, -1)
        outer_reset, outer_update, outer_value = F.linear(hidden, outer, outer_bias).chunk(3, -1)
        value = torch.tanh(value + torch.sigmoid(reset + outer_reset) * outer_value)
        return (torch.lerp(value, hidden, torch.sigmoid(update + outer_update)),)

    return F.linear(x, inner, bias), step


def _elman(activation: Callable[[Tensor], Tensor]) -> Cell:
    def cell(x: Tensor, inner: Tensor, outer: Tensor, *biases: Tensor) -> tuple[Tensor, Step]:
        bias = biases[0] + biases[1] if biases else None
        return F.linear(x, inner, bias), lambda projected, state: (
            activation(projected + F.linear(state[0], outer)),
        )

    return cell


def _over_time(
    step: Step, pieces: Sequence[Tensor], start: State, backwards: bool
) -> tuple[Sequence[Tensor], State]:
    """The output at each time, and each sequence's state at its end. Backwards, short sequences begin
    later.
    """
    state = tuple(first[: len(pieces[-1])] for first in start) if backwards else start
    outputs: list[Tensor] = []
    ended: list[State] = []
    for piece in reversed(pieces) if backwards else pieces:
        before, running = len(state[0]), len(piece)
        if running < before:
            ended.append(tuple(value[running:] for value in state))
            state = tuple(value[:running] for value in state)
        elif running > before:
            state = tuple(
                torch.cat([value, first[before:running]]) for value, first in zip(state, start, strict=True)
            )
        state = step(piece, state)
        outputs.append(state[0])
    for stopped in reversed(ended):
        state = tuple(torch.cat([value, other]) for value, other in zip(state, stopped, strict=True))
    return outputs[::-1] if backwards else outputs, state


def _layers(
    cell: Cell,
    x: Tensor,
    sizes: list[int],
    starts: Sequence[Tensor],
    weights: Sequence[Tensor],
    has_biases: bool,
    count: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
) -> tuple[Tensor, list[Tensor]]:
    """The last layer's outputs, packed, and the states at the end, [layers * directions, b, width] each.

    x: packed inputs [sum(sizes), width]; starts: the states to begin with, shaped as those at the end.
    """
    directions = 2 if bidirectional else 1
    each = len(weights) // (count * directions)
    ends: list[State] = []
    for layer in range(count):
        if layer and dropout and train:
            x = F.dropout(x, dropout)
        found = []
        for number in range(layer * directions, (layer + 1) * directions):
            projected, step = cell(x, *weights[number * each : (number + 1) * each])
            start = tuple(first[number] for first in starts)
            outputs, end = _over_time(step, projected.split(sizes), start, backwards=number % directions == 1)
            found.append(torch.cat(list(outputs)))
            ends.append(end)
        x = torch.cat(found, -1) if bidirectional else found[0]
    return x, [torch.stack(states) for states in zip(*ends, strict=True)]


def _declare(name: str, cell: Cell, states: int) -> None:
    """The two operators of a kind of layer: on an array with an axis of time, and on a packed sequence."""

    def padded(x: Tensor, start: Any, weights: Sequence[Tensor], *rest: Any) -> tuple[Tensor, ...]:
        *options, batch_first = rest
        x = x.transpose(0, 1) if batch_first else x
        times, b = x.shape[:2]
        if not times:
            raise TransformError(
                f"{name} on sequences of length 0{diagnostics.where()}", expected="at least one time"
            )
        out, ends = _layers(
            cell, x.flatten(0, 1), [b] * times, start if states > 1 else (start,), weights, *options
        )
        out = out.unflatten(0, (times, b))
        return out.transpose(0, 1) if batch_first else out, *ends

    def packed(
        x: Tensor, sizes: Tensor, start: Any, weights: Sequence[Tensor], *options: Any
    ) -> tuple[Tensor, ...]:
        out, ends = _layers(cell, x, sizes.tolist(), start if states > 1 else (start,), weights, *options)
        return out, *ends

    layer = getattr(aten, name)
    replace(layer.input)(padded)
    replace(layer.data)(packed)


_declare("lstm", _lstm, states=2)
_declare("gru", _gru, states=1)
_declare("rnn_tanh", _elman(torch.tanh), states=1)
_declare("rnn_relu", _elman(torch.relu), states=1)


@replace(aten.lstm_cell.default)
def _lstm_cell(x: Tensor, state: Sequence[Tensor], *weights: Tensor | None) -> State:
    projected, step = _lstm(x, *(weight for weight in weights if weight is not None))
    return step(projected, tuple(state))


@replace(aten.gru_cell.default)
def _gru_cell(x: Tensor, hidden: Tensor, *weights: Tensor | None) -> Tensor:
    projected, step = _gru(x, *(weight for weight in weights if weight is not None))
    return step(projected, (hidden,))[0]


# -- packed sequences ----------------------------------------------------------------------------------------


@replace(aten._pack_padded_sequence.default)
def _pack(x: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    """The sequences of [times, b, ...], longest first, time after time, each up to its end."""
    running: list[int] = lengths.tolist()
    x = x.transpose(0, 1) if batch_first else x
    sizes = [sum(length > time for length in running) for time in range(running[0])]
    return torch.cat([x[time, :size] for time, size in enumerate(sizes)]), torch.tensor(sizes)


@replace(aten._pad_packed_sequence.default)
def _unpack(
    data: Tensor, sizes: Tensor, batch_first: bool, padding: float, total: int
) -> tuple[Tensor, Tensor]:
    running: list[int] = sizes.tolist()
    b, rest = running[0], data.shape[1:]
    times = [
        torch.cat([piece, piece.new_full((b - size, *rest), padding)]) if size < b else piece
        for piece, size in zip(data.split(running), running, strict=True)
    ]
    times += [data.new_full((b, *rest), padding)] * (total - len(running))
    lengths = torch.tensor([sum(size > place for size in running) for place in range(b)])
    return torch.stack(times, 1 if batch_first else 0), lengths
