"""Memory that is kept between the blocks of a walk: fresh pages cost more than most of what is written into them."""

from __future__ import annotations

import math

import torch


class Workspace:
    """Tensors by name, with whatever was left in them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._memory: dict[str, torch.Tensor] = {}

    def kept(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor in the memory of this name, which what was got by the name before shares."""
        size, held = math.prod(shape), self._memory.get(name)
        if held is None or held.numel() < size or held.dtype != dtype:
            held = self._memory[name] = torch.empty(size, dtype=dtype, device=self.device)
        return held[:size].view(shape)
