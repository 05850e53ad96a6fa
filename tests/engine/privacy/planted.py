"""Generators whose bits a test chooses."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from psgrad.engine.privacy.generators import Generator, SecureGenerator


class PlantedGenerator(Generator):
    """Gives the words that it was given, in their order, and fails when there are no more."""

    name, secure = "planted", False

    def __init__(self, words: Iterable[int]) -> None:
        self.words = [int(word) for word in words]

    def uint64(self, n: int) -> np.ndarray:
        assert n <= len(self.words), f"{n} words were asked for, and {len(self.words)} are left"
        taken, self.words = self.words[:n], self.words[n:]
        return np.array(taken, dtype=np.uint64)

    def normal(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> Tensor:
        raise AssertionError("no noise was to be drawn")


class PlantedStream(SecureGenerator):
    """A SecureGenerator whose key stream repeats the same bytes."""

    def __init__(self, pattern: bytes) -> None:
        super().__init__(bytes(32))
        self.pattern = pattern

    def _write(self, start: int, size: int, out: np.ndarray) -> None:
        repeats = -(-size // len(self.pattern))
        out[:size] = np.frombuffer(self.pattern * repeats, dtype=np.uint8)[:size]
