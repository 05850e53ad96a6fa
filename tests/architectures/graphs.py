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


class Isomorphism(Graph):
    """Sums over neighbours by scatter_add, a network on each node, and a pool of the layers' sums."""

    def __init__(self) -> None:
        super().__init__()
        self.networks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 6), nn.ReLU(), nn.Linear(6, WIDTH)) for _ in range(2)
        )
        self.itself = nn.Parameter(torch.tensor(0.1))
        self.head = nn.Linear(2 * WIDTH, CLASSES)

    def read(self, nodes: Tensor, source: Tensor, target: Tensor) -> Tensor:
        pooled = []
        for network in self.networks:
            sums = torch.zeros_like(nodes).scatter_add_(0, target[:, None].expand(-1, WIDTH), nodes[source])
            nodes = network((1 + self.itself) * nodes + sums)
            pooled.append(nodes.sum(0))
        return self.head(torch.cat(pooled))


class GatedMessages(Graph):
    """Messages move a GRU cell's state at each node; they arrive by accumulating index_put."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.cell, self.head = (
            nn.Linear(WIDTH, WIDTH),
            nn.GRUCell(WIDTH, WIDTH),
            nn.Linear(WIDTH, CLASSES),
        )

    def read(self, nodes: Tensor, source: Tensor, target: Tensor) -> Tensor:
        for _ in range(2):
            arrived = torch.zeros_like(nodes).index_put(
                (target,), self.message(nodes)[source], accumulate=True
            )
            nodes = self.cell(arrived, nodes)
        return self.head(nodes.max(0).values)


class Adjacency(nn.Module):
    """A dense adjacency matrix a sample, normalised, in matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = (
            nn.Linear(WIDTH, 5),
            nn.Linear(5, WIDTH),
            nn.Linear(WIDTH, CLASSES),
        )

    def forward(self, nodes: Tensor, adjacency: Tensor) -> Tensor:
        linked = adjacency + torch.eye(NODES, dtype=nodes.dtype, device=nodes.device)
        linked = linked / linked.sum(-1, keepdim=True)
        x = F.relu(linked @ self.first(nodes))
        return self.head((linked @ self.second(x)).mean(1))


class PointSet(nn.Module):
    """PointNet: the same network at each point, then the largest of each feature; distances to learned points
    beside it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.points = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 6))
        self.anchors = nn.Parameter(torch.randn(4, 3))
        self.head = nn.Linear(10, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        nearest = (x[:, :, None] - self.anchors).norm(dim=-1).amin(1)
        return self.head(torch.cat([self.points(x).amax(1), nearest], dim=1))


ARCHITECTURES = (
    Architecture("graph-convolution", Convolution, draw_graphs),
    Architecture("graph-attention", Attention, draw_graphs),
    Architecture("graph-isomorphism", Isomorphism, draw_graphs),
    Architecture("graph-gated-messages", GatedMessages, draw_graphs),
    Architecture(
        "graph-adjacency",
        Adjacency,
        lambda n: ((torch.randn(n, NODES, WIDTH), torch.rand(n, NODES, NODES)), torch.randint(CLASSES, (n,))),
    ),
    Architecture("point-set", PointSet, lambda n: (torch.randn(n, 6, 3), torch.randint(CLASSES, (n,)))),
)
