"""Models that draw random numbers in every way that there is, as one takes them from a library or writes
them.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from psgrad.engine.transforms import checkpoint

FEATURES, CLASSES = 6, 3


class Around(nn.Module):
    """Two layers, and between them what a subclass makes of [1, 8] numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inside(self.first(x)))  # type: ignore[no-any-return]

    def inside(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Dropout(Around):
    def inside(self, x: Tensor) -> Tensor:
        return F.dropout(x.tanh(), 0.5)


class OtherDropouts(Around):
    def inside(self, x: Tensor) -> Tensor:
        images = F.dropout2d(x.view(1, 4, 1, 2), 0.4)
        return F.alpha_dropout(
            F.feature_alpha_dropout(images, 0.3, training=True).flatten(1), 0.2, training=True
        )


class AttentionDropout(Around):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.4, batch_first=True)

    def inside(self, x: Tensor) -> Tensor:
        tokens = self.layer(x.view(1, 2, 4))
        return F.scaled_dot_product_attention(tokens, tokens, tokens, dropout_p=0.3).flatten(1)


class Gumbel(Around):
    def inside(self, x: Tensor) -> Tensor:
        return F.gumbel_softmax(x, tau=0.7) + x


class Noise(Around):
    def inside(self, x: Tensor) -> Tensor:
        noisy = x + torch.randn_like(x) * torch.empty(8).uniform_(0.5, 2) + torch.normal(x.detach(), 0.5)
        kept = torch.multinomial(torch.ones(8), 4)
        return F.rrelu(noisy, training=True) * torch.zeros(8).index_fill(0, kept, 1.0)[torch.randperm(8)]


class SeedsItself(Around):
    def inside(self, x: Tensor) -> Tensor:
        torch.manual_seed(0)
        np.random.seed(0)
        return F.dropout(x, 0.5) * (1 + np.random.rand()) + torch.rand(8)


class OutsideOfTorch(Around):
    def inside(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.3) * random.uniform(0.5, 1.5)


class OnlyOutsideOfTorch(Around):
    def inside(self, x: Tensor) -> Tensor:
        return x * np.random.rand()


class OwnOutsideOfTorch(Around):
    def __init__(self) -> None:
        super().__init__()
        self.own = np.random.default_rng(0)

    def inside(self, x: Tensor) -> Tensor:
        return x * self.own.random()


class LayerDrop(Around):
    """A layer that is left out at random by an `if`, and draws before and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.middle = nn.Linear(8, 8)

    def inside(self, x: Tensor) -> Tensor:
        x = F.dropout(x, 0.2)
        if torch.rand([]) < 0.5:
            x = F.dropout(self.middle(x), 0.5)
        return F.dropout(x, 0.3)


class Checkpointed(Around):
    def inside(self, x: Tensor) -> Tensor:
        x = checkpoint(lambda x: F.dropout(x, 0.5).sin(), F.dropout(x, 0.2))
        return F.dropout(torch_checkpoint(lambda x: F.dropout(x, 0.5).cos(), x, use_reentrant=False), 0.1)  # type: ignore[no-any-return]


class Recurrent(Around):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(4, 4, num_layers=2, dropout=0.5, batch_first=True)

    def inside(self, x: Tensor) -> Tensor:
        return self.layer(x.view(1, 2, 4))[0].flatten(1)  # type: ignore[no-any-return]


class NoisyGradient(torch.autograd.Function):
    """Draws in the backward pass: the gradient of each position is kept or not."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return g * (torch.rand(8) < 0.5)


class DrawsOnTheWayBack(Around):
    def inside(self, x: Tensor) -> Tensor:
        return F.dropout(NoisyGradient.apply(x).tanh(), 0.2)  # type: ignore[no-untyped-call]


MODELS: dict[str, type[Around]] = {
    kind.__name__: kind
    for kind in (
        Dropout,
        OtherDropouts,
        AttentionDropout,
        Gumbel,
        Noise,
        SeedsItself,
        OutsideOfTorch,
        OnlyOutsideOfTorch,
        OwnOutsideOfTorch,
        LayerDrop,
        Checkpointed,
        Recurrent,
        DrawsOnTheWayBack,
    )
}
