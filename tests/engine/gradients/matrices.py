"""The matrices of random projections, materialised entry by entry from their definition, in Python's own
whole numbers.
"""

from __future__ import annotations

import hashlib
import json
import math
from functools import cache
from statistics import NormalDist

import torch
from torch import Tensor

from psgrad.engine.gradients.projections import Gaussian, Projection, Rademacher, Sparse, TwoSided

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


@cache
def quantiles() -> list[float]:
    """Of the normal distribution, scaled to a variance of one and rounded to float32."""
    values = [NormalDist().inv_cdf((i + 0.5) / 65536) for i in range(65536)]
    deviation = math.sqrt(sum(value * value for value in values) / 65536)
    return torch.tensor([value / deviation for value in values], dtype=torch.float32).tolist()


def entry(matrices: str, names: tuple[object, ...], row: int, place: int) -> float:
    """An entry of a dense matrix, before it is scaled."""
    if matrices == "rademacher":
        return sign(word(names, place, row // 64), row % 64)
    sixteen = word(names, place, row // 4) >> (16 * (row % 4)) & 0xFFFF
    return quantiles()[sixteen ^ 0x8000]  # a signed number, counted from the smallest


def dense(matrices: str, names: tuple[object, ...], rows: int, places: int) -> Tensor:
    return torch.tensor(
        [[entry(matrices, names, row, place) for place in range(places)] for row in range(rows)],
        dtype=torch.float64,
    )


def sparse(names: tuple[object, ...], segment: int, nonzeros: int, places: int) -> Tensor:
    below = lambda bits, bound: (bits >> 33) * bound >> 31
    units = [number for number in range(segment) if math.gcd(number, segment) == 1]
    out = torch.zeros(nonzeros * segment, places, dtype=torch.float64)
    for block in range(nonzeros):
        for first in range(0, places, segment):
            words = lambda number, at=first // segment: word(names, at, number)
            factor, shift = units[below(words(block), len(units))], below(words(nonzeros + block), segment)
            signs = 2 * nonzeros + block * math.ceil(segment / 64)
            for column in range(segment):
                place = first + (factor * column + shift) % segment
                if place < places:
                    out[block * segment + column, place] = sign(words(signs + column // 64), column % 64)
    return out


@cache
def matrix(projection: Projection, name: str, shape: tuple[int, ...]) -> Tensor:
    """[k, places]: what the projection multiplies the parameter's flattened gradient by, float64."""
    names = (projection.seed, projection.kind, name)
    places = math.prod(shape)
    if isinstance(projection, Rademacher | Gaussian):
        return dense(projection.matrices, names, projection.k, places) / math.sqrt(projection.k)
    if isinstance(projection, Sparse):
        return sparse(names, projection.k // projection.nonzeros, projection.nonzeros, places) / math.sqrt(
            projection.nonzeros
        )
    assert isinstance(projection, TwoSided)
    scale = math.sqrt(projection.left * projection.right)
    if len(shape) < 2:
        return sparse(names, projection.left * projection.right, 1, places)
    left = dense(projection.matrices, (*names, "left"), projection.left, shape[0])
    right = dense(projection.matrices, (*names, "right"), projection.right, places // max(shape[0], 1))
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
