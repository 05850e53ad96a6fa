"""The five architectures that every engine test is run on: small, and shaped like the ones that
people train; and two modules that several tests share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models import GPT, cnn, mlp, resnet

CLASSES = 7
VOCABULARY = 19


@dataclass(frozen=True)
class Architecture:
    """A network with a way to make data for it.

    `factory()` builds the network, `draw(n)` draws the inputs [n, ...] (one, or several in a tuple) and the
    target [n, ...], and `loss(output, target)` is the scalar of one sample, without a batch axis.
    `randomness` is what vmap is told about random draws.
    """

    name: str
    factory: Callable[[], nn.Module]
    draw: Callable[[int], tuple[Tensor | tuple[Tensor, ...], Tensor]]
    loss: Callable[..., Tensor] = F.cross_entropy
    randomness: str = "error"

    def build(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The network in eval mode, with weights that depend on the seed alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.factory().eval().to(dtype)

    def batch(
        self, n: int, seed: int = 0, dtype: torch.dtype = torch.float32
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """The network's inputs, each [n, ...], and the target [n, ...]; only what is floating point becomes
        `dtype`.
        """

        def cast(x: Tensor) -> Tensor:
            return x.to(dtype) if x.is_floating_point() else x

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            inputs, target = self.draw(n)
        return tuple(map(cast, inputs if isinstance(inputs, tuple) else (inputs,))), cast(target)


class ViT(nn.Module):
    """Images [n, 3, size, size] to logits [n, classes], by patches, a class token and torch's own encoder
    layer.
    """

    def __init__(self, image_size: int = 8, patch: int = 4, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, kernel_size=patch, stride=patch)
        self.class_token = nn.Parameter(torch.randn(1, 1, width))
        self.positions = nn.Parameter(0.1 * torch.randn(1, 1 + (image_size // patch) ** 2, width))
        self.encoder = nn.TransformerEncoderLayer(
            width, heads, 2 * width, activation="gelu", batch_first=True, norm_first=True
        )
        self.head = nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        patches = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(images), -1, -1), patches], dim=1) + self.positions
        return self.head(self.encoder(x)[:, 0])


class Tied(nn.Module):
    """An embedding and a head that share their table, with attention in between."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
        self.head = nn.Linear(16, 20)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layer(self.table(tokens))).mean(1)


class Program(nn.Module):
    """Parameters of given shapes, and a forward function of the input and them."""

    def __init__(self, forward: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])
        self.make = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.make(x, *self.weights)


def draw_images(channels: int, size: int) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda n: (torch.randn(n, channels, size, size), torch.randint(CLASSES, (n,)))


def draw_vectors(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 20), torch.randint(CLASSES, (n,))


def draw_passages(n: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCABULARY, (n, 11))
    return tokens[:, :-1], tokens[:, 1:]


ARCHITECTURES = (
    Architecture(
        "cnn", lambda: cnn(image_size=12, channels=(4, 6), hidden=16, classes=CLASSES), draw_images(1, 12)
    ),
    Architecture("mlp", lambda: mlp((20, 16, 16, CLASSES)), draw_vectors),
    Architecture(
        "resnet", lambda: resnet(widths=(4, 8), blocks=1, groups=2, classes=CLASSES), draw_images(3, 8)
    ),
    Architecture("vit", ViT, draw_images(3, 8)),
    Architecture("gpt", lambda: GPT(VOCABULARY, positions=10, width=16, layers=2, heads=2), draw_passages),
)
