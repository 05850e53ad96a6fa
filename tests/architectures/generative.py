"""Models of the data itself, and networks that are defined by what they converge to or integrate."""

from __future__ import annotations

import math

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


def drawn_like(x: Tensor) -> Tensor:
    """The same noise in every precision."""
    return torch.randn_like(x, dtype=torch.float32).to(x.dtype)


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
        code = mean + drawn_like(mean) * (log_variance / 2).exp()
        return self.decoder(code), mean, log_variance


def evidence_bound(output: tuple[Tensor, Tensor, Tensor], target: Tensor) -> Tensor:
    rebuilt, mean, log_variance = output
    return (
        F.mse_loss(rebuilt, target, reduction="sum")
        - 0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum()
    )


class Diffusion(nn.Module):
    """Told the noise level, guesses the noise; level and noise are drawn inside, the same at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(WIDTH + 2, 8), nn.SiLU(), nn.Linear(8, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(0)
        angle = 0.5 * math.pi * torch.rand(len(x), 1, device=x.device).to(x.dtype)
        noise = drawn_like(x)
        noisy = angle.cos() * x + angle.sin() * noise
        return self.network(torch.cat([noisy, angle.cos(), angle.sin()], dim=1)) - noise


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


class MixtureDensity(nn.Module):
    """The parameters of a mixture of normal distributions."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 9))

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)


def mixture_loss(output: Tensor, target: Tensor) -> Tensor:
    weights, mean, log_deviation = output.view(3, 3)
    components = torch.distributions.Normal(mean, log_deviation.exp(), validate_args=False)
    return -torch.logsumexp(weights.log_softmax(-1) + components.log_prob(target), dim=-1)


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
    """A neural differential equation, solved by steps of Euler's or of Runge and Kutta's method."""

    def __init__(self, runge_kutta: bool) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(WIDTH + 1, 6), nn.Softplus(), nn.Linear(6, WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.runge_kutta = runge_kutta

    def speed(self, time: float, x: Tensor) -> Tensor:
        return self.field(torch.cat([x, torch.full_like(x[:, :1], time)], dim=1))

    def forward(self, x: Tensor) -> Tensor:
        step = 0.25
        for i in range(4):
            time = i * step
            first = self.speed(time, x)
            if self.runge_kutta:
                second = self.speed(time + step / 2, x + step / 2 * first)
                third = self.speed(time + step / 2, x + step / 2 * second)
                fourth = self.speed(time + step, x + step * third)
                x = x + step / 6 * (first + 2 * second + 2 * third + fourth)
            else:
                x = x + step * first
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


class RadianceField(nn.Module):
    """NeRF: points along a ray, lifted to waves, then seen through each other."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, origin: Tensor, direction: Tensor) -> Tensor:
        distances = torch.linspace(0, 1, 5, dtype=origin.dtype, device=origin.device)
        points = origin[:, None] + distances[:, None] * F.normalize(direction, dim=-1)[:, None]
        angles = points[..., None] * torch.tensor([1.0, 2.0], dtype=points.dtype, device=points.device)
        found = self.network(torch.cat([angles.sin(), angles.cos()], dim=-1).flatten(-2))
        opaque = 1 - torch.exp(-F.softplus(found[..., 3]) * 0.2)
        through = torch.cumprod(torch.cat([torch.ones_like(opaque[:, :1]), 1 - opaque + 1e-6], dim=1), dim=1)[
            :, :-1
        ]
        return ((opaque * through)[..., None] * found[..., :3].sigmoid()).sum(1)


ARCHITECTURES = (
    Architecture(
        "variational-autoencoder", VariationalAutoencoder, draw_vectors, evidence_bound, randomness="same"
    ),
    Architecture("diffusion", Diffusion, draw_vectors, lambda o, y: o.square().mean(), randomness="same"),
    Architecture("normalising-flow", Coupling, draw_vectors, negative_log_likelihood),
    Architecture(
        "mixture-density", MixtureDensity, lambda n: (torch.randn(n, WIDTH), torch.randn(n)), mixture_loss
    ),
    Architecture(
        "tied-autoencoder",
        Autoencoder,
        draw_small_images,
        lambda o, y: F.binary_cross_entropy_with_logits(o, y),
    ),
    Architecture("vector-quantised", VectorQuantised, draw_vectors, lambda o, y: F.mse_loss(o[0], y) + o[1]),
    Architecture("neural-ode-euler", lambda: EulerSteps(runge_kutta=False), draw_classified),
    Architecture("neural-ode-runge-kutta", lambda: EulerSteps(runge_kutta=True), draw_classified),
    Architecture("deep-equilibrium", Equilibrium, draw_classified),
    Architecture(
        "radiance-field",
        RadianceField,
        lambda n: ((torch.randn(n, 3), torch.randn(n, 3)), torch.rand(n, 3)),
        F.mse_loss,
    ),
)
