"""Noise without rounding errors: the discrete Gaussian, drawn exactly, and the grid that records are rounded
to.

A sum of integer vectors plus independent discrete Gaussian noise N_Z(0, sigma^2) is private by integers
alone: no value is likelier with a record than without it because of how floating-point numbers lie (Mironov
2012; Haney et al. 2022, arXiv 2207.13793).

The sampler is that of Canonne, Kamath and Steinke ("The Discrete Gaussian for Differential Privacy", 2020,
algorithm 3): a discrete Laplace variable Y with scale t = floor(sigma) + 1, kept with probability exp(-(|Y| -
sigma^2 / t)^2 / (2 sigma^2)). Both steps compare an exponential variable E = -ln U, U uniform on (0, 1), with
numbers: |Y| is floor(t E), which has P(|Y| >= y) = exp(-y / t), and Y is kept where another E is above the
exponent. The first 64 bits of U, in floating point with a bound of the error, nearly always decide that;
where they don't, decimal arithmetic with correctly rounded logarithms does, with as many further bits of U as
it takes. So what comes out has exactly the distribution, given uniform bits. It does not come out in constant
time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import ROUND_FLOOR, Context, Decimal
from fractions import Fraction
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from psgrad.engine.privacy.generators import Generator
from psgrad.errors import ConfigError

LARGEST_SIGMA, SMALLEST_SIGMA = 2.0**44, 2.0**-30
"""In steps of the grid. Up to it noise is below 2^51, whatever 128 bits are drawn; 64 of them leave open one
draw in ten at the largest, one in two hundred at 10^12, and one in ten thousand at 2^31, which is what
`default_grid` makes of a bound.
"""
LARGEST_BOUND = 2.0**31
"""A record's norm in steps of the grid, at most: the sum of 2^31 records fits in 62 bits."""

# Draws that are tried at a time: their temporaries stay in the cache.
_TRIED = 1 << 15
# How far floating point may be off before an exact comparison is made, and the prefixes of U that are too
# short to be used with it.
# |Y|: a prefix k of 64 bits, at least 2^50, leaves ln U open by 1 / k <= 2^-50, and its rounding by 2^-53;
# together 2 units. The logarithm (three units in its last place, where libraries promise one) and the product
# are off by E units at most.
_SHORT_SIZE, _UNIT = 1 << 50, 2.0**-50
# The exponent: a prefix of 63 bits, at least 2^40, leaves 2^-40; the exponent itself is off by less than
# 2^-46 below 17, where E is.
_SHORT_KEEP, _OFF_KEEP = 1 << 40, 2.0**-38
# The share of the bound that rounding to the grid may cost.
_COST = 1e-3
# The margin for the rounding of the division by the grid, and of the norm, in float64.
_KEPT = 1 - 2.0**-40


def default_grid(bound: float, dimensions: int) -> float:
    """The step of a grid for records of norm at most `bound` in `dimensions` coordinates: a power of two,
    2^-31 to 2^-30 of the bound.

    It is as fine as sums of 2^31 records in 64 bits allow, so that the bound loses sqrt(dimensions) * 2^-31
    of itself at most. Raises ConfigError where that is more than a thousandth (from some 10^12 coordinates
    on).
    """
    grid = 2.0 ** math.ceil(math.log2(bound / LARGEST_BOUND))
    if math.sqrt(dimensions) * grid / 2 > _COST * bound:
        raise ConfigError(
            f"{dimensions} coordinates on a grid cost more than a thousandth of the clipping norm {bound:g}",
            expected="fewer coordinates, as each may move by half a step when it is rounded",
            next_step="train fewer parameters, or take mechanism: gaussian",
        )
    return grid


def tightened(bound: float, dimensions: int, grid: float) -> float:
    """The bound to clip to so that the norm is at most `bound` after rounding to the grid: about bound -
    sqrt(dimensions) * grid / 2.

    Raises ConfigError for a grid that is so coarse that nothing is left, or so fine that a sum of 2^31
    records may not fit in 64 bits.
    """
    if bound > LARGEST_BOUND * grid:
        raise ConfigError(
            f"the grid {grid:g} is too fine for the clipping norm {bound:g}: sums may not fit in 64 bits",
            expected=f"a grid of at least {bound / LARGEST_BOUND:g}",
            next_step="leave the grid out, and one is chosen",
        )
    left = (bound - math.sqrt(dimensions) * grid / 2) * _KEPT
    if left <= 0:
        raise ConfigError(
            f"the grid {grid:g} is too coarse for the clipping norm {bound:g} in {dimensions} coordinates:"
            " rounding alone may exceed it",
            expected=f"a grid below {2 * bound / math.sqrt(dimensions):g}",
            next_step="leave the grid out, and one is chosen",
        )
    return left


def round_to_grid(gradient: Tensor, grid: float) -> Tensor:
    """A clipped gradient of any shape in steps of the grid: int64 of the same shape, each coordinate the
    nearest multiple (of two, the even one).

    Coordinates that are not finite give 0: a record with such a gradient has the factor 0, and 0 times
    infinity is not a number.
    """
    return (
        torch.nan_to_num(gradient.double() / grid, nan=0.0, posinf=0.0, neginf=0.0).round_().to(torch.int64)
    )


