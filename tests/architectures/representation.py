"""Embeddings of words, pairs and triples, and models of tables: what is learnt by comparing."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.small_models import CLASSES, VOCABULARY, Architecture

WIDTH = 5


class NegativeSampling(nn.Module):
    """word2vec: a word beside one that was near it and some that were not."""

    def __init__(self) -> None:
        super().__init__()
        self.centre, self.context = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, word: Tensor, others: Tensor) -> Tensor:
        return torch.einsum("ni,nki->nk", self.centre(word), self.context(others))


def near_or_not(output: Tensor, target: Tensor) -> Tensor:
    """The first of the others was near."""
    wanted = torch.cat([torch.ones_like(output[:1]), torch.zeros_like(output[1:])])
    return F.binary_cross_entropy_with_logits(output, wanted)


class Siamese(nn.Module):
    """One network for both of a pair, and how far apart they end."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.GroupNorm(1, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, WIDTH)
        )

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return F.pairwise_distance(self.network(first), self.network(second))


def contrastive(output: Tensor, target: Tensor) -> Tensor:
    """Equal pairs are drawn together, others pushed apart up to a margin."""
    return target * output.square() + (1 - target) * F.relu(1.5 - output).square()


class Triplet(nn.Module):
    """Anchor, like and unlike, embedded on the sphere."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 4, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.network(x), dim=-1)


class Views(nn.Module):
    """Contrastive per sample: a view, its partner, and negatives that belong to the sample; a learned
    temperature.
    """

    def __init__(self) -> None:
        super().__init__()
        self.network, self.projection = nn.Linear(WIDTH, 6), nn.Linear(6, 4, bias=False)
        self.temperature = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        z = F.normalize(self.projection(F.relu(self.network(x))), dim=-1)
        return (z[:, 1:] @ z[:, 0, :, None]).squeeze(-1) * self.temperature.exp()


class Prototypes(nn.Module):
    """Classes as points; the nearest wins (cdist)."""

    def __init__(self) -> None:
        super().__init__()
        self.network, self.classes = nn.Linear(WIDTH, 4), nn.Parameter(torch.randn(CLASSES, 4))

    def forward(self, x: Tensor) -> Tensor:
        return -torch.cdist(self.network(x), self.classes)


class Recommender(nn.Module):
    """DLRM: numbers by a network, categories by tables, and the product of each pair of the results."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(VOCABULARY, 4) for _ in range(3))
        self.numbers, self.head = (
            nn.Sequential(nn.Linear(WIDTH, 4), nn.ReLU()),
            nn.Sequential(nn.Linear(10, 6), nn.ReLU(), nn.Linear(6, 1)),
        )

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        features = torch.stack(
            [self.numbers(numbers), *(table(categories[:, i]) for i, table in enumerate(self.tables))], dim=1
        )
        row, column = torch.tril_indices(4, 4, offset=-1, device=numbers.device)
        pairs = (features @ features.mT)[:, row, column]
        return self.head(torch.cat([features[:, 0], pairs], dim=1))


class Factorised(nn.Module):
    """A factorisation machine: linear and pairwise terms of a table's columns, and a biased bilinear term
    (torch's Bilinear).
    """

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.factors, self.bilinear = (
            nn.Linear(WIDTH, 1),
            nn.Parameter(torch.randn(WIDTH, 3)),
            nn.Bilinear(3, 3, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        mixed = x @ self.factors
        pairs = 0.5 * (mixed.square() - x.square() @ self.factors.square()).sum(1, keepdim=True)
        return self.linear(x) + pairs + self.bilinear(mixed, mixed.tanh())


class CrossNetwork(nn.Module):
    """Wide, deep and crossed: the input times learned sums of itself, again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.crosses = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(2 * WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        crossed = x
        for layer in self.crosses:
            crossed = x * layer(crossed) + crossed
        return self.head(torch.cat([crossed, x], dim=1))


def draw_pairs(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    return (torch.randn(n, 1, 6, 6), torch.randn(n, 1, 6, 6)), (torch.arange(n) % 2).float()


def one_number(n: int) -> Tensor:
    return torch.randn(n, 1)


ARCHITECTURES = (
    Architecture(
        "word2vec",
        NegativeSampling,
        lambda n: ((torch.randint(VOCABULARY, (n,)), torch.randint(VOCABULARY, (n, 4))), torch.zeros(n)),
        near_or_not,
    ),
    Architecture("siamese", Siamese, draw_pairs, contrastive),
    Architecture(
        "triplet",
        Triplet,
        lambda n: (torch.randn(n, 3, WIDTH), torch.zeros(n)),
        lambda o, y: F.triplet_margin_with_distance_loss(
            o[[0]], o[[1]], o[[2]], distance_function=lambda a, b: 1 - (a * b).sum(-1)
        ),
    ),
    Architecture(
        "contrastive",
        Views,
        lambda n: (torch.randn(n, 6, WIDTH), torch.zeros(n, dtype=torch.int64)),
    ),
    Architecture("prototypes", Prototypes, lambda n: (torch.randn(n, WIDTH), torch.randint(CLASSES, (n,)))),
    Architecture(
        "recommender",
        Recommender,
        lambda n: ((torch.randn(n, WIDTH), torch.randint(VOCABULARY, (n, 3))), one_number(n)),
        F.mse_loss,
    ),
    Architecture(
        "factorisation-machine", Factorised, lambda n: (torch.randn(n, WIDTH), one_number(n)), F.mse_loss
    ),
    Architecture(
        "cross-network", CrossNetwork, lambda n: (torch.randn(n, WIDTH), one_number(n)), F.huber_loss
    ),
)
