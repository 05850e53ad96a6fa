"""Small trainings for the tests of the monitor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

from psgrad.monitoring.monitor import Monitor, monitor

BATCH = 32
Change = Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""(step, inputs, targets) of a batch to those that the loop trains on."""


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images / 16, dtype=torch.float32).reshape(-1, 1, 8, 8), torch.tensor(labels)


class Classifier(nn.Module):
    """Of digits, with running statistics and dropout: what a measurement must not touch."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.dropout, self.head = nn.Dropout(0.1), nn.Linear(16 * 16, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = F.max_pool2d(F.relu(self.norm(self.convolution(images))), 2)
        logits: torch.Tensor = self.head(self.dropout(features.flatten(1)))
        return logits


def trained(
    steps: int,
    seed: int = 0,
    watch: bool = True,
    change: Change = lambda step, images, labels: (images, labels),
    **options: Any,
) -> tuple[nn.Module, dict[int, list[tuple[Any, str]]], Monitor | None]:
    """The classifier after so many steps, and step -> (id, reason) of the rows that the monitor named."""
    torch.manual_seed(seed)
    images, labels = digits()
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    watcher = monitor(model, F.cross_entropy, **({"output": None} | options)) if watch else None
    order, spikes = np.random.default_rng(seed), {}
    for step in range(1, steps + 1):
        rows = torch.from_numpy(order.permutation(len(images))[:BATCH])
        batch = change(step, images[rows], labels[rows])
        if watcher is not None and (found := watcher.step(batch, ids=rows.tolist())) and found.spike:
            spikes[step] = [(row.id, row.reason) for row in found.spike]
        optimizer.zero_grad()
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()
    return model, spikes, watcher
