"""Bootstrap resamples of sums over samples, and intervals from them."""

from __future__ import annotations

import math

import torch

# More samples are put together at random before they are resampled: the spread of a sum is known to 1 /
# sqrt(2 * 512), three percent.
_BLOCKS = 512


def block_sums(values: torch.Tensor, seed: int) -> torch.Tensor:
    """[blocks, k]: the sums of the rows [n, k] in random blocks of nearly one size; the rows themselves if
    they are few.
    """
    n = len(values)
    if n <= _BLOCKS:
        return values
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    sums = torch.zeros(_BLOCKS, values.shape[1], dtype=values.dtype)
    return sums.index_add_(0, torch.arange(n) % _BLOCKS, values[order])


def resampled(sums: torch.Tensor, resamples: int, seed: int) -> torch.Tensor:
    """[resamples, k]: for each resample the means, where the last column of the rows [blocks, k + 1] counts
    samples.
    """
    generator = torch.Generator().manual_seed(seed)
    parts = []
    for start in range(0, resamples, 64):
        drawn = torch.randint(len(sums), (min(64, resamples - start), len(sums)), generator=generator)
        parts.append(sums[drawn].sum(1))
    total = torch.cat(parts)
    return total[:, :-1] / total[:, -1:]


def interval(values: torch.Tensor, level: float) -> list[float | None]:
    """[lower, upper]: the ends of the middle part of values [n] that has the share `level` of them; None for
    an end that is infinite.
    """
    ordered = values.sort().values
    tail = (1 - level) / 2
    places = math.floor(tail * (len(ordered) - 1)), math.ceil((1 - tail) * (len(ordered) - 1))
    return [float(ordered[place]) if math.isfinite(ordered[place]) else None for place in places]
