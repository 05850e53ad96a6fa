"""Networks on graphs and sets: a sample is a graph of its own, with as many nodes and edges as the others."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.small_models import CLASSES, Architecture

NODES, EDGES, WIDTH = 5, 9, 4


def draw_graphs(n: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Node features [n, nodes, width] and edges [n, 2, edges], from and to."""
    return (torch.randn(n, NODES, WIDTH), torch.randint(NODES, (n, 2, EDGES))), torch.randint(CLASSES, (n,))


class Graph(nn.Module):
    """Layers on the nodes of one graph. psgrad and the loop both call with a batch of one, so its axis is
    dropped here.
    """

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        return self.read(nodes[0], edges[0, 0], edges[0, 1])[None]

    def read(self, nodes: Tensor, source: Tensor, target: Tensor) -> Tensor:
        raise NotImplementedError


class Convolution(Graph):
    """The mean over neighbours, added where an edge ends (index_add), then a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def read(self, nodes: Tensor, source: Tensor, target: Tensor) -> Tensor:
        degree = torch.ones(NODES, dtype=nodes.dtype, device=nodes.device).index_add(
            0, target, torch.ones_like(nodes[0, 0]).expand(EDGES)
        )
        scale = degree.rsqrt()
        for layer in self.layers:
            messages = layer(nodes)[source] * (scale[source] * scale[target])[:, None]
            nodes = F.relu(nodes.index_add(0, target, messages))
        return self.head(nodes.mean(0))


class Attention(Graph):
    """Scores of edges, normalised over the edges that end at the same node (scatter_reduce, scatter_add,
    gather).
    """

    def __init__(self) -> None:
        super().__init__()
        self.values, self.scores, self.head = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(2 * WIDTH, 1),
            nn.Linear(WIDTH, CLASSES),
        )

    def read(self, nodes: Tensor, source: Tensor, target: Tensor) -> Tensor:
        values = self.values(nodes)
        scores = F.leaky_relu(self.scores(torch.cat([values[source], values[target]], dim=1)), 0.2).squeeze(1)
        with torch.no_grad():
            largest = torch.full_like(nodes[:, 0], -1e9).scatter_reduce(0, target, scores, "amax")
        weights = torch.exp(scores - largest[target])
        total = torch.zeros_like(nodes[:, 0]).scatter_add(0, target, weights)
        messages = values[source] * (weights / total[target])[:, None]
        return self.head(F.elu(torch.zeros_like(values).index_add_(0, target, messages)).sum(0))


ARCHITECTURES = (
    Architecture("graph-convolution", Convolution, draw_graphs),
    Architecture("graph-attention", Attention, draw_graphs),
)
