"""A convolution's weight gradient, without its patches."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from psgrad.engine.gradients.costs import Cost, Machine, cheapest
from psgrad.engine.gradients.machine import machine
from psgrad.engine.gradients.terms.base import (
    Term,
    accumulating,
    accumulating_dtype,
    block_bytes,
    blocks,
    joined,
    norms_at_least,
    rows_of,
    square_norm,
    sum_of_products,
    sums_of_grams,
)
from psgrad.engine.gradients.terms.product import Product
from psgrad.engine.transforms.rules.convolution import (
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


class Sizes(NamedTuple):
    """What a convolution's gradient costs follows from these: of one group where there are several."""

    groups: int
    places: int  # of the kernel
    steps: int  # along all axes of the kernel together
    positions: int  # of the output, inner batch included
    pixels: int  # of the padded input, likewise
    rows: int
    columns: int  # at each place of the kernel


@dataclass(frozen=True)
class Convolution(Term):
    """A convolution's weight gradient: a product over output positions of cotangents with patches that are
    not written out.
    """

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
        return Convolution(
            rows_of(self.cotangents, samples).to(kind),
            rows_of(self.inputs, samples).to(kind),
            self.weight_shape,
            self.geometry,
        )

    def as_product(self) -> Product:
        """The same gradient with its patches written out, [n, g, t, columns]."""
        patches, cotangents = as_matrices(self.cotangents, self.inputs, self.weight_shape, self.geometry)
        return Product(cotangents, patches)

    def _sizes(self) -> Sizes:
        return _sizes(
            self.cotangents.shape[1:],
            self.inputs.shape[1:],
            self.weight_shape,
            Geometry.of(self.geometry, self.inputs.dim() - 3),
        )

    def ways(self) -> dict[str, Cost]:
        """Gram matrices of p pixels and t positions cost p*p*columns + t*t*rows a group and one addition of
        p*p for each step along an axis of the kernel; writing the value out t*rows*columns for each of its
        places.
        """
        grouped = grouped_kernel_is_fast(self.cotangents, self.weight_shape, self.geometry)
        return _norm_ways(
            machine(self.device),
            self._sizes(),
            accumulating_dtype(self.dtype),
            grouped,
            block_bytes(self.device),
        )

    def way(self) -> str:
        on, kind = machine(self.device), accumulating_dtype(self.dtype)
        grouped = grouped_kernel_is_fast(self.cotangents, self.weight_shape, self.geometry)
        return _cheapest_way(on, self._sizes(), kind, grouped, block_bytes(self.device))

    def _blocks(self) -> Iterator[slice]:
        """Samples whose weight gradients, and patches where they have to be written out, fit a block."""
        elements = math.prod(self.weight_shape)
        if writes_patches(self.cotangents, self.weight_shape, self.geometry):
            sizes = self._sizes()
            elements = max(elements, sizes.positions * sizes.places * sizes.columns * sizes.groups)
        return blocks(self.samples, elements * max(self.dtype.itemsize, 4), self.device)

    def square_norms(self) -> torch.Tensor:
        if self.way() == "materialise":
            return self.materialised_square_norms()
        kind = accumulating_dtype(self.dtype)
        parts = []
        for block in blocks(self.samples, self.ways()["gram"].bytes, self.device):
            some = self.at(block, kind)
            cotangents, patches = grams(some.cotangents, some.inputs, self.weight_shape, self.geometry)
            parts.append(sums_of_grams(some, cotangents, patches, self.geometry.groups))
        return joined(parts, self)

    def materialised_square_norms(self) -> torch.Tensor:
        kind = accumulating_dtype(self.dtype)
        some = self if kind == self.dtype else self.at(slice(None), kind)
        if some._in_one_product:
            return joined([square_norm(part) for part in some._written_out()], some)
        total = torch.zeros(self.samples, dtype=kind, device=self.device)
        for _, part in shifted(some.cotangents, some.inputs, self.weight_shape, self.geometry):
            total += square_norm(part)
        return total

    @property
    def _in_one_product(self) -> bool:
        """Whether all places of the kernel come out of one kernel or product, not one after the other."""
        written = self.cotangents, self.weight_shape, self.geometry
        return grouped_kernel_is_fast(*written) or writes_patches(*written)

    def _written_out(self) -> Iterator[torch.Tensor]:
        """[k, *shape] for one block of samples after the other."""
        for block in self._blocks():
            whole = block == slice(0, self.samples)
            cotangents, inputs = (
                (self.cotangents, self.inputs) if whole else (self.cotangents[block], self.inputs[block])
            )
            yield weight_gradients(cotangents, inputs, self.weight_shape, self.geometry)

    @property
    def summands(self) -> int:
        return self._sizes().positions

    def absolute_sums(self) -> torch.Tensor:
        """By Cauchy and Schwarz over positions; a pixel is in at most as many patches as the kernel has
        places.
        """
        norms = [norms_at_least(factor.flatten(1), 1) for factor in (self.cotangents, self.inputs)]
        return norms[0] * norms[1] * math.sqrt(self._sizes().places)

    def materialise(self) -> torch.Tensor:
        return joined(list(self._written_out()), self, self.weight_shape)

    def weighted_sum(self, weights: torch.Tensor) -> torch.Tensor:
        g, x = accumulating(self.cotangents), accumulating(self.inputs)
        g = g * weights.reshape(-1, *(1,) * (g.dim() - 1)).to(g.dtype)
        shape_only = torch.empty((), dtype=g.dtype, device=g.device).expand(self.weight_shape)
        return aten.convolution_backward.default(
            g.flatten(0, 1), x.flatten(0, 1), shape_only, [0], *self.geometry, [False, True, False]
        )[1]

    def dot(self, vector: torch.Tensor) -> torch.Tensor:
        g, x = accumulating(self.cotangents), accumulating(self.inputs)
        moved = aten.convolution.default(x.flatten(0, 1), vector.to(x.dtype), None, *self.geometry)
        return sum_of_products(moved.reshape(g.shape), g)

    def scaled(self, factor: float) -> Convolution:
        return Convolution(self.cotangents * factor, self.inputs, self.weight_shape, self.geometry)

    def kin(self) -> tuple[Any, ...]:
        return Convolution, self.shape, self.geometry, self.inputs.shape[2:], self.cotangents.shape[2:]

    def plus(self, others: Sequence[Convolution]) -> Convolution:
        every = (self, *others)
        cotangents, inputs = (
            torch.cat([term.cotangents for term in every], 1),
            torch.cat([term.inputs for term in every], 1),
        )
        return Convolution(cotangents, inputs, self.weight_shape, self.geometry)


