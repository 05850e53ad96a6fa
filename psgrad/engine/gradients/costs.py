"""The cost of work on a device, from a few constants, and the costs of the orders of contraction to squared
norms.

The model is a roofline (Williams, Waterman and Patterson, "Roofline: An Insightful Visual Performance Model
for Multicore Architectures", 2009), where a thin matrix is worked off at a lower rate. The time of a matrix
product is the sum of its floating-point operations, the transfer of its operands, and a constant for each
matrix of a batch. Each kernel call has a constant cost.

A price compares two ways of computing the same. It is not the time of a run, which `psgrad plan` measures:
the constants are those of a typical device, of this one they are right within a small factor. The choices
that follow from a price change the speed and the last digits of a result, nothing else.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from psgrad.engine.transforms.rules.convolution_weights import Geometry, padded_sides


@dataclass(frozen=True)
class Cost:
    """The cost of an order of contraction.

    Attributes:
        seconds: estimated, for one sample among many.
        bytes: the largest intermediate of one sample, beyond its factors.
    """

    seconds: float
    bytes: int


@dataclass(frozen=True, eq=False)
class Machine:
    """The constants of one device, in seconds, bytes and floating-point operations (a multiply-add is two).

    Attributes:
        product: operations a second of a large matrix product in float32; wider types take as much longer.
        halves: how many times as fast products of 16-bit numbers are.
        thin: the number of rows, or of columns, of a matrix product at which half of that rate is reached,
            the other axes being large; thin_inner: the length of the inner axis.
        matrix_seconds: of one more small matrix in a batched product.
        cached: bytes moved a second where the result has at most `cache` bytes; streamed: where it has more.
        scattered: bytes moved a second by kernels with an index (gathers, scatters, sorting).
        convolution: share of the product rate that a convolution reaches; grouped_convolution: with the
            samples as its groups.
        call_seconds: of one kernel on very small tensors.
        operator_seconds: of the Python code of one operator in the transforms, in both passes, if a pass is
            not replayed.
        kernel_seconds: of the Python code around one kernel, likewise.
    """

    product: float
    halves: float
    thin: float
    thin_inner: float
    matrix_seconds: float
    cached: float
    streamed: float
    cache: int
    scattered: float
    convolution: float
    grouped_convolution: float
    call_seconds: float
    operator_seconds: float
    kernel_seconds: float

    def product_rate(self, dtype: torch.dtype) -> float:
        """Operations a second of a large matrix product."""
        return self.product * (self.halves if dtype.itemsize == 2 else min(1.0, 4 / dtype.itemsize))

    def matmul_seconds(self, batch: int, rows: int, columns: int, inner: int, dtype: torch.dtype) -> float:
        """A batch of products [rows, inner] x [inner, columns]."""
        operations = 2.0 * batch * rows * columns * inner
        if not operations:
            return self.call_seconds
        share = rows * columns / ((rows + self.thin) * (columns + self.thin))
        share *= inner / (inner + self.thin_inner)
        moved = batch * (rows * columns + rows * inner + inner * columns) * dtype.itemsize
        return (
            self.call_seconds
            + (batch - 1) * self.matrix_seconds
            + operations / (self.product_rate(dtype) * share)
            + moved / self.bandwidth(batch * rows * columns * dtype.itemsize)
        )

    def stream_seconds(self, moved: float, result: float | None = None) -> float:
        """The time of a kernel that reads and writes `moved` bytes. result: the bytes of its result; a third
        of `moved` if not given.
        """
        return self.call_seconds + moved / self.bandwidth(moved / 3 if result is None else result)

    def scattered_seconds(self, moved: float) -> float:
        """The time of a kernel that moves `moved` bytes to or from places given by an index."""
        return self.call_seconds + moved / self.scattered

    def convolution_seconds(
        self, operations: float, moved: float, dtype: torch.dtype, *, grouped: bool = False
    ) -> float:
        """The time of a convolution, or one of its derivatives, of this many operations."""
        share = self.grouped_convolution if grouped else self.convolution
        # its memory traffic comes before and after: libraries copy operands to another layout
        return (
            self.call_seconds
            + operations / (self.product_rate(dtype) * share)
            + moved / self.bandwidth(moved / 4)
        )

    def bandwidth(self, result: float) -> float:
        """Bytes moved a second by a kernel whose result has this many bytes."""
        return self.cached if result <= self.cache else self.streamed


# The assumed number of samples in a block, if as many fit. They share the constant cost of a block.
_TYPICAL_SAMPLES = 32
# The number of small kernels of one block without their own price: slices, diagonals, comparisons.
_GRAM_CALLS = 14
_VALUE_CALLS = 6


@functools.lru_cache(maxsize=4096)
def norm_order_costs(
    on: Machine, groups: int, positions: int, rows: int, columns: int, dtype: torch.dtype, block: int
) -> dict[str, Cost]:
    """The costs of the orders of contraction to the squared norm of a sum over positions of outer products,
    in each of some groups.

    'gram': the Gram matrices of both factors, t*t*(a+b) multiply-adds a group, multiplied and summed.
    'materialise': the value, t*a*b multiply-adds, and one pass over it. 'outer product', for at most one
    position: a product of two norms.

    block: the bytes of intermediates of one block of samples.
    """
    item, small = dtype.itemsize, on.call_seconds + on.kernel_seconds
    if positions <= 1:
        return {
            "outer product": Cost(
                on.stream_seconds(_TYPICAL_SAMPLES * groups * (rows + columns) * item) / _TYPICAL_SAMPLES, 0
            )
        }
    grams, value = 2 * groups * positions**2 * item, groups * rows * columns * item
    n = max(1, min(_TYPICAL_SAMPLES, block // grams))
    by_grams = sum(
        on.matmul_seconds(n * groups, positions, positions, inner, dtype) for inner in (rows, columns)
    )
    by_grams += (
        on.stream_seconds(n * grams * 3 / 2, n * grams / 2)
        + on.stream_seconds(n * grams / 2, n * grams / 2)
        + _GRAM_CALLS * small
    )
    costs = {"gram": Cost(by_grams / n, grams)}
    n = max(1, min(_TYPICAL_SAMPLES, block // max(1, value)))
    by_value = on.matmul_seconds(n * groups, rows, columns, positions, dtype)
    by_value += on.stream_seconds(n * value, n * value) + _VALUE_CALLS * small
    return costs | {"materialise": Cost(by_value / n, value)}


def cheapest(costs: Mapping[str, Cost], block: int) -> str:
    """The name of the fastest order of contraction among those whose intermediates of one sample fit a block
    of `block` bytes; among all if none fits.
    """
    fitting = {name: cost for name, cost in costs.items() if cost.bytes <= block} or costs
    return min(fitting, key=lambda name: fitting[name].seconds)


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
