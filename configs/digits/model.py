"""A small convolutional network for 8x8 grey images."""

from __future__ import annotations

from torch import nn


def build(channels: int = 16, hidden: int = 48) -> nn.Module:
    """Images [n, 1, 8, 8] to logits [n, 10]."""
    return nn.Sequential(
        nn.Conv2d(1, channels, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.Conv2d(channels, 2 * channels, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * channels * 4 * 4, hidden),
        nn.ReLU(),
        nn.Linear(hidden, 10),
    )
