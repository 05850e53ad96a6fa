"""Recurrent networks: whole layers and cells in a loop, one way and both, packed, and attention over them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.small_models import CLASSES, Architecture

WIDTH, TIMES = 4, 6


def draw_sequences(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, TIMES, WIDTH), torch.randint(CLASSES, (n,))


class LastState(nn.Module):
    """A whole recurrent layer, and logits from where it ends."""

    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0][:, -1])


class FinalStates(nn.Module):
    """Time in front, states to begin with that are parameters, and logits from all states at the end."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        states = layer.num_layers * (2 if layer.bidirectional else 1)
        self.layer = layer
        self.start = nn.Parameter(torch.randn(states, 1, layer.hidden_size))
        self.head = nn.Linear(states * layer.hidden_size, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        start = self.start.expand(-1, len(x), -1)
        lstm = isinstance(self.layer, nn.LSTM)
        _, end = self.layer(x.transpose(0, 1), (start, start.tanh()) if lstm else start)
        return self.head((end[1] if lstm else end).transpose(0, 1).flatten(1))


class Packed(nn.Module):
    """Sequences that all end before the array does, given to the layer as a packed one."""

    def __init__(self, layer: nn.Module, width: int) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, [TIMES - 2] * len(x), batch_first=True)
        states, _ = pad_packed_sequence(self.layer(packed)[0], batch_first=True)
        return self.head(states.mean(1))


class Cells(nn.Module):
    """A cell in a loop over time, from no state at all."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell, self.head = cell, nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.head(state[0] if isinstance(state, tuple) else state)


class ByHand(nn.Module):
    """A recurrence of bare parameters, written into an array as it goes."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.inner, self.outer = (
            nn.Parameter(0.5 * torch.randn(width, width)),
            nn.Parameter(torch.randn(WIDTH, width)),
        )
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        states = torch.zeros(len(x), TIMES + 1, self.inner.shape[0], dtype=x.dtype, device=x.device)
        for t in range(TIMES):
            states[:, t + 1] = torch.tanh(states[:, t].clone() @ self.inner + x[:, t] @ self.outer)
        return self.head(states.amax(1))


ARCHITECTURES = (
    Architecture("lstm", lambda: LastState(nn.LSTM(WIDTH, 5, batch_first=True), 5), draw_sequences),
    Architecture("gru", lambda: LastState(nn.GRU(WIDTH, 5, batch_first=True), 5), draw_sequences),
    Architecture("rnn", lambda: LastState(nn.RNN(WIDTH, 5, batch_first=True), 5), draw_sequences),
    Architecture(
        "lstm-two-layers-both-ways",
        lambda: FinalStates(nn.LSTM(WIDTH, 3, num_layers=2, bidirectional=True)),
        draw_sequences,
    ),
    Architecture(
        "gru-two-layers-both-ways",
        lambda: FinalStates(nn.GRU(WIDTH, 3, num_layers=2, bidirectional=True)),
        draw_sequences,
    ),
    Architecture(
        "gru-packed-both-ways",
        lambda: Packed(nn.GRU(WIDTH, 3, bidirectional=True, batch_first=True), 6),
        draw_sequences,
    ),
    Architecture("lstm-cell", lambda: Cells(nn.LSTMCell(WIDTH, 5)), draw_sequences),
    Architecture("gru-cell", lambda: Cells(nn.GRUCell(WIDTH, 5)), draw_sequences),
    Architecture("rnn-cell", lambda: Cells(nn.RNNCell(WIDTH, 5)), draw_sequences),
    Architecture("recurrence-by-hand", ByHand, draw_sequences),
)
