"""Gaussian noise on a number, drawn in float64, and their sum rounded to a public grid.

A floating-point sum plus floating-point noise has its low bits from both: where no record has a part in a number, the released one is a
value of the noise alone, and values that noise alone can't have tell that a record was there (Mironov, "On Significance of the Least
Significant Bits for Differential Privacy", 2012). So what is released is a whole number of steps of a grid, 2^-12 to 2^-13 of the noise's
standard deviation, which follows from that public number and from nothing else. With and without a record the same steps can come out.

What a released number is, exactly: the value x is taken apart into whole steps w and a rest f of at most half a step, both without
rounding (the grid is a power of two). The noise t is drawn in steps, and w + round(f + t) is released. Its float32 form, a weight that is
updated by it, and all else that is made of it depends on x by this whole number alone.

What is left of floating point is in f + t. The errors of t (`box_muller` has them) and of f + t move the edges of a step by less than
2^-32 of a step, for normal numbers of radius up to 12, and the finitely many values that t has are so dense that a step's probability
is off by less than 2^-34 of itself. So each step's probability is the Gaussian's within a factor 1 +- 2^-31, and `residual_epsilon` is
what that adds up to over a run.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from psgrad.engine.privacy.generators import Generator
from psgrad.errors import ConfigError

GRID_BITS = 12
"""The grid is 2^-GRID_BITS of the noise's standard deviation, rounded down to a power of two."""

# A step's probability is the Gaussian's within a factor of 1 +- this.
_OFF = 2.0**-31
# The share of delta at which `residual_epsilon` is stated.
_SHARE = 1e-9
# Numbers whose noise is drawn at a time (two blocks of normals for each of eight threads), and that are rounded at a time (in the cache).
_PIECE, _BLOCK = 1 << 20, 1 << 16
# Deviations that leave room in float64 for the grid, and for sums of many of them.
_SMALLEST, _LARGEST = 2.0**-900, 2.0**900


def grid_of(deviation: float) -> float:
    """The step that numbers with noise of this standard deviation are rounded to: 2^(floor(log2(deviation)) - 12).

    Raises ConfigError for a deviation that is no positive number, or so far from 1 that float64 has no room for the grid.
    """
    if not _SMALLEST <= deviation <= _LARGEST:
        raise ConfigError(
            f"the noise's standard deviation is {deviation:g}",
            expected=f"a number from {_SMALLEST:.2g} to {_LARGEST:.2g}: what is released is rounded to a grid of 2^-{GRID_BITS} of it",
            next_step="correct the noise multiplier or the clipping norm",
        )
    return math.ldexp(1.0, math.frexp(deviation)[1] - 1 - GRID_BITS)


def residual_epsilon(numbers: int, delta: float) -> float:
    """What floating point adds to epsilon at most, where so many noisy numbers are released in all, at a delta larger by 10^-9 of itself.

    The logarithm of the ratio of what is drawn to what is accounted is a sum of as many terms as there are numbers, each below _OFF and
    of a mean below _OFF^2, whatever was released before: by the inequality of Azuma and Hoeffding it is beyond _OFF sqrt(2 n ln(2 / d))
    + n _OFF^2 with probability d at most. Two neighbouring datasets have one such ratio each.
    """
    return 2 * (_OFF * math.sqrt(2 * numbers * math.log(2 / (_SHARE * delta))) + numbers * _OFF**2)


def noisy(values: Tensor, deviation: float, generator: Generator) -> Tensor:
    """The values plus normal noise of this standard deviation, in whole steps of `grid_of(deviation)`.

    Args:
        values: float32 or float64, any shape. They stay as they are.

    Returns:
        A tensor like the values. One of float32 holds the nearest number to so many steps, which is so many steps up to 2^24 of them.
    """
    grid = grid_of(deviation)
    found = torch.empty(values.shape, dtype=values.dtype, device=values.device)
    flat, out = values.reshape(-1), found.view(-1)
    for start in range(0, flat.numel(), _PIECE):
        into = out[start : start + _PIECE]
        drawn = generator.normal((into.numel(),), torch.float64, values.device)
        for part, of_drawn, result in zip(flat[start : start + _PIECE].split(_BLOCK), drawn.split(_BLOCK), into.split(_BLOCK), strict=True):
            steps = part.to(torch.float64, copy=True).div_(grid)
            result.copy_(whole_steps(steps, of_drawn.mul_(deviation / grid)).mul_(grid))
    return found


def whole_steps(steps: Tensor, drawn: Tensor) -> Tensor:
    """The whole number nearest to steps + drawn, float64; both are overwritten.

    The whole part of `steps` is set aside first, so that its size has no part in the rounding. Zero comes without a sign, which would be
    that of the rest.
    """
    whole = steps.round()
    return drawn.add_(steps.sub_(whole)).round_().add_(whole).add_(0.0)
