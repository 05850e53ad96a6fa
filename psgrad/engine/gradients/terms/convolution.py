"""A convolution's weight gradient, without its patches."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from psgrad.engine.gradients.costs import Cost, Machine
from psgrad.engine.gradients.machines import machine
from psgrad.engine.gradients.terms.base import (
    Term,
    accumulating,
    accumulating_dtype,
    block_bytes,
    blocks,
    joined,
    square_norm,
    sum_of_products,
    sums_of_grams,
)
from psgrad.engine.gradients.terms.product import Product
from psgrad.engine.transforms.rules.windows import (
    Geometry,
    as_matrices,
    grams,
    grouped_kernel_is_fast,
    padded_sides,
    shifted,
    weight_gradients,
    writes_patches,
)

aten = torch.ops.aten


@dataclass(frozen=True)
class Convolution(Term):
    """A convolution's weight gradient: a product over output positions of cotangents with patches that are not written out."""

    cotangents: torch.Tensor  # [n, b, o, *out]
    inputs: torch.Tensor  # [n, b, i, *in]
    weight_shape: torch.Size
    geometry: Geometry

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        return tuple(self.weight_shape)

    @property
    def factors(self) -> tuple[torch.Tensor, ...]:
        return (self.cotangents, self.inputs)

    def at(self, samples: slice | torch.Tensor, dtype: torch.dtype | None = None) -> Convolution:
        kind = dtype or self.dtype
        return Convolution(self.cotangents[samples].to(kind), self.inputs[samples].to(kind), self.weight_shape, self.geometry)

    def as_product(self) -> Product:
        """The same gradient with its patches written out, [n, g, t, columns]."""
        patches, cotangents = as_matrices(self.cotangents, self.inputs, self.weight_shape, self.geometry)
        return Product(cotangents, patches)

    def _sizes(self) -> tuple[int, int, int]:
        """(places of the kernel, positions, pixels of the padded input), inner batch included."""
        narrow, wide = (self.inputs, self.cotangents) if self.geometry.transposed else (self.cotangents, self.inputs)
        inner, positions = narrow.shape[1], narrow.shape[3:]
        reach = padded_sides(wide.shape[3:], self.weight_shape[2:], positions, self.geometry)
        return math.prod(self.weight_shape[2:]), inner * math.prod(positions), inner * math.prod(reach)

    def ways(self) -> dict[str, Cost]:
        """Gram matrices of p pixels and t positions cost p*p*columns + t*t*rows a group and one addition of p*p for each step along an
        axis of the kernel; writing the value out t*rows*columns for each of its places."""
        places, positions, pixels = self._sizes()
        grouped = grouped_kernel_is_fast(self.cotangents, self.weight_shape, self.geometry)
        sizes = self.geometry.groups, places, sum(self.weight_shape[2:]), positions, pixels, *self.weight_shape[:2]
        return _norm_ways(machine(self.device), *sizes, accumulating_dtype(self.dtype), grouped, block_bytes(self.device))

    def _blocks(self) -> Iterator[slice]:
        """Samples whose weight gradients, and patches where they have to be written out, fit a block."""
        elements = math.prod(self.weight_shape)
        if writes_patches(self.cotangents, self.weight_shape, self.geometry):
            places, positions, _ = self._sizes()
            elements = max(elements, positions * places * self.weight_shape[1] * self.geometry.groups)
        return blocks(self.samples, elements * max(self.dtype.itemsize, 4), self.device)

    def square_norms(self) -> torch.Tensor:
        ways = self.ways()
        if self.way() == "materialise":
            return self.materialised_square_norms()
        kind = accumulating_dtype(self.dtype)
        parts = []
        for block in blocks(self.samples, ways["gram"].bytes, self.device):
            some = self.at(block, kind)
            cotangents, patches = grams(some.cotangents, some.inputs, self.weight_shape, self.geometry)
            parts.append(sums_of_grams(some, cotangents, patches, self.geometry.groups))
        return joined(parts, self)

    def materialised_square_norms(self) -> torch.Tensor:
        kind = accumulating_dtype(self.dtype)
        if grouped_kernel_is_fast(self.cotangents, self.weight_shape, self.geometry) or writes_patches(
            self.cotangents, self.weight_shape, self.geometry
        ):
            return super().materialised_square_norms()
        some = self.at(slice(None), kind)
        total = torch.zeros(self.samples, dtype=kind, device=self.device)
        for _, part in shifted(some.cotangents, some.inputs, self.weight_shape, self.geometry):
            total += square_norm(part)
        return total

    def materialise(self) -> torch.Tensor:
        parts = [weight_gradients(self.cotangents[block], self.inputs[block], self.weight_shape, self.geometry) for block in self._blocks()]
        return joined(parts, self, self.weight_shape)

    def weighted_sum(self, weights: torch.Tensor) -> torch.Tensor:
        g, x = accumulating(self.cotangents), accumulating(self.inputs)
        g = g * weights.reshape(-1, *(1,) * (g.dim() - 1)).to(g.dtype)
        shape_only = torch.empty((), dtype=g.dtype, device=g.device).expand(self.weight_shape)
        return aten.convolution_backward.default(g.flatten(0, 1), x.flatten(0, 1), shape_only, [0], *self.geometry, [False, True, False])[1]

    def dot(self, vector: torch.Tensor) -> torch.Tensor:
        g, x = accumulating(self.cotangents), accumulating(self.inputs)
        moved = aten.convolution.default(x.flatten(0, 1), vector.to(x.dtype), None, *self.geometry)
        return sum_of_products(moved.reshape(g.shape), g)

    def scaled(self, factor: float) -> Convolution:
        return Convolution(self.cotangents * factor, self.inputs, self.weight_shape, self.geometry)

    def kin(self) -> tuple[Any, ...]:
        geometry = tuple(tuple(each) if isinstance(each, (list, tuple)) else each for each in self.geometry)
        return Convolution, self.shape, geometry, self.inputs.shape[2:], self.cotangents.shape[2:]

    def plus(self, others: Sequence[Convolution]) -> Convolution:
        every = (self, *others)
        cotangents, inputs = torch.cat([term.cotangents for term in every], 1), torch.cat([term.inputs for term in every], 1)
        return Convolution(cotangents, inputs, self.weight_shape, self.geometry)


