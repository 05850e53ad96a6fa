"""Networks so small that their kernels take no time, and chunks of four rows: what is left is what a tool
does around them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, LAYERS, POSITIONS, ROWS, WORDS, CLASSES = 16, 12, 8, 4, 64, 4


@dataclass(frozen=True)
class Tiny:
    """A network and a chunk of rows.

    in_torch_func, in_opacus: whether these take it.
    """

    model: nn.Module
    inputs: tuple[Tensor, ...]
    target: Tensor
    in_torch_func: bool = True
    in_opacus: bool = False


class Logits(nn.Module):
    """The scores alone, of a model of the transformers library."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: Tensor) -> Tensor:
        scores: Tensor = self.inner(*inputs).logits
        return scores


class Texts(nn.Module):
    """An LSTM over words, whose last state is classified."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.cells = nn.Embedding(WORDS, WIDTH), nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, words: Tensor) -> Tensor:
        scores: Tensor = self.head(self.cells(self.table(words))[0][:, -1])
        return scores


class Residual(nn.Module):
    """A block of ResNet-20, with GroupNorm."""

    def __init__(self, given: int, made: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(given, made, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(made, made, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.GroupNorm(2, made), nn.GroupNorm(2, made)])
        same = given == made and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(given, made, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.norms[0](self.first(x)))
        return F.relu(self.norms[1](self.second(inner)) + self.shortcut(x))


def _resnet() -> nn.Module:
    parts: list[nn.Module] = [nn.Conv2d(3, 4, 3, 1, 1, bias=False), nn.GroupNorm(2, 4), nn.ReLU()]
    given = 4
    for made, stride in ((4, 1), (8, 2), (16, 2)):
        for place in range(3):
            parts.append(Residual(given, made, 1 if place else stride))
            given = made
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, CLASSES))


def _mlp() -> nn.Module:
    layers = [nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))


def _cnn() -> nn.Module:
    convolutions = [nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 8, 3), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, CLASSES))


def _transformer(kind: str) -> nn.Module:
    import transformers

    sizes = {"vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 4 * WIDTH, "max_position_embeddings": 32}
    if kind == "gpt2":
        config: Any = transformers.GPT2Config(
            vocab_size=WORDS, n_embd=WIDTH, n_layer=LAYERS, n_head=2, n_positions=32
        )
        return Logits(transformers.GPT2LMHeadModel(config))
    if kind == "llama":
        return Logits(transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_key_value_heads=2)))
    if kind == "bert":
        config = transformers.BertConfig(**sizes, num_labels=CLASSES)
        return Logits(transformers.BertForSequenceClassification(config))
    del sizes["vocab_size"], sizes["max_position_embeddings"]
    config = transformers.ViTConfig(**sizes, image_size=8, patch_size=4, num_channels=1, num_labels=CLASSES)
    return Logits(transformers.ViTForImageClassification(config))


def _words() -> Tensor:
    return torch.randint(1, WORDS, (ROWS, POSITIONS))


def _labels() -> Tensor:
    return torch.randint(CLASSES, (ROWS,))


_CASES: dict[str, Callable[[], Tiny]] = {
    "gpt2": lambda: Tiny(_transformer("gpt2"), (_words(),), _words()),
    "llama": lambda: Tiny(_transformer("llama"), (_words(),), _words()),
    "bert": lambda: Tiny(
        _transformer("bert"), (_words(), torch.ones(ROWS, POSITIONS, dtype=torch.int64)), _labels(), False
    ),
    "vit": lambda: Tiny(_transformer("vit"), (torch.randn(ROWS, 1, 8, 8),), _labels()),
    "mlp": lambda: Tiny(_mlp(), (torch.randn(ROWS, WIDTH),), _labels(), in_opacus=True),
    "cnn": lambda: Tiny(_cnn(), (torch.randn(ROWS, 1, 8, 8),), _labels(), in_opacus=True),
    "resnet": lambda: Tiny(_resnet(), (torch.randn(ROWS, 3, 8, 8),), _labels(), in_opacus=True),
    "lstm": lambda: Tiny(Texts(), (_words(),), _labels()),
}
NAMES = tuple(_CASES)


def tiny_networks(names: tuple[str, ...] = NAMES) -> Iterator[tuple[str, Tiny]]:
    """The networks, in evaluation mode, each with its rows."""
    for name in names:
        torch.manual_seed(0)
        made = _CASES[name]()
        made.model.eval()
        yield name, made
