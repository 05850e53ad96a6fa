"""The matrices of random projections, materialised entry by entry from their definition, in Python's own
whole numbers.
"""

from __future__ import annotations

import hashlib
import json
import math
from functools import cache

import torch
from torch import Tensor

from psgrad.engine.gradients.projections import Projection, Sparse, TwoSided

MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15


def mixed(x: int) -> int:
    """SplitMix64's finaliser, as published."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


@cache
def word(names: tuple[object, ...], place: int, number: int) -> int:
    """The word of a number in the sequence of a place."""
    key = int.from_bytes(hashlib.sha256(json.dumps(list(names)).encode()).digest()[:8], "little")
    return mixed((mixed((place * GAMMA + key) & MASK) + (number + 1) * GAMMA) & MASK)


def sign(bits: int, number: int) -> int:
    return -1 if bits >> (31 - number if number < 32 else 95 - number) & 1 else 1


def dense(names: tuple[object, ...], rows: int, places: int) -> Tensor:
    return torch.tensor(
        [[sign(word(names, place, row // 64), row % 64) for place in range(places)] for row in range(rows)],
        dtype=torch.float64,
    )


def sparse(names: tuple[object, ...], segment: int, places: int) -> Tensor:
    below = lambda bits, bound: (bits >> 33) * bound >> 31
    units = [number for number in range(segment) if math.gcd(number, segment) == 1]
    out = torch.zeros(segment, places, dtype=torch.float64)
    for first in range(0, places, segment):
        words = lambda number, at=first // segment: word(names, at, number)
        factor, shift = units[below(words(0), len(units))], below(words(1), segment)
        for column in range(segment):
            place = first + (factor * column + shift) % segment
            if place < places:
                out[column, place] = sign(words(2 + column // 64), column % 64)
    return out


@cache
def matrix(projection: Projection, name: str, shape: tuple[int, ...]) -> Tensor:
    """[k, places]: what the projection multiplies the parameter's flattened gradient by, float64."""
    names = (projection.seed, projection.kind, name)
    places = math.prod(shape)
    if isinstance(projection, Sparse):
        return sparse(names, projection.k, places)
    assert isinstance(projection, TwoSided)
    scale = math.sqrt(projection.left * projection.right)
    if len(shape) < 2:
        return sparse(names, projection.left * projection.right, places)
    left = dense((*names, "left"), projection.left, shape[0])
    right = dense((*names, "right"), projection.right, places // max(shape[0], 1))
    return torch.kron(left, right) / scale


def projected(projection: Projection, gradients: dict[str, Tensor]) -> Tensor:
    """What gradients name -> [n, *shape], materialised, are projected to."""
    parts = [
        (
            gradient.double().cpu().flatten(1) @ matrix(projection, name, tuple(gradient.shape[1:])).t()
            if gradient.dim() > 1
            else gradient.double().cpu()[:, None] @ matrix(projection, name, ()).t()
        )
        for name, gradient in gradients.items()
    ]
    return torch.cat(parts, 1) if projection.per == "parameter" else torch.stack(parts).sum(0)
