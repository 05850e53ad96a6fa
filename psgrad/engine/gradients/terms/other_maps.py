"""Linear maps of values that are there, of multiples of a shared tensor, and of terms behind a shared
multiplier.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from psgrad.engine.gradients.deferral.linear_maps import Maps, dense, of_one_dtype
from psgrad.engine.gradients.deferral.linear_maps import Product as Multiply
from psgrad.engine.gradients.deferred import Placed
from psgrad.engine.gradients.layout import Layout
from psgrad.engine.gradients.terms import Convolution, Dense, Hadamard, Multiples, Product, Rows, Term
from psgrad.engine.gradients.terms.base import times_shared
from psgrad.engine.gradients.terms.convolution_maps import ConvolutionMaps, contracted_kernel
from psgrad.engine.gradients.terms.product_maps import Cut, ProductMaps
from psgrad.engine.gradients.terms.rows_maps import RowsMaps

aten = torch.ops.aten


class DenseMaps(Maps):
    """Of `Dense`: what PyTorch does."""

    def narrow(
        self, term: Dense, layout: Layout, dim: int, start: int, step: int, length: int
    ) -> Placed | None:
        value = layout.apply(term.value, lead=1)
        at = (slice(None),) * (dim + 1) + (slice(start, start + (length - 1) * step + 1, step),)
        return Placed.plain(replace(term, value=value[at]))

    def sum(self, term: Dense, layout: Layout, dims: set[int]) -> Placed | None:
        return Placed.plain(
            replace(term, value=layout.apply(term.value, lead=1).sum([dim + 1 for dim in dims], keepdim=True))
        )

    def times(
        self, term: Dense, layout: Layout, by: torch.Tensor, product: Multiply, *, each: bool
    ) -> Placed | None:
        return Placed.plain(
            replace(term, value=product(layout.apply(term.value, lead=1), by if each else by.unsqueeze(0)))
        )

    def scatter(self, term: Dense, layout: Layout, dim: int, index: torch.Tensor, size: int) -> Placed | None:
        value = layout.apply(term.value, lead=1)
        shape = [size if d == dim + 1 else length for d, length in enumerate(value.shape)]
        return Placed.plain(
            replace(term, value=aten.index_select_backward.default(value, shape, dim + 1, index))
        )

    def contract(self, term: Dense, layout: Layout, dim: int, matrix: torch.Tensor) -> Placed | None:
        if matrix.dim() != 2:
            return None
        value, matrix = of_one_dtype(layout.apply(term.value, lead=1), matrix)
        return Placed.plain(
            replace(term, value=torch.matmul(value.movedim(dim + 1, -1), matrix).movedim(-1, dim + 1))
        )


def labelled(term: Multiples, layout: Layout) -> Multiples | None:
    """Multiples of the labelled shape; None where an axis would have a coefficient for some of its parts
    only.
    """
    kept: list[int] = []  # for each atom its size where coefficients differ along it
    axis, left = -1, 1
    for size in layout.atoms:
        while left == 1 and axis + 1 < len(term.shape) and (size != 1 or term.shape[axis + 1] == 1):
            axis += 1
            left = term.shape[axis]
        left //= max(size, 1)
        kept.append(size if term.coefficients.shape[axis + 1] != 1 else 1)
    groups = layout.groups()
    if groups is None:
        return None
    shape = []
    for group, size in zip(groups, layout.inner, strict=True):
        found = math.prod(kept[atom] for atom in group)
        if found not in (1, size):
            return None
        shape.append(found)
    n = term.samples
    coefficients = (
        term.coefficients.reshape(n, *kept)
        .permute(0, *(1 + atom for atom in layout.order))
        .reshape(n, *shape)
    )
    return Multiples(coefficients, layout.apply(term.shared))


class MultiplesMaps(Maps):
    """Of `Multiples`: what PyTorch does with the shared tensor."""

    def narrow(
        self, term: Multiples, layout: Layout, dim: int, start: int, step: int, length: int
    ) -> Placed | None:
        found = labelled(term, layout)
        if found is None:
            return None
        at = (slice(None),) * dim + (slice(start, start + (length - 1) * step + 1, step),)
        own = (
            found.coefficients
            if found.coefficients.shape[dim + 1] == 1
            else found.coefficients[(slice(None), *at)]
        )
        return Placed.plain(Multiples(own, found.shared[at]))

    def sum(self, term: Multiples, layout: Layout, dims: set[int]) -> Placed | None:
        found = labelled(term, layout)
        if found is None:
            return None
        own = found.coefficients
        plain = [dim for dim in dims if own.shape[dim + 1] == 1]
        shared = found.shared.sum(plain, keepdim=True) if plain else found.shared
        mixed = [dim for dim in dims if own.shape[dim + 1] != 1]
        if mixed:
            own, shared = own.transpose(1, mixed[0] + 1), shared.transpose(0, mixed[0])
            if len(mixed) > 1 or math.prod(own.shape[2:]) != 1:
                return None
            own, shared = of_one_dtype(own, shared)
            summed = torch.tensordot(own.flatten(1), shared, 1).unsqueeze(1)
            return Placed.plain(Dense(summed.transpose(1, mixed[0] + 1)))
        return _small(Multiples(own, shared))

    def times(
        self, term: Multiples, layout: Layout, by: torch.Tensor, product: Multiply, *, each: bool
    ) -> Placed | None:
        found = labelled(term, layout)
        if found is None:
            return None
        if each:
            return Placed.plain(Multiples(product(found.coefficients, by), found.shared))
        return Placed.plain(Multiples(found.coefficients, product(found.shared, by)))

    def scatter(
        self, term: Multiples, layout: Layout, dim: int, index: torch.Tensor, size: int
    ) -> Placed | None:
        found = labelled(term, layout)
        if found is None or found.coefficients.shape[dim + 1] != 1:
            return None
        shape = [size if d == dim else length for d, length in enumerate(found.shape)]
        return Placed.plain(
            Multiples(found.coefficients, aten.index_select_backward.default(found.shared, shape, dim, index))
        )

    def contract(self, term: Multiples, layout: Layout, dim: int, matrix: torch.Tensor) -> Placed | None:
        found = labelled(term, layout)
        if found is None or found.coefficients.shape[dim + 1] != 1 or matrix.dim() != 2:
            return None
        shared, matrix = of_one_dtype(found.shared.movedim(dim, -1), matrix)
        return Placed.plain(Multiples(found.coefficients, torch.matmul(shared, matrix).movedim(-1, dim)))


def _small(term: Multiples) -> Placed:
    """Written out where that is no larger than the coefficients."""
    return Placed.plain(
        Dense(term.materialise()) if term.shared.numel() <= term.coefficients[:1].numel() else term
    )


class HadamardMaps(Maps):
    """Of `Hadamard`."""

    def narrow(
        self, term: Hadamard, layout: Layout, dim: int, start: int, step: int, length: int
    ) -> Placed | None:
        inner = maps(term.term).narrow(term.term, layout, dim, start, step, length)
        shared = layout.apply(term.shared)[
            (slice(None),) * dim + (slice(start, start + (length - 1) * step + 1, step),)
        ]
        return (
            None
            if inner is None
            else maps(inner.term).times(inner.term, inner.layout, shared, torch.mul, each=False)
        )

    def times(
        self, term: Hadamard, layout: Layout, by: torch.Tensor, product: Multiply, *, each: bool
    ) -> Placed | None:
        shared = layout.apply(term.shared)
        if not each:
            return Placed(Hadamard(term.term, layout.invert(product(shared, by), term.shape)), layout)
        inner = maps(term.term).times(term.term, layout, by, product, each=True)
        return (
            None
            if inner is None
            else maps(inner.term).times(inner.term, inner.layout, shared, torch.mul, each=False)
        )

    def sum(self, term: Hadamard, layout: Layout, dims: set[int]) -> Placed | None:
        if isinstance(term.term, Convolution):
            return (
                contracted_kernel(term.term, layout, dims, term.shared)
                if layout.atoms == term.shape
                else None
            )
        if not isinstance(term.term, Product) or (cut := Cut.of(term.term, layout)) is None:
            return None
        gone = {name for dim in dims for name in cut.axes[dim]}
        left, right, shared = term.term.left, term.term.right, term.shared
        if set(cut.columns) <= gone:  # sum over b of s_ab r_tb, a vector of the other factor's kind
            products, kept = left * times_shared(right, shared.transpose(1, 2)), cut.rows
        elif set(cut.rows) <= gone:
            products, kept = times_shared(left, shared) * right, cut.columns
        else:
            return None
        names = [*cut.groups, *kept]
        value = products.sum(2).reshape(products.shape[0], *(layout.atoms[name] for name in names))
        left_over = [name for name in names if name not in gone]
        value = (
            value.sum([1 + names.index(name) for name in names if name in gone])
            if len(left_over) < len(names)
            else value
        )
        for dim in dims:
            cut.axes[dim] = []
        return dense(
            value, left_over, cut.axes, [1 if dim in dims else size for dim, size in enumerate(cut.shape)]
        )


_MAPS: dict[type[Term], Maps] = {
    Product: ProductMaps(),
    Rows: RowsMaps(),
    Convolution: ConvolutionMaps(),
    Dense: DenseMaps(),
    Multiples: MultiplesMaps(),
    Hadamard: HadamardMaps(),
}
_NONE = Maps()


def maps(term: Term) -> Maps:
    """The linear maps of a term's kind."""
    return _MAPS.get(type(term), _NONE)
