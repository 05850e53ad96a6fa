"""Generators whose bits a test chooses."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from psgrad.engine.privacy.box_muller import Use
from psgrad.engine.privacy.generators import Generator


def normals(generator: Generator, *shape: int) -> torch.Tensor:
    """[*shape] float64: standard normals of a generator."""
    drawn = torch.empty(shape, dtype=torch.float64, device="cpu")
    out = drawn.view(-1).numpy()

    def store(start: int, block: np.ndarray) -> None:
        out[start : start + len(block)] = block

    generator.normal_blocks(len(out), 1.0, store)
    return drawn


class PlantedGenerator(Generator):
    """Gives the words that it was given, in their order, and fails when there are no more."""

    name, secure = "planted", False

    def __init__(self, words: Iterable[int]) -> None:
        self.words = [int(word) for word in words]

    def uint64(self, n: int) -> np.ndarray:
        assert n <= len(self.words), f"{n} words were asked for, and {len(self.words)} are left"
        taken, self.words = self.words[:n], self.words[n:]
        return np.array(taken, dtype=np.uint64)

    def normal_blocks(self, total: int, deviation: float, use: Use) -> None:
        raise AssertionError("no noise was to be drawn")


class PlantedStream(Generator):
    """A Generator whose key stream repeats the same bytes."""

    def __init__(self, pattern: bytes) -> None:
        super().__init__(bytes(32))
        self.pattern = pattern

    def _write(self, start: int, size: int, out: np.ndarray) -> None:
        repeats = -(-size // len(self.pattern))
        out[:size] = np.frombuffer(self.pattern * repeats, dtype=np.uint8)[:size]
