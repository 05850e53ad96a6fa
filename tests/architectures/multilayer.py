"""Multilayer perceptrons: one with all common activations, one with all common losses, and those that have
something of their own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.small_models import CLASSES, Architecture

WIDTH = 6

PLAIN = """ReLU LeakyReLU RReLU ELU SELU GELU SiLU Mish Softplus Softsign Sigmoid LogSigmoid Tanh Hardtanh
ReLU6 Hardswish Tanhshrink"""


class EveryActivation(nn.Module):
    """The sum of what all activations make of the same numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.ModuleList(
            [
                *(getattr(nn, name)() for name in PLAIN.split()),
                *(kind(0.1) for kind in (nn.Softshrink, nn.Hardshrink)),
                *(kind(-1) for kind in (nn.Softmax, nn.Softmin, nn.LogSoftmax)),
                nn.CELU(0.5),
                nn.GELU(approximate="tanh"),
                nn.Threshold(0.1, -0.2),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        return sum(activation(x) for activation in self.all)


class SwiGLU(nn.Module):
    """A gate by SiLU, from one matrix that is cut in two."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_and_value = nn.Linear(width, 2 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.gate_and_value(x).chunk(2, dim=-1)
        return F.silu(gate) * value


class Maxout(nn.Module):
    """The largest of several linear maps."""

    def __init__(self, width: int, pieces: int) -> None:
        super().__init__()
        self.maps = nn.Linear(width, pieces * width)
        self.pieces = pieces

    def forward(self, x: Tensor) -> Tensor:
        return self.maps(x).unflatten(-1, (-1, self.pieces)).max(dim=-1).values


class Sine(nn.Module):
    """The activation of coordinate networks, on coordinates lifted to waves."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(3 * x) + torch.cos(x)


class Dropped(nn.Module):
    """Dropout that stays on, with the same mask at every call."""

    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(0)
        return F.dropout(x, p=0.4, training=True)


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "every-activation": EveryActivation,
    "relu-in-place": lambda: nn.ReLU(inplace=True),
    "prelu": lambda: nn.PReLU(8),
    "hardsigmoid": nn.Hardsigmoid,
    "glu": lambda: nn.Sequential(nn.Linear(8, 16), nn.GLU()),
    "swiglu": lambda: SwiGLU(8),
    "maxout": lambda: Maxout(8, pieces=3),
    "sine": Sine,
}


def perceptron(activation: Callable[[], nn.Module], outputs: int = CLASSES) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8), activation(), nn.Linear(8, outputs))


def classified(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, WIDTH), torch.randint(CLASSES, (n,))


def with_numbers(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, WIDTH), torch.rand(n, CLASSES)


def with_labels_then_end(n: int) -> tuple[Tensor, Tensor]:
    """Two labels of each sample, then -1, which says that there are no more."""
    pairs = torch.stack([torch.randperm(CLASSES)[:2] for _ in range(n)])
    return torch.randn(n, WIDTH), torch.cat([pairs, torch.full((n, CLASSES - 2), -1)], dim=1)


def every_loss(o: Tensor, y: Tensor) -> Tensor:
    """The sum of all common losses, which take the target for shares, a distribution, signs or a class."""
    shares, spread, label = y, y.softmax(-1), y.argmax()
    signs, weights = (y > 0.5).to(o.dtype) * 2 - 1, torch.linspace(0.5, 2, CLASSES).to(o)
    losses = (
        F.cross_entropy(o, label, label_smoothing=0.1),
        F.cross_entropy(o, label, weight=weights, reduction="sum"),
        F.cross_entropy(o, spread),
        F.nll_loss(o.log_softmax(-1), label),
        (1 - torch.exp(-F.cross_entropy(o, label))) ** 2 * F.cross_entropy(o, label),
        F.binary_cross_entropy(o.sigmoid(), shares),
        F.binary_cross_entropy_with_logits(o, shares, pos_weight=weights),
        F.mse_loss(o, shares),
        F.l1_loss(o, shares),
        F.smooth_l1_loss(o, shares, beta=0.5),
        F.huber_loss(o, shares, delta=0.7),
        torch.log(torch.cosh(o - shares)).mean(),
        torch.maximum(0.9 * (shares - o), -0.1 * (shares - o)).mean(),
        F.kl_div(o.log_softmax(-1), spread, reduction="sum"),
        F.poisson_nll_loss(o, shares, full=True),
        F.gaussian_nll_loss(o, shares, F.softplus(o)),
        F.hinge_embedding_loss(o, signs),
        F.soft_margin_loss(o, signs),
        F.multilabel_soft_margin_loss(o, shares),
        F.cosine_embedding_loss(o[:3], o[3:6], signs[0], margin=0.1),
        F.margin_ranking_loss(o[0], o[1], signs[0], margin=0.5),
        F.triplet_margin_loss(o[None, :2], o[None, 2:4], o[None, 4:6]),
    )
    return torch.stack(losses).sum()


ARCHITECTURES = (
    *(
        Architecture(f"mlp-{name}", lambda make=make: perceptron(make), classified)
        for name, make in ACTIVATIONS.items()
    ),
    Architecture("mlp-with-every-loss", lambda: perceptron(nn.Tanh), with_numbers, every_loss),
    Architecture("mlp-with-multi-margin", lambda: perceptron(nn.Tanh), classified, F.multi_margin_loss),
    Architecture(
        "mlp-with-multi-label-margin",
        lambda: perceptron(nn.Tanh),
        with_labels_then_end,
        F.multilabel_margin_loss,
    ),
    Architecture(
        "mlp-with-ctc",
        lambda: perceptron(nn.Tanh, 6 * CLASSES),
        lambda n: (torch.randn(n, WIDTH), torch.randint(1, CLASSES, (n, 3))),
        lambda o, y: F.ctc_loss(o.reshape(6, CLASSES).log_softmax(-1), y, torch.tensor(6), torch.tensor(3)),
    ),
    Architecture(
        "mlp-dropout",
        lambda: nn.Sequential(nn.Linear(WIDTH, 8), Dropped(), nn.Linear(8, CLASSES)),
        classified,
        randomness="same",
    ),
)
