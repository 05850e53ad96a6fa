"""Pairs and prototypes: what is learnt by comparing."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.small_models import CLASSES, Architecture

WIDTH = 5


class Siamese(nn.Module):
    """One network for both of a pair, and how far apart they end."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.GroupNorm(1, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, WIDTH)
        )

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return F.pairwise_distance(self.network(first), self.network(second))


def contrastive(output: Tensor, target: Tensor) -> Tensor:
    """Equal pairs are drawn together, others pushed apart up to a margin."""
    return target * output.square() + (1 - target) * F.relu(1.5 - output).square()


class Prototypes(nn.Module):
    """Classes as points; the nearest wins (cdist)."""

    def __init__(self) -> None:
        super().__init__()
        self.network, self.classes = nn.Linear(WIDTH, 4), nn.Parameter(torch.randn(CLASSES, 4))

    def forward(self, x: Tensor) -> Tensor:
        return -torch.cdist(self.network(x), self.classes)


def draw_pairs(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    return (torch.randn(n, 1, 6, 6), torch.randn(n, 1, 6, 6)), (torch.arange(n) % 2).float()


ARCHITECTURES = (
    Architecture("siamese", Siamese, draw_pairs, contrastive),
    Architecture("prototypes", Prototypes, lambda n: (torch.randn(n, WIDTH), torch.randint(CLASSES, (n,)))),
)
