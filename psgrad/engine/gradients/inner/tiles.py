"""How the samples of two sides are cut, so that what is made of them fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

# Bytes of what is kept of one side's samples while they meet the other's: factors in another precision, gradients that are written out.
SIDE_BYTES = {"cpu": 64 << 20, "cuda": 1 << 30}

# A symmetric result is cut into so many rows of tiles: of each the part right of the diagonal is computed, 56 % of all.
_ROWS_OF_TILES = 8


def budget(bytes_by_device: Mapping[str, int], device: torch.device) -> int:
    """Bytes that the device may spend, by its kind."""
    return bytes_by_device.get(device.type, bytes_by_device["cuda"])


def steps(n: int, step: int, within: slice | None = None) -> Iterator[slice]:
    """0, ..., n - 1, or those within a slice of them, in slices of `step`, at least one, and a rest."""
    step = max(1, step)
    first, last = (within.start, within.stop) if within is not None else (0, n)
    for start in range(first, last, step):
        yield slice(start, min(start + step, last))


def halves(n: int, symmetric: bool, step: int) -> int:
    """A step small enough for a symmetric result of n rows to be half computed."""
    return max(1, min(step, -(-n // _ROWS_OF_TILES))) if symmetric else step