@functools.lru_cache(maxsize=4096)
def _sizes(cotangents: torch.Size, inputs: torch.Size, weight: torch.Size, geometry: Geometry) -> Sizes:
    """From the shapes of one sample, [b, channels, *]."""
    narrow, wide = (inputs, cotangents) if geometry.transposed else (cotangents, inputs)
    sides = padded_sides(wide[2:], weight[2:], narrow[2:], geometry)
    kernel, groups = weight[2:], geometry.groups
    positions, pixels = narrow[0] * narrow[2:].numel(), narrow[0] * math.prod(sides)
    return Sizes(groups, kernel.numel(), sum(kernel), positions, pixels, weight[0] // groups, weight[1])


@functools.lru_cache(maxsize=4096)
def _norm_ways(on: Machine, sizes: Sizes, dtype: torch.dtype, grouped: bool, block: int) -> dict[str, Cost]:
    """The ways to a convolution's squared norms."""
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
        written = on.convolution_seconds(2.0 * m * positions * value / item, m * moved, dtype, grouped=True)
    else:
        written = places * on.matmul_seconds(m * groups, rows, columns, positions, dtype)
    written += on.stream_seconds(m * value, m * value)
    return {"gram": Cost(by_grams / n, grams), "materialise": Cost(written / m, value)}


@functools.lru_cache(maxsize=4096)
def _cheapest_way(on: Machine, sizes: Sizes, dtype: torch.dtype, grouped: bool, block: int) -> str:
    return cheapest(_norm_ways(on, sizes, dtype, grouped, block), block)
