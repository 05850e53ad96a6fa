"""Linear maps of convolutions: what is done along output channels is done to cotangents, along input channels
to inputs.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from psgrad.engine.gradients.deferral.linear_maps import (
    Maps,
    arranged,
    by_atoms,
    dense,
    named_axes,
    of_one_dtype,
    varies,
)
from psgrad.engine.gradients.deferral.linear_maps import Product as Multiply
from psgrad.engine.gradients.deferred import Placed
from psgrad.engine.gradients.layout import Layout
from psgrad.engine.gradients.terms import Convolution, Hadamard, Product, sum_of_products

aten = torch.ops.aten


def _sides(term: Convolution) -> tuple[str, str]:
    """The factors of the kernel's first and second axis."""
    return ("inputs", "cotangents") if term.geometry.transposed else ("cotangents", "inputs")


def _is_whole(term: Convolution, layout: Layout) -> bool:
    return layout.atoms == term.shape


def _put(term: Convolution, layout: Layout, axis: int, factor: torch.Tensor) -> Placed:
    """The term with one side's channels changed, [n, b, channels, *]."""
    side = _sides(term)[axis]
    other = next(name for name in ("cotangents", "inputs") if name != side)
    factor, same = of_one_dtype(factor, getattr(term, other))
    shape = list(term.weight_shape)
    before, shape[axis] = shape[axis], factor.shape[2]
    inner = list(layout.inner)
    for dim, names in enumerate(named_axes(layout) or []):
        if axis in names:
            inner[dim] = inner[dim] // before * factor.shape[2]
    factors = {side: factor, other: same}
    new = replace(
        term, weight_shape=torch.Size(shape), cotangents=factors["cotangents"], inputs=factors["inputs"]
    )
    return arranged(new, list(range(len(shape))), shape, named_axes(layout) or [], inner)


def along_kernel(term: Convolution, kernel: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The inputs convolved with a kernel, and the cotangents: [n, b, k, *out] and [n, b, o, *out]. Not for
    transposed ones.
    """
    inputs, kernel = of_one_dtype(term.inputs, kernel)
    moved = aten.convolution.default(inputs.flatten(0, 1), kernel, None, *term.geometry)
    return moved.unflatten(0, inputs.shape[:2]), term.cotangents


class ConvolutionMaps(Maps):
    """Of `Convolution`."""

    def narrow(
        self, term: Convolution, layout: Layout, dim: int, start: int, step: int, length: int
    ) -> Placed | None:
        axes = named_axes(layout)
        if (
            axes is None
            or not _is_whole(term, layout)
            or term.geometry.groups != 1
            or axes[dim] not in ([0], [1])
        ):
            return None
        axis = axes[dim][0]
        factor: torch.Tensor = getattr(term, _sides(term)[axis])
        return _put(term, layout, axis, factor[:, :, start : start + (length - 1) * step + 1 : step])

    def times(
        self, term: Convolution, layout: Layout, by: torch.Tensor, product: Multiply, *, each: bool
    ) -> Placed | None:
        axes = named_axes(layout)
        if axes is None or not _is_whole(term, layout):
            return None
        names = [atom for atom, size in enumerate(layout.atoms) if size != 1]
        spread = by_atoms(by, layout, axes, names, each=each)
        channels = [0] if term.geometry.groups != 1 else [0, 1]
        for axis in channels:
            if not varies(spread, names, [name for name in names if name != axis], each=each):
                factor: torch.Tensor = getattr(term, _sides(term)[axis])
                lead = spread.shape[: int(each)]
                spread = spread.reshape(
                    *(lead or (1,)), 1, -1 if axis in names else 1, *(1,) * (factor.dim() - 3)
                )
                return _put(term, layout, axis, product(factor, spread))
        if each:
            return None
        full = product(torch.ones((), dtype=by.dtype, device=by.device), by).expand(layout.inner)
        return Placed(Hadamard(term, layout.invert(full, term.shape)), layout)

    def sum(self, term: Convolution, layout: Layout, dims: set[int]) -> Placed | None:
        if not _is_whole(term, layout) or term.geometry.groups != 1:
            return None
        ones = torch.ones(1, *term.shape[1:], dtype=term.dtype, device=term.device)
        return contracted_kernel(term, layout, dims, ones)

    def contract(self, term: Convolution, layout: Layout, dim: int, matrix: torch.Tensor) -> Placed | None:
        axes = named_axes(layout)
        if axes is None or not _is_whole(term, layout) or term.geometry.groups != 1 or matrix.dim() != 2:
            return None
        names = axes[dim]
        if names in ([0], [1]):
            factor, matrix = of_one_dtype(getattr(term, _sides(term)[names[0]]), matrix)
            return _put(term, layout, names[0], torch.matmul(factor.movedim(2, -1), matrix).movedim(-1, 2))
        every = [axis for axis, size in enumerate(term.shape) if size != 1 and axis]
        if names != every or term.geometry.transposed:
            return None
        moved, cotangents = along_kernel(
            term, matrix.t().reshape(matrix.shape[1], *term.shape[1:])
        )  # a low-rank kernel
        n, b = moved.shape[:2]
        left, right = of_one_dtype(
            *(
                x.reshape(n, b, x.shape[2], -1).transpose(2, 3).reshape(n, 1, -1, x.shape[2])
                for x in (cotangents, moved)
            )
        )
        axes[dim], new = [len(layout.atoms)], list(layout.inner)
        new[dim] = matrix.shape[1]
        return arranged(
            Product(left, right), [0, len(layout.atoms)], [term.shape[0], matrix.shape[1]], axes, new
        )


def contracted_kernel(
    term: Convolution, layout: Layout, dims: set[int], kernel: torch.Tensor
) -> Placed | None:
    """The term times a kernel, summed over some axes, which have to be all but that of the output channels at
    least.

    kernel: [*shape], or with one output channel if it is the same for all.
    """
    axes = named_axes(layout)
    if axes is None or term.geometry.transposed:
        return None
    gone = {name for dim in dims for name in axes[dim]}
    if not {axis for axis, size in enumerate(term.shape) if axis and size != 1} <= gone:
        return None
    moved, cotangents = along_kernel(term, kernel)
    moved, cotangents = of_one_dtype(moved.expand_as(cotangents), cotangents)
    n, channels = cotangents.shape[0], cotangents.shape[2]
    products = sum_of_products(
        *(x.transpose(1, 2).reshape(n * channels, -1) for x in (moved, cotangents))
    ).reshape(n, channels)
    if 0 in gone:
        products = products.sum(1, keepdim=True)
    for dim in dims:
        axes[dim] = []
    return dense(products, [0], axes, [1 if dim in dims else size for dim, size in enumerate(layout.inner)])
