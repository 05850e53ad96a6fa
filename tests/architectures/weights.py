"""Networks whose weights are made from other things: norms and directions, constraints, other networks, each
other.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from tests.small_models import CLASSES, VOCABULARY, Architecture, draw_images, draw_passages

WIDTH = 5


def draw_classified(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, WIDTH), torch.randint(CLASSES, (n,))


def reparametrised(wrap: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return nn.Sequential(wrap(nn.Linear(WIDTH, WIDTH)), nn.Tanh(), nn.Linear(WIDTH, CLASSES))


def exponential(layer: nn.Module) -> nn.Module:
    return parametrizations.orthogonal(layer, orthogonal_map="matrix_exp", use_trivialization=False)


class LayerHypernetwork(nn.Module):
    """All layers' weights from one small table, by one shared matrix."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.codes, self.maker = nn.Parameter(torch.randn(layers, 3)), nn.Linear(3, WIDTH * WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for code in self.codes:
            x = torch.tanh(F.linear(x, self.maker(code).view(WIDTH, WIDTH)))
        return self.head(x)


class Modulated(nn.Module):
    """StyleGAN's convolution: each sample scales the kernel by its own style, then evens it out."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel, self.style = nn.Parameter(torch.randn(4, 3, 3, 3)), nn.Linear(3, 3)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        style = self.style(x.mean((2, 3)))
        kernel = self.kernel * style[:, None, :, None, None]
        kernel = kernel * torch.rsqrt(kernel.square().sum((2, 3, 4), keepdim=True) + 1e-8)
        convolved = F.conv2d(x.reshape(1, -1, *x.shape[2:]), kernel.flatten(0, 1), padding=1, groups=len(x))
        return self.head(F.leaky_relu(convolved.view(len(x), 4, *x.shape[2:]), 0.2).mean((2, 3)))


class SharedLayers(nn.Module):
    """ALBERT: one layer used several times, one table for words and head, with a factor between them."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.words, self.factor = nn.Embedding(VOCABULARY, 3), nn.Linear(3, width, bias=False)
        self.layer = nn.TransformerEncoderLayer(width, 2, 8, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.factor(self.words(tokens))
        for _ in range(3):
            x = self.layer(x)
        return x @ self.factor.weight @ self.words.weight.t()


class Structured(nn.Module):
    """Weights by Kronecker product, by a circulant (in the frequency domain) and by a butterfly of small
    blocks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.randn(2, 2)), nn.Parameter(torch.randn(4, 3))
        self.circle = nn.Parameter(torch.randn(8))
        self.blocks = nn.Parameter(torch.randn(4, 2, 2))
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x @ torch.kron(self.left, self.right).t())
        x = torch.fft.irfft(torch.fft.rfft(x) * torch.fft.rfft(self.circle), n=8)
        x = torch.einsum("nki,kio->nko", x.view(-1, 4, 2), self.blocks).mT.flatten(1)
        return self.head(x)


ARCHITECTURES = (
    Architecture("weight-norm", lambda: reparametrised(parametrizations.weight_norm), draw_classified),
    Architecture("spectral-norm", lambda: reparametrised(parametrizations.spectral_norm), draw_classified),
    Architecture("orthogonal-by-exponential", lambda: reparametrised(exponential), draw_classified),
    Architecture(
        "orthogonal-by-householder", lambda: reparametrised(parametrizations.orthogonal), draw_classified
    ),
    Architecture("layer-hypernetwork", LayerHypernetwork, draw_classified),
    Architecture("modulated-convolution", Modulated, draw_images(3, 5)),
    Architecture("shared-layers", SharedLayers, draw_passages, F.cross_entropy),
    Architecture(
        "structured-matrices", Structured, lambda n: (torch.randn(n, 6), torch.randint(CLASSES, (n,)))
    ),
)
