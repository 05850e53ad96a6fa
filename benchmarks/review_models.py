"""The models of benchmarks/review.py, in a file of their own, as a config names them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

PEOPLE, PLACES, WORDS, LENGTH = 60, 30, 16, 8


def linear() -> nn.Module:
    return nn.Linear(64, 10).double()


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


class Sentences(nn.Module):
    """A language model: texts [n, 8] to logits [n, 8, words]."""

    def __init__(self) -> None:
        super().__init__()
        count = PEOPLE + PLACES + WORDS
        self.words, self.places = nn.Embedding(count, 32), nn.Embedding(LENGTH, 32)
        self.layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
        self.head = nn.Linear(32, count)

    def forward(self, texts: Tensor) -> Tensor:
        length = texts.shape[1]
        x = self.words(texts) + self.places(torch.arange(length, device=texts.device))
        mask = torch.triu(torch.full((length, length), -torch.inf, device=texts.device), 1)
        return self.head(self.layer(x, mask))
