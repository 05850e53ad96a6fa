"""The random number generators that operators draw from, and their states: to draw the same again."""

from __future__ import annotations

import torch

States = list[tuple[torch.Generator, torch.Tensor]]


def generators() -> list[torch.Generator]:
    """Those that operators draw from, unless told otherwise: the CPU's, and each GPU's once GPUs are in use."""
    return [torch.default_generator, *(torch.cuda.default_generators if torch.cuda.is_initialized() else ())]


def states() -> States:
    return [(generator, generator.get_state()) for generator in generators()]


def restore(saved: States) -> None:
    for generator, state in saved:
        generator.set_state(state)
