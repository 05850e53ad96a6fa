"""Recurrent networks: whole layers and cells in a loop, one way and both, packed, and attention over them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.small_models import CLASSES, VOCABULARY, Architecture, draw_passages

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


class Tagger(nn.Module):
    """Words read both ways by two layers, with a label for each."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.layer = nn.LSTM(WIDTH, 3, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(6, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layer(self.words(tokens))[0])


class Attending(nn.Module):
    """A decoder cell that looks at all states of the encoder at each step (Bahdanau)."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width)
        self.encoder = nn.GRU(width, width, bidirectional=True, batch_first=True)
        self.keys, self.query, self.score = (
            nn.Linear(2 * width, width, bias=False),
            nn.Linear(width, width),
            nn.Linear(width, 1),
        )
        self.cell, self.head = nn.GRUCell(3 * width, width), nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        embedded = self.words(tokens)
        states, last = self.encoder(embedded)
        keys, state, outputs = self.keys(states), last[0], []
        for t in range(tokens.shape[1]):
            weights = self.score(torch.tanh(keys + self.query(state)[:, None])).softmax(1)
            state = self.cell(torch.cat([embedded[:, t], (weights * states).sum(1)], dim=1), state)
            outputs.append(self.head(state))
        return torch.stack(outputs, dim=1)


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
        "rnn-relu",
        lambda: LastState(nn.RNN(WIDTH, 5, nonlinearity="relu", batch_first=True), 5),
        draw_sequences,
    ),
    Architecture(
        "lstm-without-bias",
        lambda: LastState(nn.LSTM(WIDTH, 5, bias=False, batch_first=True), 5),
        draw_sequences,
    ),
    Architecture(
        "lstm-projected",
        lambda: LastState(nn.LSTM(WIDTH, 5, proj_size=3, batch_first=True), 3),
        draw_sequences,
    ),
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
    Architecture("rnn-both-ways", lambda: FinalStates(nn.RNN(WIDTH, 3, bidirectional=True)), draw_sequences),
    Architecture("lstm-packed", lambda: Packed(nn.LSTM(WIDTH, 5, batch_first=True), 5), draw_sequences),
    Architecture(
        "gru-packed-both-ways",
        lambda: Packed(nn.GRU(WIDTH, 3, bidirectional=True, batch_first=True), 6),
        draw_sequences,
    ),
    Architecture("rnn-packed", lambda: Packed(nn.RNN(WIDTH, 5, batch_first=True), 5), draw_sequences),
    Architecture("lstm-cell", lambda: Cells(nn.LSTMCell(WIDTH, 5)), draw_sequences),
    Architecture("gru-cell", lambda: Cells(nn.GRUCell(WIDTH, 5)), draw_sequences),
    Architecture("rnn-cell", lambda: Cells(nn.RNNCell(WIDTH, 5)), draw_sequences),
    Architecture("recurrence-by-hand", ByHand, draw_sequences),
    Architecture("tagger", Tagger, draw_passages, F.cross_entropy),
    Architecture("attention-over-gru", Attending, draw_passages, F.cross_entropy),
)
