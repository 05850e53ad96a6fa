"""Multilayer perceptrons: one for each common activation, and one for each common loss."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.small_models import CLASSES, Architecture

WIDTH = 6

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "relu-in-place": lambda: nn.ReLU(inplace=True),
    "leaky-relu": nn.LeakyReLU,
    "prelu": lambda: nn.PReLU(8),
    "rrelu": nn.RReLU,
    "elu": nn.ELU,
    "celu": lambda: nn.CELU(0.5),
    "selu": nn.SELU,
    "gelu": nn.GELU,
    "gelu-tanh": lambda: nn.GELU(approximate="tanh"),
    "silu": nn.SiLU,
    "mish": nn.Mish,
    "softplus": nn.Softplus,
    "softsign": nn.Softsign,
    "sigmoid": nn.Sigmoid,
    "log-sigmoid": nn.LogSigmoid,
    "tanh": nn.Tanh,
    "hardtanh": nn.Hardtanh,
    "relu6": nn.ReLU6,
    "hardswish": nn.Hardswish,
    "hardsigmoid": nn.Hardsigmoid,
    "tanhshrink": nn.Tanhshrink,
    "softshrink": lambda: nn.Softshrink(0.1),
    "hardshrink": lambda: nn.Hardshrink(0.1),
    "threshold": lambda: nn.Threshold(0.1, -0.2),
    "softmax": lambda: nn.Softmax(-1),
    "softmin": lambda: nn.Softmin(-1),
    "log-softmax": lambda: nn.LogSoftmax(-1),
    "glu": lambda: nn.Sequential(nn.Linear(8, 16), nn.GLU()),
    "swiglu": lambda: SwiGLU(8),
    "maxout": lambda: Maxout(8, pieces=3),
    "sine": lambda: Sine(),
}


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


def perceptron(activation: Callable[[], nn.Module], outputs: int = CLASSES) -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 8), activation(), nn.Linear(8, outputs))


def classified(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, WIDTH), torch.randint(CLASSES, (n,))


def with_target(target: Callable[[int], Tensor]) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda n: (torch.randn(n, WIDTH), target(n))


def class_numbers(n: int) -> Tensor:
    return torch.randint(CLASSES, (n,))


def numbers(n: int) -> Tensor:
    return torch.randn(n, CLASSES)


def shares(n: int) -> Tensor:
    return torch.rand(n, CLASSES)


def distributions(n: int) -> Tensor:
    return torch.randn(n, CLASSES).softmax(-1)


def signs(n: int) -> Tensor:
    return torch.randint(2, (n, CLASSES)).float() * 2 - 1


def one_sign(n: int) -> Tensor:
    return torch.randint(2, (n,)).float() * 2 - 1


def labels_then_end(n: int) -> Tensor:
    """Two labels of each sample, then -1, which says that there are no more."""
    pairs = torch.stack([torch.randperm(CLASSES)[:2] for _ in range(n)])
    return torch.cat([pairs, torch.full((n, CLASSES - 2), -1)], dim=1)


def class_weights(like: Tensor) -> Tensor:
    return torch.linspace(0.5, 2, CLASSES, dtype=like.dtype, device=like.device)


# name -> (outputs of the network, target, loss)
LOSSES: dict[str, tuple[int, Callable[[int], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "smoothed-cross-entropy": (
        CLASSES,
        class_numbers,
        lambda o, y: F.cross_entropy(o, y, label_smoothing=0.1),
    ),
    "weighted-cross-entropy": (
        CLASSES,
        class_numbers,
        lambda o, y: F.cross_entropy(o, y, weight=class_weights(o), reduction="sum"),
    ),
    "cross-entropy-with-distributions": (CLASSES, distributions, F.cross_entropy),
    "nll": (CLASSES, class_numbers, lambda o, y: F.nll_loss(o.log_softmax(-1), y)),
    "focal": (
        CLASSES,
        class_numbers,
        lambda o, y: (1 - torch.exp(-F.cross_entropy(o, y))) ** 2 * F.cross_entropy(o, y),
    ),
    "binary-cross-entropy": (CLASSES, shares, lambda o, y: F.binary_cross_entropy(o.sigmoid(), y)),
    "binary-cross-entropy-with-logits": (
        CLASSES,
        shares,
        lambda o, y: F.binary_cross_entropy_with_logits(o, y, pos_weight=class_weights(o)),
    ),
    "mse": (CLASSES, numbers, F.mse_loss),
    "l1": (CLASSES, numbers, F.l1_loss),
    "smooth-l1": (CLASSES, numbers, lambda o, y: F.smooth_l1_loss(o, y, beta=0.5)),
    "huber": (CLASSES, numbers, lambda o, y: F.huber_loss(o, y, delta=0.7)),
    "log-cosh": (CLASSES, numbers, lambda o, y: torch.log(torch.cosh(o - y)).mean()),
    "quantile": (CLASSES, numbers, lambda o, y: torch.maximum(0.9 * (y - o), -0.1 * (y - o)).mean()),
    "kl-divergence": (CLASSES, distributions, lambda o, y: F.kl_div(o.log_softmax(-1), y, reduction="sum")),
    "poisson": (CLASSES, shares, lambda o, y: F.poisson_nll_loss(o, y, full=True)),
    "gaussian": (
        2 * CLASSES,
        numbers,
        lambda o, y: F.gaussian_nll_loss(o[:CLASSES], y, F.softplus(o[CLASSES:])),
    ),
    "hinge-embedding": (CLASSES, signs, F.hinge_embedding_loss),
    "soft-margin": (CLASSES, signs, F.soft_margin_loss),
    "multi-label-soft-margin": (CLASSES, shares, F.multilabel_soft_margin_loss),
    "multi-margin": (CLASSES, class_numbers, F.multi_margin_loss),
    "multi-label-margin": (CLASSES, labels_then_end, F.multilabel_margin_loss),
    "cosine-embedding": (8, one_sign, lambda o, y: F.cosine_embedding_loss(o[:4], o[4:], y, margin=0.1)),
    "margin-ranking": (2, one_sign, lambda o, y: F.margin_ranking_loss(o[0], o[1], y, margin=0.5)),
    "triplet-margin": (
        9,
        one_sign,
        lambda o, y: F.triplet_margin_loss(o[None, :3], o[None, 3:6], o[None, 6:]),
    ),
    "ctc": (
        6 * CLASSES,
        lambda n: torch.randint(1, CLASSES, (n, 3)),
        lambda o, y: F.ctc_loss(o.reshape(6, CLASSES).log_softmax(-1), y, torch.tensor(6), torch.tensor(3)),
    ),
}

ARCHITECTURES = (
    *(
        Architecture(f"mlp-{name}", lambda make=make: perceptron(make), classified)
        for name, make in ACTIVATIONS.items()
    ),
    *(
        Architecture(
            f"mlp-with-{name}",
            lambda outputs=outputs: perceptron(nn.Tanh, outputs),
            with_target(target),
            loss,
        )
        for name, (outputs, target, loss) in LOSSES.items()
    ),
    Architecture(
        "mlp-dropout",
        lambda: nn.Sequential(nn.Linear(WIDTH, 8), Dropped(), nn.Linear(8, CLASSES)),
        classified,
        randomness="same",
    ),
)
