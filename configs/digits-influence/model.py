"""A small network of two layers for 8x8 grey images."""

from __future__ import annotations

from torch import nn


def build(hidden: int = 64) -> nn.Module:
    """Images [n, 1, 8, 8] to logits [n, 10]."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))
