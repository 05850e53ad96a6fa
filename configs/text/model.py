"""A small byte-level transformer whose output head is its embedding."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BYTES = 256


class Block(nn.Module):
    """Causal self-attention and a GELU network, each behind a layer norm and beside a residual path."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
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
            self.query_key_value(x)
            .view(n, t, 3, self.heads, width // self.heads)
            .permute(2, 0, 3, 1, 4)
            .unbind(0)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.attention_out(mixed.transpose(1, 2).reshape(n, t, width))


class ByteTransformer(nn.Module):
    """Bytes [n, t] to the logits of the byte after each of them [n, t, 256]."""

    def __init__(self, width: int, layers: int, heads: int, positions: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(BYTES, width)
        self.positions = nn.Parameter(torch.zeros(positions, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.embedding.weight, std=0.05)
        nn.init.normal_(self.positions, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions[: tokens.shape[-1]]
        return F.linear(self.norm(self.blocks(x)), self.embedding.weight)


def build(width: int = 64, layers: int = 2, heads: int = 4, positions: int = 128) -> nn.Module:
    """The transformer that configs/text.yaml names."""
    return ByteTransformer(width, layers, heads, positions)
