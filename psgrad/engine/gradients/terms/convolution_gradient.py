"""The term of a convolution's weight gradient, which does not store patches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from psgrad.engine.gradients.costs import (
    Cost,
    Machine,
    Sizes,
    cheapest_convolution_order,
    convolution_order_costs,
    sizes_of,
)
from psgrad.engine.gradients.machine import machine
from psgrad.engine.gradients.terms.numerics import (
    accumulating,
    accumulating_dtype,
    block_bytes,
    blocks,
    of_one_dtype,
    square_norm,
    sum_of_products,
)
from psgrad.engine.gradients.terms.product import Product
from psgrad.engine.gradients.terms.term import Multiply, Term, joined, sums_of_grams
from psgrad.engine.transforms.rules.convolution_weights import (
    Geometry,
    as_matrices,
    grams,
    grouped_kernel_is_fast,
    materialises_patches,
    shifted,
    weight_gradients,
)

aten = torch.ops.aten


@dataclass(frozen=True)
class Convolution(Term):
    """A convolution's weight gradient: a product over output positions of cotangents with patches that are
    not materialised.
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

    def as_product(self) -> Product:
        """This gradient as a product with materialised patches [n, g, t, columns]."""
        patches, cotangents = as_matrices(self.cotangents, self.inputs, self.weight_shape, self.geometry)
        return Product(cotangents, patches)

    def _numbers(self) -> Sizes:
        return sizes_of(
            self.cotangents.shape[1:],
            self.inputs.shape[1:],
            self.weight_shape,
            Geometry.of(self.geometry, self.inputs.dim() - 3),
        )

    def order_costs(self) -> dict[str, Cost]:
        """The costs of two orders. 'gram': Gram matrices of p pixels and t positions cost p*p*columns +
        t*t*rows for each group, and one addition of p*p for each step along an axis of the kernel.
        'materialise': the value costs t*rows*columns for each place of the kernel.
        """
        grouped = grouped_kernel_is_fast(self.cotangents, self.weight_shape, self.geometry)
        return convolution_order_costs(
            machine(self.device),
            self._numbers(),
            accumulating_dtype(self.dtype),
            grouped,
            block_bytes(self.device),
        )

    def order(self) -> str:
        on, kind = machine(self.device), accumulating_dtype(self.dtype)
        grouped = grouped_kernel_is_fast(self.cotangents, self.weight_shape, self.geometry)
        return cheapest_convolution_order(on, self._numbers(), kind, grouped, block_bytes(self.device))

    def _blocks(self, kind: torch.dtype) -> Iterator[slice]:
        """Blocks of samples whose weight gradients, and patches if they are materialised, fit in memory."""
        elements = math.prod(self.weight_shape)
        if materialises_patches(self.cotangents, self.weight_shape, self.geometry):
            sizes = self._numbers()
            elements = max(elements, sizes.positions * sizes.places * sizes.columns * sizes.groups)
        return blocks(self.samples, elements * kind.itemsize, self.device)

    def square_norms(self) -> torch.Tensor:
        if self.order() == "materialise":
            return self.materialised_square_norms()
        kind = accumulating_dtype(self.dtype)
        parts = []
        for block in blocks(self.samples, self.order_costs()["gram"].bytes, self.device):
            some = self.at(block, kind)
            cotangents, patches = grams(some.cotangents, some.inputs, self.weight_shape, self.geometry)
            parts.append(sums_of_grams(some, cotangents, patches, self.geometry.groups))
        return joined(parts, self)

    def materialised_square_norms(self) -> torch.Tensor:
        kind = accumulating_dtype(self.dtype)
        some = self if kind == self.dtype else self.at(slice(None), kind)
        if some._is_one_kernel:
            return joined([square_norm(part) for part in some._values()], some)
        total = torch.zeros(self.samples, dtype=kind, device=self.device)
        for _, part in shifted(some.cotangents, some.inputs, self.weight_shape, self.geometry):
            total += square_norm(part)
        return total

    @property
    def _is_one_kernel(self) -> bool:
        """Whether all places of the kernel are computed by one kernel or product, not one after the other."""
        arguments = self.cotangents, self.weight_shape, self.geometry
        return grouped_kernel_is_fast(*arguments) or materialises_patches(*arguments)

    def _values(self) -> Iterator[torch.Tensor]:
        """[k, *shape] for one block of samples after the other."""
        for block in self._blocks(accumulating_dtype(self.dtype)):
            whole = block == slice(0, self.samples)
            cotangents, inputs = (
                (self.cotangents, self.inputs) if whole else (self.cotangents[block], self.inputs[block])
            )
            yield weight_gradients(cotangents, inputs, self.weight_shape, self.geometry)

    @property
    def summands(self) -> int:
        return self._numbers().positions

    def absolute_sums(self) -> torch.Tensor:
        """As Term.absolute_sums: the number of patches with one pixel is at most the number of places of the
        kernel.
        """
        return super().absolute_sums() * math.sqrt(self._numbers().places)

    def materialise(self) -> torch.Tensor:
        return joined(list(self._values()), self, self.weight_shape)

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
        result = sum_of_products(moved.reshape(g.shape), g)
        if self.geometry.transposed and any(self.geometry.padding) and x.numel():
            # Products with padding are left out here. In the gradient they are a number times zero, which may
            # be NaN.
            result = result + 0 * x.flatten(1).abs().amax(1)
        return result

    def merge_key(self) -> tuple[Any, ...]:
        return Convolution, self.shape, self.geometry, self.inputs.shape[2:], self.cotangents.shape[2:]

    @property
    def matrix_shape(self) -> tuple[int, int, int] | None:
        groups = self.geometry.groups
        return groups, self.shape[0] // groups, self.weight_shape[1:].numel()

    @property
    def _sides(self) -> tuple[str, str]:
        """The factors of the kernel's first and second axis."""
        return ("inputs", "cotangents") if self.geometry.transposed else ("cotangents", "inputs")

    @property
    def row_count(self) -> int | None:
        return self.weight_shape[0] if self.geometry.groups == 1 else 1

    def materialise_seconds(self, dtype: torch.dtype, on: Machine) -> float:
        narrow = self.inputs if self.geometry.transposed else self.cotangents
        elements = self.samples * math.prod(self.shape)
        operations = 2.0 * elements * narrow.shape[1] * math.prod(narrow.shape[3:])
        return on.convolution_seconds(operations, elements * dtype.itemsize, dtype, grouped=True)

    def times_matrices(
        self, first: Callable[[torch.Tensor], torch.Tensor], second: torch.Tensor, dtype: torch.dtype
    ) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """The second matrix is a convolution with kernels."""
        matrix = first(torch.arange(self.weight_shape[0], device=self.device))
        groups, axes = self.geometry.groups, len(self.weight_shape) - 2
        # [g * k, i, *kernel]
        kernels = second.t().reshape(-1, *self.weight_shape[1:]).repeat(groups, *(1,) * (axes + 1))
        geometry = self.geometry._replace(transposed=False, output_padding=(0,) * axes)
        each = (self.cotangents[:1].numel() + self.inputs[:1].numel()) * dtype.itemsize
        for samples in blocks(self.samples, 2 * each, self.device):
            # a transposed convolution is the adjoint of an ordinary one: input and cotangent change places
            some = self.at(samples, dtype)
            narrow, wide = (getattr(some, side) for side in self._sides)
            patches = aten.convolution.default(wide.flatten(0, 1), kernels, None, *geometry)
            for axis, size in enumerate(
                narrow.shape[3:]
            ):  # output padding, and windows that end before the input does
                patches = patches.narrow(2 + axis, 0, size)
            right = _by_position(patches.unflatten(0, narrow.shape[:2]), groups)  # [m, g, t, k]
            left = _by_position(narrow, groups) @ matrix.view(groups, self.weight_shape[0] // groups, -1)
            yield samples, left.flatten(1, 2), right.flatten(1, 2)

    def narrow(self, axis: int, some: slice) -> Convolution | None:
        if self.geometry.groups != 1 or axis > 1:
            return None
        factor = getattr(self, self._sides[axis])[:, :, some]
        shape = [factor.shape[2] if place == axis else size for place, size in enumerate(self.weight_shape)]
        return replace(self, weight_shape=torch.Size(shape), **{self._sides[axis]: factor})

    def times(self, by: torch.Tensor, product: Multiply) -> Convolution | None:
        """By a number for each channel of one side."""
        axis = next((place for place, size in enumerate(by.shape) if size != 1), 0)
        if axis > (0 if self.geometry.groups != 1 else 1) or by.numel() != by.shape[axis]:
            return None
        numbers = by.reshape(1, -1, *(1,) * (self.inputs.dim() - 3))
        scaled = {name: getattr(self, name) for name in ("cotangents", "inputs")}
        scaled[self._sides[axis]] = product(scaled[self._sides[axis]], numbers)
        cotangents, inputs = of_one_dtype(scaled["cotangents"], scaled["inputs"])
        return replace(self, cotangents=cotangents, inputs=inputs)


def _by_position(x: torch.Tensor, groups: int) -> torch.Tensor:
    """[m, b, groups * c, *positions] to [m, groups, b * positions, c]."""
    x = x.flatten(3) if x.dim() > 3 else x.unsqueeze(3)
    m, inner, channels, positions = x.shape
    return (
        x.reshape(m, inner, groups, channels // groups, positions)
        .permute(0, 2, 1, 4, 3)
        .reshape(m, groups, inner * positions, channels // groups)
    )
