"""The costs of the orders of contraction to the squared norms of a convolution's weight gradient."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

from psgrad.engine.gradients.costs import Cost, Machine, cheapest
from psgrad.engine.transforms.rules.convolution_weights import Geometry, padded_sides


class Sizes(NamedTuple):
    """The sizes on which a convolution's cost depends: of one group if there are several."""

    groups: int
    places: int  # of the kernel
    steps: int  # along all axes of the kernel together
    positions: int  # of the output, inner batch included
    pixels: int  # of the padded input, likewise
    rows: int
    columns: int  # at each place of the kernel


@functools.lru_cache(maxsize=4096)
def sizes_of(cotangents: torch.Size, inputs: torch.Size, weight: torch.Size, geometry: Geometry) -> Sizes:
    """The sizes of a convolution, from the shapes of one sample, [b, channels, *]."""
    narrow, wide = (inputs, cotangents) if geometry.transposed else (cotangents, inputs)
    sides = padded_sides(wide[2:], weight[2:], narrow[2:], geometry)
    kernel, groups = weight[2:], geometry.groups
    positions, pixels = narrow[0] * narrow[2:].numel(), narrow[0] * math.prod(sides)
    return Sizes(groups, kernel.numel(), sum(kernel), positions, pixels, weight[0] // groups, weight[1])


@functools.lru_cache(maxsize=4096)
def convolution_order_costs(
    on: Machine, sizes: Sizes, dtype: torch.dtype, grouped: bool, block: int
) -> dict[str, Cost]:
    """The costs of 'gram' and 'materialise' (see Convolution.order_costs)."""
    groups, places, steps, positions, pixels, rows, columns = sizes
    item = dtype.itemsize
    grams, value = groups * (pixels**2 + 2 * positions**2) * item, groups * rows * columns * places * item
    n = max(1, block // grams)
    by_grams = on.matmul_seconds(n * groups, pixels, pixels, columns, dtype) + on.matmul_seconds(
        n * groups, positions, positions, rows, dtype
    )
    by_grams += on.stream_seconds(3 * steps * n * groups * pixels**2 * item, n * grams) + on.stream_seconds(
        2 * n * grams, n * grams
    )
    m = max(1, block // value)
    if grouped:
        moved = groups * (positions * rows + pixels * columns) * item + value
        by_value = on.convolution_seconds(2.0 * m * positions * value / item, m * moved, dtype, grouped=True)
    else:
        by_value = places * on.matmul_seconds(m * groups, rows, columns, positions, dtype)
    by_value += on.stream_seconds(m * value, m * value)
    return {"gram": Cost(by_grams / n, grams), "materialise": Cost(by_value / m, value)}


@functools.lru_cache(maxsize=4096)
def cheapest_convolution_order(
    on: Machine, sizes: Sizes, dtype: torch.dtype, grouped: bool, block: int
) -> str:
    """The name of the cheapest order whose intermediates of one sample fit a block."""
    return cheapest(convolution_order_costs(on, sizes, dtype, grouped, block), block)
