"""The networks that are timed; the tests check the same ones at a small size."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def cnn(
    image_size: int = 28, channels: tuple[int, int] = (32, 64), hidden: int = 128, classes: int = 10
) -> nn.Module:
    """The network of PyTorch's per-sample-gradient tutorial: images [n, 1, size, size] to logits [n,
    classes].
    """
    first, second = channels
    pooled = (image_size - 4) // 2
    return nn.Sequential(
        nn.Conv2d(1, first, kernel_size=3),
        nn.ReLU(),
        nn.Conv2d(first, second, kernel_size=3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(second * pooled * pooled, hidden),
        nn.ReLU(),
        nn.Linear(hidden, classes),
    )


def mlp(widths: Sequence[int] = (784, 512, 512, 10)) -> nn.Module:
    """Linear layers with ReLU between them: [n, widths[0]] to logits [n, widths[-1]]."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with GroupNorm beside a shortcut, which is a 1x1 convolution where the shape
    changes.
    """

    def __init__(self, inputs: int, outputs: int, stride: int, groups: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, kernel_size=3, stride=stride, padding=1, bias=False)
        self.first_norm = nn.GroupNorm(groups, outputs)
        self.second = nn.Conv2d(outputs, outputs, kernel_size=3, padding=1, bias=False)
        self.second_norm = nn.GroupNorm(groups, outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, kernel_size=1, stride=stride, bias=False),
                nn.GroupNorm(groups, outputs),
            )

    def forward(self, x: Tensor) -> Tensor:
        inside = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(inside)) + self.shortcut(x))


def resnet(
    widths: Sequence[int] = (16, 32, 64), blocks: int = 3, groups: int = 8, classes: int = 10
) -> nn.Module:
    """The CIFAR ResNet with GroupNorm, `blocks` blocks a stage (3 is ResNet-20): images [n, 3, h, w] to
    logits [n, classes].
    """
    stages = [
        ResidualBlock(
            inputs if block == 0 else outputs,
            outputs,
            stride=2 if block == 0 and stage > 0 else 1,
            groups=groups,
        )
        for stage, (inputs, outputs) in enumerate(pairwise((widths[0], *widths)))
        for block in range(blocks)
    ]
    return nn.Sequential(
        nn.Conv2d(3, widths[0], kernel_size=3, padding=1, bias=False),
        nn.GroupNorm(groups, widths[0]),
        nn.ReLU(),
        *stages,
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(widths[-1], classes),
    )


class Block(nn.Module):
    """Causal self-attention and a GELU network, each behind a layer norm and beside a residual path."""

    def __init__(self, width: int, heads: int, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))

    def attend(self, x: Tensor) -> Tensor:
        n, t, width = x.shape
        query, key, value = (
            part.view(n, t, self.heads, -1).transpose(1, 2)
            for part in self.query_key_value(x).split(width, dim=2)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        return self.attention_out(mixed.transpose(1, 2).reshape(n, t, width))


class GPT(nn.Module):
    """A decoder whose head is its embedding: tokens [n, t] to logits [n, t, vocabulary]."""

    def __init__(
        self, vocabulary: int = 8192, positions: int = 128, width: int = 256, layers: int = 4, heads: int = 4
    ) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(vocabulary, width)
        self.position_embedding = nn.Embedding(positions, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.token_embedding.weight
        nn.init.normal_(self.token_embedding.weight, std=0.02)
        nn.init.normal_(self.position_embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        return self.head(self.norm(self.blocks(x)))


class LlamaBlock(nn.Module):
    """Attention with rotary positions, whose keys and values are shared by groups of heads, and a gated
    perceptron, each behind an RMSNorm.
    """

    def __init__(self, width: int, heads: int, keys: int, hidden: int) -> None:
        super().__init__()
        linear = partial(nn.Linear, bias=False)
        self.size, each = width // heads, width // heads * keys
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.key, self.value = linear(width, width), linear(width, each), linear(width, each)
        self.attention_out = linear(width, width)
        self.gate, self.up, self.down = linear(width, hidden), linear(width, hidden), linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.attention_norm(x))
        y = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def attend(self, x: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(2, (-1, self.size)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(
            rotated(query), rotated(key), value, is_causal=True, enable_gqa=True
        )
        return self.attention_out(mixed.transpose(1, 2).flatten(2))


def rotated(x: Tensor) -> Tensor:
    """Heads [n, h, t, size], their halves turned by angles that grow with the position."""
    half = x.shape[3] // 2
    rates = 500_000 ** (-torch.arange(half, device=x.device) / half)
    angles = torch.arange(x.shape[2], device=x.device)[:, None] * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    left, right = x.chunk(2, 3)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], 3)


class Llama(nn.Module):
    """A decoder of Llama's shape: tokens [n, t] to logits [n, t, vocabulary]."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, keys: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(LlamaBlock(width, heads, keys, hidden) for _ in range(layers)))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.embedding(tokens))))
