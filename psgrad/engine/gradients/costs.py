"""The cost of work on a machine: its measured constants, and the seconds of products, passes over memory and
convolutions; and the costs of the orders of contraction to squared norms.

The model is a roofline with corrections (Williams, Waterman and Patterson, "Roofline: An Insightful Visual
Performance Model for Multicore Architectures", 2009). The time of a matrix product is the sum of its
floating-point operations at the rate of its thin axes, the transfer of its operands, and a constant for each
matrix of a batch. All other operators take the time of their bytes. Each kernel call has a constant cost.

A price is an estimate. The choices that follow from it change the speed and the last digits of a result,
nothing else.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from psgrad.engine.transforms.rules.convolution_weights import Geometry, padded_sides

# Reading memory that was read before is at least as fast as for a result of this many bytes.
_CACHES = 1 << 24
# Sizes at which the rate of thin matrices is measured; from the last on the rate is that of large matrices.
THIN_SIZES = (1, 4, 16, 64, 256)


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
        name: which device it is, in words.
        origin: where the constants come from: 'measured', 'built in', or a file.
        product: dtype -> operations a second of a large matrix product.
        thin_rows, thin_columns, thin_inner: the share of that rate where this axis is 1, 4, 16, 64, 256 long
            and the others are large.
        matrix_seconds: of one more small matrix in a batched product.
        stream: (bytes of the result, bytes moved a second) of an elementwise product into fresh memory, by
            rising size.
        scattered: bytes moved a second by kernels with an index (gathers, scatters, pooling, sorting).
        transcendental: results a second of exponentials and similar functions.
        pooling: places a second of the larger side of a pooling window's pass.
        convolution: share of the product rate that a convolution reaches; grouped_convolution: with the
            samples as its groups.
        attention: share of the product rate that fused attention reaches.
        call_seconds: of one kernel on very small tensors.
        operator_seconds: of the Python code of one operator in the transforms, in both passes, if a pass is
            not replayed.
        kernel_seconds: of the Python code around one kernel, likewise.
        asynchronous: whether calls return before their kernels are done, so that Python and kernels overlap.
    """

    name: str
    origin: str
    product: Mapping[str, float]
    thin_rows: tuple[float, ...]
    thin_columns: tuple[float, ...]
    thin_inner: tuple[float, ...]
    matrix_seconds: float
    stream: tuple[tuple[float, float], ...]
    scattered: float
    transcendental: float
    pooling: float
    convolution: float
    grouped_convolution: float
    attention: float
    call_seconds: float
    operator_seconds: float
    kernel_seconds: float
    asynchronous: bool = False

    def product_rate(self, dtype: torch.dtype) -> float:
        """Operations a second of a large matrix product; for a type that was not measured, float32's scaled
        by the width of the type.
        """
        name = str(dtype).removeprefix("torch.")
        if name in self.product:
            return self.product[name]
        return self.product["float32"] / max(1.0, dtype.itemsize / 4)

    def matmul_seconds(self, batch: int, rows: int, columns: int, inner: int, dtype: torch.dtype) -> float:
        """A batch of products [rows, inner] x [inner, columns]."""
        operations = 2.0 * batch * rows * columns * inner
        if not operations:
            return self.call_seconds
        share = math.prod(
            _interpolated(THIN_SIZES, shares, size)
            for shares, size in (
                (self.thin_rows, rows),
                (self.thin_columns, columns),
                (self.thin_inner, inner),
            )
        )
        moved = batch * (rows * columns + rows * inner + inner * columns) * dtype.itemsize
        result_bytes = batch * rows * columns * dtype.itemsize
        compute = operations / (self.product_rate(dtype) * share)
        return (
            self.call_seconds
            + (batch - 1) * self.matrix_seconds
            + compute
            + moved / self.bandwidth(max(result_bytes, min(moved, _CACHES)))
        )

    def stream_seconds(self, moved: float, result: float | None = None) -> float:
        """The time of a kernel that reads and writes `moved` bytes. result: the bytes of its result; a third
        of `moved` if not given.
        """
        return self.call_seconds + moved / self.bandwidth(
            moved / 3 if result is None else max(result, min(moved, _CACHES))
        )

    def scattered_seconds(self, moved: float) -> float:
        """The time of a kernel that moves `moved` bytes to or from places given by an index."""
        return self.call_seconds + moved / self.scattered

    def transcendental_seconds(self, elements: float, moved: float) -> float:
        """The time of a kernel that takes an exponential or a similar function of each element."""
        return self.call_seconds + max(elements / self.transcendental, moved / self.bandwidth(moved / 2))

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

    def attention_seconds(self, operations: float, moved: float, dtype: torch.dtype) -> float:
        """The time of fused attention, or its derivative, of this many operations."""
        return self.call_seconds + max(
            operations / (self.product_rate(dtype) * self.attention), moved / self.bandwidth(moved / 4)
        )

    def bandwidth(self, result: float) -> float:
        """Bytes moved a second by a kernel whose result has this many bytes."""
        sizes, rates = zip(*self.stream, strict=True)
        return _interpolated(sizes, rates, result)

    def to_json(self) -> dict[str, Any]:
        """The constants as plain values, which `machine_of` reads."""
        return dataclasses.asdict(self)


def machine_of(values: Mapping[str, Any], origin: str) -> Machine:
    """A machine from plain values (of a JSON file). Raises ValueError for a missing or unknown key, and for a
    value that is not a positive number.
    """
    fields = {field.name for field in dataclasses.fields(Machine)}
    if unknown := sorted(set(values) - fields):
        raise ValueError(f"unknown key {unknown[0]!r}")
    if missing := sorted(fields - set(values) - {"origin", "asynchronous"}):
        raise ValueError(f"{missing[0]!r} is missing")
    taken: dict[str, Any] = {**values, "origin": origin}
    for name in ("thin_rows", "thin_columns", "thin_inner"):
        taken[name] = tuple(_positive(name, share) for share in taken[name])
        if len(taken[name]) != len(THIN_SIZES):
            raise ValueError(
                f"{name!r} has {len(taken[name])} shares, expected {len(THIN_SIZES)}, for the sizes"
                f" {THIN_SIZES}"
            )
    taken["stream"] = tuple(
        sorted((_positive("stream", size), _positive("stream", rate)) for size, rate in taken["stream"])
    )
    taken["product"] = {
        str(dtype): _positive("product", rate) for dtype, rate in dict(taken["product"]).items()
    }
    if "float32" not in taken["product"] or not taken["stream"]:
        raise ValueError("'product' needs a rate for float32, and 'stream' at least one")
    for name in fields - {
        "name",
        "origin",
        "product",
        "thin_rows",
        "thin_columns",
        "thin_inner",
        "stream",
        "asynchronous",
    }:
        taken[name] = _positive(name, taken[name])
    return Machine(**taken)


def _positive(name: str, value: Any) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
        or value <= 0
    ):
        raise ValueError(f"{name!r} holds {value!r}, expected numbers above zero")
    return float(value)


def _interpolated(sizes: tuple[float, ...], values: tuple[float, ...], size: float) -> float:
    """The value at a size, along straight lines in both logarithms; the first and the last hold
    beyond them.
    """
    place = bisect.bisect_left(sizes, size)
    if place == 0:
        return values[0]
    if place == len(sizes):
        return values[-1]
    share = math.log(size / sizes[place - 1]) / math.log(sizes[place] / sizes[place - 1])
    return values[place - 1] * (values[place] / values[place - 1]) ** share


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