@functools.lru_cache(maxsize=4096)
def _norm_ways(
    on: Machine,
    groups: int,
    places: int,
    steps: int,
    positions: int,
    pixels: int,
    rows: int,
    columns: int,
    dtype: torch.dtype,
    grouped: bool,
    block: int,
) -> dict[str, Cost]:
    """The ways to a convolution's squared norms: `places` of the kernel, `steps` along all its axes together, `rows` of all groups."""
    item, each = dtype.itemsize, rows // groups
    grams, value = groups * (pixels**2 + 2 * positions**2) * item, rows * columns * places * item
    n = max(1, block // grams)
    by_grams = on.matmul_seconds(n * groups, pixels, pixels, columns, dtype) + on.matmul_seconds(
        n * groups, positions, positions, each, dtype
    )
    by_grams += on.stream_seconds(3 * steps * n * groups * pixels**2 * item, n * grams) + on.stream_seconds(2 * n * grams, n * grams)
    m = max(1, block // value)
    if grouped:
        moved = (positions * rows + pixels * columns * groups) * item + value
        written = on.convolution_seconds(2.0 * m * positions * rows * columns * places, m * moved, dtype, grouped=True)
    else:
        written = places * on.matmul_seconds(m * groups, each, columns, positions, dtype)
    written += on.stream_seconds(m * value, m * value)
    return {"gram": Cost(by_grams / n, grams), "materialise": Cost(written / m, value)}