def discrete_gaussian(count: int, sigma: float, generator: Generator) -> np.ndarray:
    """Independent integers x with P(x) proportional to exp(-x^2 / (2 sigma^2)): int64 [count].

    Raises ConfigError where sigma is not from 2^-30 to 2^40.
    """
    if not SMALLEST_SIGMA <= sigma <= LARGEST_SIGMA:
        raise ConfigError(
            f"discrete noise of standard deviation {sigma:g}, in steps of the grid, was asked for",
            expected=f"from {SMALLEST_SIGMA:.2g} to {LARGEST_SIGMA:.2g} steps",
            next_step=(
                f"take a {'coarser' if sigma > 1 else 'finer'} grid, or leave the grid out, and one is chosen"
            ),
        )
    out = np.empty(count, dtype=np.int64)
    done = 0
    while done < count:
        # One or two in three are kept where sigma is large, fewer where it is small.
        accepted = _kept(min(_TRIED, 2 * (count - done) + 8), sigma, generator)[: count - done]
        out[done : done + len(accepted)] = accepted
        done += len(accepted)
    return out


def _kept(tried: int, sigma: float, generator: Generator) -> np.ndarray:
    """The accepted ones of `tried` discrete Laplace variables: int64."""
    scale = math.floor(sigma) + 1
    bits = generator.uint64(2 * tried)
    size, settled = bits[:tried], bits[tried:]
    # |Y| = floor(t E)
    real = np.log(size.astype(np.float64) * 2.0**-64, where=size > 0, out=np.zeros(tried)) * -float(scale)
    absolute = np.floor(real)
    open_ones = (size < _SHORT_SIZE) | (np.abs(real - np.rint(real)) <= (real + 2 * scale) * _UNIT)
    for place in np.flatnonzero(open_ones):
        absolute[place] = exact_floor(int(size[place]), 64, scale, generator)
    # Kept where E is above the exponent; one bit is the sign.
    negative, prefix = (settled & np.uint64(1)).astype(bool), settled >> np.uint64(1)
    exponential = -np.log(prefix.astype(np.float64) * 2.0**-63, where=prefix > 0, out=np.zeros(tried))
    exponent = (absolute - sigma * sigma / scale) ** 2 / (2 * sigma * sigma)
    keep = exponential > exponent
    open_ones = (prefix < _SHORT_KEEP) | (np.abs(exponential - exponent) <= _OFF_KEEP)
    for place in np.flatnonzero(open_ones):
        keep[place] = exact_exceeds(int(prefix[place]), 63, _exponent(int(absolute[place]), sigma), generator)
    keep &= ~(negative & (absolute == 0))  # zero has one sign
    return np.where(negative, -absolute, absolute)[keep].astype(np.int64)


def _exponent(absolute: int, sigma: float) -> Fraction:
    """(|y| - sigma^2 / t)^2 / (2 sigma^2), without rounding."""
    square = Fraction(sigma) ** 2
    return (absolute - square / (math.floor(sigma) + 1)) ** 2 / (2 * square)


_Found = TypeVar("_Found")


def exact_floor(prefix: int, bits: int, scale: int, generator: Generator) -> int:
    """floor(scale * E) for E = -ln U, where the first `bits` bits of U are `prefix` and the generator has the
    others.
    """

    def decide(low: Decimal, high: Decimal, context: Context) -> int | None:
        floors = {
            int(context.multiply(end, Decimal(scale)).to_integral_value(ROUND_FLOOR))
            for end in (low, high)
            if end.is_finite()
        }
        return floors.pop() if high.is_finite() and len(floors) == 1 else None

    return _refine(prefix, bits, decide, generator)


def exact_exceeds(prefix: int, bits: int, bound: Fraction, generator: Generator) -> bool:
    """Whether E > bound for E = -ln U, where the first `bits` bits of U are `prefix` and the generator has
    the others.
    """

    def decide(low: Decimal, high: Decimal, context: Context) -> bool | None:
        # low and high are compared with the bound itself: a finite decimal is a fraction.
        if Fraction(low) > bound:
            return True
        return False if high.is_finite() and Fraction(high) < bound else None

    return _refine(prefix, bits, decide, generator)


def _refine(
    prefix: int, bits: int, decide: Callable[[Decimal, Decimal, Context], _Found | None], generator: Generator
) -> _Found:
    """The first result of `decide` that is not None for bounds of E = -ln U, which are refined by 64 bits of
    U at a time.

    U is between k / 2^bits and (k + 1) / 2^bits, so that E is at least -ln of the latter, and at most 1 / k
    more than that. The logarithm and the quotients round correctly (libmpdec), so that each is off by less
    than 10^(1 - digits) of 1 + its size; the margin is a thousand times that, and covers a further product.
    """
    while True:
        context = Context(prec=20 + bits // 3)
        low = context.minus(context.ln(context.divide(Decimal(prefix + 1), Decimal(1 << bits))))
        margin = context.scaleb(context.add(low, Decimal(2)), 4 - context.prec)
        wide = context.divide(Decimal(1), Decimal(prefix)) if prefix else Decimal("Infinity")
        high = context.add(context.add(low, wide), margin)
        decision = decide(context.max(context.subtract(low, margin), Decimal(0)), high, context)
        if decision is not None:
            return decision
        prefix, bits = (prefix << 64) | int(generator.uint64(1)[0]), bits + 64
