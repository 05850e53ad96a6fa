"""Models of the data itself, and networks that are defined by what they converge to or integrate."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.small_models import CLASSES, Architecture

WIDTH = 4


def draw_vectors(n: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, WIDTH)
    return x, x


def draw_classified(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, WIDTH), torch.randint(CLASSES, (n,))


class VariationalAutoencoder(nn.Module):
    """Draws its code around a mean; the same noise at every call, so that a sample's gradient is one
    number.
    """

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, 4))
        self.decoder = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        torch.manual_seed(0)
        mean, log_variance = self.encoder(x).chunk(2, dim=-1)
        noise = torch.randn_like(mean, dtype=torch.float32).to(mean.dtype)  # the same in every precision
        code = mean + noise * (log_variance / 2).exp()
        return self.decoder(code), mean, log_variance


def evidence_bound(output: tuple[Tensor, Tensor, Tensor], target: Tensor) -> Tensor:
    rebuilt, mean, log_variance = output
    return (
        F.mse_loss(rebuilt, target, reduction="sum")
        - 0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
    )


class Coupling(nn.Module):
    """RealNVP: half of the entries scale and shift the others, after a rotation whose determinant
    counts too.
    """

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        half = WIDTH // 2
        self.networks = nn.ModuleList(
            nn.Sequential(nn.Linear(half, 6), nn.Tanh(), nn.Linear(6, WIDTH)) for _ in range(layers)
        )
        self.scales = nn.Parameter(0.1 * torch.randn(layers, WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        total = torch.zeros(len(x), dtype=x.dtype, device=x.device)
        for network, scale in zip(self.networks, self.scales, strict=True):
            kept, changed = (x * scale.exp()).chunk(2, dim=1)
            log_scale, shift = network(kept).chunk(2, dim=1)
            log_scale = torch.tanh(log_scale)
            total += log_scale.sum(1) + scale.sum()
            x = torch.cat([changed * log_scale.exp() + shift, kept], dim=1).flip(1)
        return x, total


def negative_log_likelihood(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    x, log_determinant = output
    return 0.5 * x.square().sum() - log_determinant


class Autoencoder(nn.Module):
    """Convolutions down, the same kernels transposed up."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = nn.Parameter(0.3 * torch.randn(3, 1, 3, 3))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        code = F.relu(F.conv2d(x, self.kernels, stride=2, padding=1))
        return F.conv_transpose2d(code, self.kernels, self.bias, stride=2, padding=1, output_padding=1)


def draw_small_images(n: int) -> tuple[Tensor, Tensor]:
    x = torch.rand(n, 1, 6, 6)
    return x, x


class VectorQuantised(nn.Module):
    """The nearest entry of a codebook in place of the code, with gradients straight through."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(WIDTH, 3), nn.Linear(3, WIDTH)
        self.codebook = nn.Parameter(torch.randn(5, 3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        code = self.encoder(x)
        nearest = self.codebook[(code[:, None] - self.codebook).square().sum(-1).argmin(1)]
        moved = (nearest - code.detach()).square().sum(-1) + 0.25 * (nearest.detach() - code).square().sum(-1)
        return self.decoder(code + (nearest - code).detach()), moved


class EulerSteps(nn.Module):
    """A neural differential equation, solved by steps of Euler's method."""

    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(WIDTH + 1, 6), nn.Softplus(), nn.Linear(6, WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for i in range(4):
            x = x + 0.25 * self.field(torch.cat([x, torch.full_like(x[:, :1], 0.25 * i)], dim=1))
        return self.head(x)


class Equilibrium(nn.Module):
    """The point that a layer maps to itself: found without a record, then one step with it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 6, bias=False), nn.Linear(WIDTH, 6)
        self.head = nn.Linear(6, CLASSES)
        nn.init.uniform_(self.inner.weight, -0.1, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        given = self.outer(x)
        with torch.no_grad():
            z = torch.zeros_like(given)
            for _ in range(20):
                z = torch.tanh(self.inner(z) + given)
        for _ in range(3):
            z = torch.tanh(self.inner(z) + given)
        return self.head(z)


ARCHITECTURES = (
    Architecture(
        "variational-autoencoder", VariationalAutoencoder, draw_vectors, evidence_bound, randomness="same"
    ),
    Architecture("normalising-flow", Coupling, draw_vectors, negative_log_likelihood),
    Architecture(
        "tied-autoencoder",
        Autoencoder,
        draw_small_images,
        lambda o, y: F.binary_cross_entropy_with_logits(o, y),
    ),
    Architecture("vector-quantised", VectorQuantised, draw_vectors, lambda o, y: F.mse_loss(o[0], y) + o[1]),
    Architecture("neural-ode-euler", EulerSteps, draw_classified),
    Architecture("deep-equilibrium", Equilibrium, draw_classified),
)
