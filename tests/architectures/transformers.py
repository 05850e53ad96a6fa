"""Attention: encoders with padding, decoders with rotary positions or relative biases, experts, adapters, and
kin of theirs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.small_models import CLASSES, VOCABULARY, Architecture, draw_passages

PADDING = 0


def draw_padded(n: int) -> tuple[Tensor, Tensor]:
    """Sentences of several lengths, filled up with the padding token."""
    tokens = torch.randint(1, VOCABULARY, (n, 8))
    lengths = 3 + torch.arange(n) % 5
    return tokens.masked_fill(torch.arange(8) >= lengths[:, None], PADDING), torch.randint(CLASSES, (n,))


class PaddedEncoder(nn.Module):
    """BERT: words, segments and positions, torch's encoder with a padding mask, and the mean of the words
    that are there. In eval mode torch's encoder has a fast path, one operator that no transform may meet.
    """

    def __init__(self, width: int = 8, norm_first: bool = False) -> None:
        super().__init__()
        self.words, self.segments = (
            nn.Embedding(VOCABULARY, width, padding_idx=PADDING),
            nn.Embedding(2, width),
        )
        self.positions = nn.Parameter(0.1 * torch.randn(8, width))
        layer = nn.TransformerEncoderLayer(
            width, 2, 2 * width, activation="gelu", batch_first=True, norm_first=norm_first
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.norm, self.pooler, self.head = (
            nn.LayerNorm(width),
            nn.Linear(width, width),
            nn.Linear(width, CLASSES),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        padding = tokens == PADDING
        segments = torch.arange(tokens.shape[1], device=tokens.device).ge(4).long().expand_as(tokens)
        x = self.norm(self.words(tokens) + self.segments(segments) + self.positions)
        x = self.encoder(x, src_key_padding_mask=padding).masked_fill(padding[..., None], 0)
        mean = x.sum(1) / (~padding).sum(1, keepdim=True)
        return self.head(torch.tanh(self.pooler(mean)))


class Rotary(nn.Module):
    """Llama's attention: rotated queries and keys, fewer keys than queries, causal."""

    def __init__(self, width: int, heads: int, shared: int) -> None:
        super().__init__()
        each = width // heads
        self.query = nn.Linear(width, width, bias=False)
        self.key, self.value = (nn.Linear(width, width // shared, bias=False) for _ in range(2))
        self.out = nn.Linear(width, width, bias=False)
        self.each = each
        self.register_buffer("frequency", 1 / 10 ** (torch.arange(0, each, 2) / each), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        angle = torch.outer(
            torch.arange(x.shape[1], device=x.device, dtype=x.dtype), self.frequency.to(x.dtype)
        ).repeat(1, 2)
        q, k, v = (
            part(x).unflatten(-1, (-1, self.each)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(
            rotated(q, angle), rotated(k, angle), v, is_causal=True, enable_gqa=True
        )
        return self.out(mixed.transpose(1, 2).flatten(2))


def rotated(x: Tensor, angle: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * angle.cos() + torch.cat([-second, first], dim=-1) * angle.sin()


class GatedNetwork(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Each position asks the two experts that the router likes best."""

    def __init__(self, width: int, experts: int = 3) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.experts = nn.ModuleList(GatedNetwork(width, width) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        value, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        weights = torch.zeros(*x.shape[:-1], len(self.experts), dtype=x.dtype, device=x.device)
        weights = weights.scatter(-1, chosen, value / value.sum(-1, keepdim=True))
        return sum(weights[..., [i]] * expert(x) for i, expert in enumerate(self.experts))


class Llama(nn.Module):
    """Rotary attention and a gated network (or experts), each behind an RMS norm; the head is a matrix of its
    own.
    """

    def __init__(self, experts: bool = False, width: int = 8) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(
            nn.ModuleList(
                [
                    nn.RMSNorm(width),
                    Rotary(width, 2, 2),
                    nn.RMSNorm(width),
                    Experts(width) if experts else GatedNetwork(width, 16),
                ]
            )
            for _ in range(2)
        )
        self.norm, self.head = nn.RMSNorm(width, eps=1e-6), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for before, attention, between, network in self.layers:
            x = x + attention(before(x))
            x = x + network(between(x))
        return self.head(self.norm(x))


def draw_translations(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    source, target = torch.randint(VOCABULARY, (n, 6)), torch.randint(VOCABULARY, (n, 6))
    return (source, target[:, :-1]), target[:, 1:].masked_fill(
        torch.arange(5) >= 3 + (torch.arange(n) % 3)[:, None], -100
    )


class TorchTransformer(nn.Module):
    """torch's own encoder and decoder, with a causal mask."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width)
        self.transformer = nn.Transformer(width, 2, 1, 1, 16, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        x, y = self.words(source), self.words(target)
        mask = nn.Transformer.generate_square_subsequent_mask(y.shape[1], device=y.device, dtype=y.dtype)
        return self.head(self.transformer(x, y, tgt_mask=mask, tgt_is_causal=True))


class LowRank(nn.Module):
    """A frozen layer with a trained product of thin matrices beside it."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features))
        self.up = nn.Parameter(0.1 * torch.randn(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2 * F.linear(F.linear(x, self.down), self.up)


def adapted_llama() -> nn.Module:
    model = Llama().requires_grad_(False)
    for _, attention, _, _ in model.layers:
        attention.query, attention.value = LowRank(attention.query), LowRank(attention.value)
    return model


class CrossAttention(nn.Module):
    """A few learned queries read a sequence of another width (Perceiver); the weights are looked at too."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(3, width))
        self.attention = nn.MultiheadAttention(
            width, 2, kdim=5, vdim=5, add_bias_kv=True, add_zero_attn=True, batch_first=True
        )
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        read, weights = self.attention(self.queries.expand(len(x), -1, -1), x, x)
        return self.head(read.mean(1)) + weights.square().sum((1, 2))[:, None]


def with_balance(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy and a term that keeps the logits small, as large models are trained."""
    return F.cross_entropy(output, target) + 1e-2 * output.logsumexp(-1).square().mean()


ARCHITECTURES = (
    Architecture("bert", PaddedEncoder, draw_padded),
    Architecture("bert-norm-first", lambda: PaddedEncoder(norm_first=True), draw_padded),
    Architecture("llama", Llama, draw_passages, with_balance),
    Architecture("mixture-of-experts", lambda: Llama(experts=True), draw_passages),
    Architecture("torch-transformer", TorchTransformer, draw_translations),
    Architecture("lora", adapted_llama, draw_passages),
    Architecture("perceiver", CrossAttention, lambda n: (torch.randn(n, 6, 5), torch.randint(CLASSES, (n,)))),
)
