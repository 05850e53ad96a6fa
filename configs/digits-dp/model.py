"""A small convolutional network for 8x8 grey images, to be trained from scratch under clipping and noise.

Tanh in place of ReLU keeps activations, and with them gradients, bounded: less of them is clipped away
(Papernot, Thakurta, Song, Chien and Erlingsson, "Tempered Sigmoid Activations for Deep Learning with
Differential Privacy", 2021). There is no normalisation layer that mixes the images of a batch.
"""

from __future__ import annotations

from torch import nn


def build(channels: int = 16, hidden: int = 48) -> nn.Module:
    """Images [n, 1, 8, 8] to logits [n, 10]."""
    return nn.Sequential(
        nn.Conv2d(1, channels, kernel_size=3, padding=1),
        nn.Tanh(),
        nn.Conv2d(channels, 2 * channels, kernel_size=3, padding=1),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2 * channels * 4 * 4, hidden),
        nn.Tanh(),
        nn.Linear(hidden, 10),
    )
