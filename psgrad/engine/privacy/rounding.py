"""Gaussian noise on a number, drawn in float64, and their sum rounded to a public grid.

The low bits of a floating-point sum with floating-point noise come from both. A number in which no record has
a part is released as a value of the noise alone, so a value that noise alone can't have reveals that a record
was there (Mironov, "On Significance of the Least Significant Bits for Differential Privacy", 2012). So what
is released is a whole number of steps of a grid, 2^-12 to 2^-13 of the noise's standard deviation, which
follows from that public number only. With and without a record the same steps are possible.

A released number is computed as follows. The value x and the noise t are added in float64, and their sum is
rounded to the nearest step. If |x| is above 2^18 steps, it is split into whole steps w and a rest f of at
most half a step, both without rounding (the grid is a power of two), and w + round(f + t) is released. Its
float32 form, a weight that is updated by it, and all that is computed from them depend on x by this whole
number only.

Floating-point errors remain in t, in x + t and in f + t. The errors of t (see `box_muller`) and of the sum,
which is at most 2^-35 of a step, move the edges of a step by less than 2^-32 of a step, for normal numbers of
radius up to 12, and the finitely many values of t are so dense that a step's probability is off by less than
2^-34 of itself. So each step's probability is the Gaussian's within a factor 1 +- 2^-31, and
`residual_epsilon` adds this up over a run.
"""

from __future__ import annotations

import math

import numpy as np
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
# Up to this number of steps the noise is added to a value as it is.
_DIRECT = 2.0**18
# Deviations that leave room in float64 for the grid, and for sums of many of them.
_SMALLEST, _LARGEST = 2.0**-900, 2.0**900


def grid_of(deviation: float) -> float:
    """The step that numbers with noise of this standard deviation are rounded to: 2^(floor(log2(deviation)) -
    12).

    Raises ConfigError for a deviation that is not a positive number, or so far from 1 that float64 has no
    room for the grid.
    """
    if not _SMALLEST <= deviation <= _LARGEST:
        raise ConfigError(
            f"the noise's standard deviation is {deviation:g}; expected a number from {_SMALLEST:.2g} to"
            f" {_LARGEST:.2g}: what is released is rounded to a grid of 2^-{GRID_BITS} of it",
            hint="correct the noise multiplier or the clipping norm",
        )
    return math.ldexp(1.0, math.frexp(deviation)[1] - 1 - GRID_BITS)


def residual_epsilon(numbers: int, delta: float) -> float:
    """The most that floating point adds to epsilon if `numbers` noisy numbers are released in all, at a delta
    larger by 10^-9 of itself.

    The logarithm of the ratio of drawn to accounted probabilities is a sum of as many terms as there are
    numbers, each below _OFF and of a mean below _OFF^2, whatever was released before: by the inequality of
    Azuma and Hoeffding it is beyond _OFF sqrt(2 n ln(2 / d)) + n _OFF^2 with probability d at most. Two
    neighbouring datasets have one such ratio each.
    """
    return 2 * (_OFF * math.sqrt(2 * numbers * math.log(2 / (_SHARE * delta))) + numbers * _OFF**2)


def noisy(values: Tensor, deviation: float, generator: Generator) -> Tensor:
    """The values [*shape] plus normal noise of this standard deviation, in whole steps of
    `grid_of(deviation)`.

    Args:
        values: float64, any shape and device. They stay as they are; the noise is drawn on the CPU.

    Returns a tensor like the values.
    """
    grid = grid_of(deviation)
    summed = values.cpu().reshape(-1).numpy()
    written = np.empty_like(summed)

    def add(start: int, drawn: np.ndarray) -> None:
        there = slice(start, start + len(drawn))
        to_nearest(summed[there], drawn, grid)
        written[there] = drawn

    generator.normal_blocks(len(summed), deviation, add)
    return torch.from_numpy(written).reshape(values.shape).to(values.device)


def to_nearest(values: np.ndarray, drawn: np.ndarray, grid: float) -> None:
    """Replace `drawn` by the multiples of the grid that are nearest to values + drawn; both are float64, and
    of at least one number.

    Zero has no sign, which would be that of the rounded value.
    """
    if -_DIRECT * grid <= values.min() and values.max() <= _DIRECT * grid:
        edge = 1.5 * 2.0**52 * grid  # above it, neighbouring numbers are one step apart
        drawn += values
        drawn += edge
        drawn -= edge
        return
    steps = values / grid
    whole = steps.round()
    steps -= whole
    drawn /= grid
    drawn += steps
    drawn[:] = drawn.round()
    drawn += whole
    drawn += 0.0
    drawn *= grid
