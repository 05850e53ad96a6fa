"""A block of the curvature that is diagonal in the product of two bases, and gradients in these bases."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from psgrad.engine.gradients.deferred import DeferredGradient
from psgrad.engine.gradients.flat import Vectors
from psgrad.engine.gradients.inner.inner_products import inner_products
from psgrad.engine.gradients.parts import Part
from psgrad.engine.gradients.queries import PerSampleGradients
from psgrad.engine.gradients.terms import Dense, Product, Term, accumulating_dtype, blocks, times_shared
from psgrad.engine.influence.curvature.kronecker_factors import Form, Side, only_product


@dataclass(frozen=True)
class Bias:
    """A bias whose gradient is one more column (appended 'right') or row ('left') of its weight's matrices;
    where the weight is taken as a single row, the rest of that row ('right').
    """

    name: str
    shape: torch.Size
    appended: Side


@dataclass(frozen=True)
class Basis:
    """One parameter, or a part of it, with its bias, as matrices [g, a, b] that are rotated: left^T M right.

    Attributes:
        name, shape: the parameter's.
        form: how it lies as matrices.
        bias: what is appended to them.
        left, right: [g, a, a] and [g, b, b] float64, orthogonal; None for the identity.
    """

    name: str
    shape: torch.Size
    form: Form
    bias: Bias | None
    left: torch.Tensor | None
    right: torch.Tensor | None

    @property
    def label(self) -> str:
        return f"{self.name}{self.form.slice_text}" + (
            f" + {self.bias.name}" if self.bias is not None else ""
        )

    @property
    def size(self) -> tuple[int, int, int]:
        """(g, a, b), the bias's row or column included."""
        groups, rows, columns = self.form.shape
        if self.bias is None:
            return self.form.shape
        if self.bias.appended == "left":
            return groups, rows + 1, columns
        return groups, rows, columns + self.bias.shape.numel() // (groups * rows)

    @property
    def is_row(self) -> bool:
        """Whether the parameter is taken as a single row, so that a basis of it makes its block exact."""
        return self.form.layout is None

    def describe(self) -> str:
        """The kind of the bases, in a word or two."""
        groups, rows, columns = self.size
        if self.left is None and self.right is None:
            return "diagonal"
        if rows == 1 and self.left is None:
            return f"exact, {columns} x {columns}"
        sides = [
            str(size) if basis is not None else f"{size} (diagonal)"
            for size, basis in ((rows, self.left), (columns, self.right))
        ]
        return f"Kronecker factors {sides[0]} x {sides[1]}" + (f" in {groups} groups" if groups > 1 else "")

    # -- vectors ---------------------------------------------------------------------------------------------

    def matrices(self, vectors: Vectors) -> torch.Tensor:
        """[k, g, a, b] of k vectors, name -> [k, *shape]."""
        result = self.form.matrices(vectors[self.name])
        if self.bias is None:
            return result
        groups, rows, columns = self.form.shape
        left = self.bias.appended == "left"
        shape = (1, columns) if left else (rows, self.size[2] - columns)
        more = vectors[self.bias.name].reshape(len(result), groups, *shape)
        return torch.cat([result, more], 2 if left else 3)

    def vectors(self, matrices: torch.Tensor) -> Vectors:
        """The parameters of k matrices [k, g, a, b], name -> [k, *shape]; zero in what the form does not
        cover.
        """
        _, rows, columns = self.form.shape
        result = {self.name: self.form.values(matrices[:, :, :rows, :columns], self.shape)}
        if self.bias is not None:
            more = matrices[:, :, rows:, :] if self.bias.appended == "left" else matrices[:, :, :, columns:]
            result[self.bias.name] = more.reshape(len(matrices), *self.bias.shape)
        return result

    def rotate(self, matrices: torch.Tensor) -> torch.Tensor:
        """left^T M right of [k, g, a, b]."""
        return _both_sides(matrices, self.left, self.right)

    def rotate_back(self, matrices: torch.Tensor) -> torch.Tensor:
        """left M right^T of [k, g, a, b]."""
        return _both_sides(
            matrices, *(None if basis is None else basis.transpose(1, 2) for basis in (self.left, self.right))
        )

    # -- per-sample gradients --------------------------------------------------------------------------------

    def is_outer(self, part: Part) -> bool:
        """Whether gradients of one part are outer products."""
        term = self.product(part)
        return term is not None and term.is_outer_product

    def outer(self, part: Part, dtype: torch.dtype | None = None) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Rotated gradients of one part as outer products, [n, g, a] and [n, g, b], in `dtype` or their own
        type; None if they are sums of several.
        """
        term = self.product(part)
        if term is None or not term.is_outer_product:
            return None
        rotated = self.rotated_factors(term if dtype is None else term.at(slice(0, len(part)), dtype))
        return rotated.left.squeeze(2), rotated.right.squeeze(2)

    def rotated(self, part: Part, dtype: torch.dtype | None = None) -> Iterator[tuple[slice, torch.Tensor]]:
        """Materialised rotated gradients [k, g, a, b], block of samples by block; multiplied in `dtype`, at
        least float32.
        """
        gradient = part.gradients[self.name]
        kind = dtype or accumulating_dtype(gradient.dtype)
        term = self.product(part)
        groups, rows, columns = self.size
        by_factors = term is not None and term.factors[0].shape[2] * (
            rows**2 + columns**2
        ) < rows * columns * (rows + columns)
        for block in blocks(len(part), 3 * groups * rows * columns * kind.itemsize, gradient.device):
            if by_factors:
                assert term is not None
                yield block, self.rotated_factors(term.at(block, kind)).materialise()
            else:
                values = {name: _materialised(part, name, block).to(kind) for name in self.names}
                yield block, self.rotate(self.matrices(values))

    def product(self, part: Part) -> Product | None:
        """Gradients of one part as factors, [n, g, t, a] and [n, g, t, b], not rotated; None if they have
        none.
        """
        return only_product(part.gradients[self.name], self.form)

    @property
    def names(self) -> list[str]:
        """The names of its parameters."""
        return [self.name] if self.bias is None else [self.name, self.bias.name]

    def rotated_factors(self, term: Term) -> Product:
        """A product as `product` has it, with its bias, rotated."""
        left, right = term.factors
        if self.bias is not None:
            ones = left.new_ones(*left.shape[:3], 1)
            left, right = (
                (torch.cat([left, ones], 3), right)
                if self.bias.appended == "left"
                else (left, torch.cat([right, ones], 3))
            )
        return Product(_times(left, self.left), _times(right, self.right))


def _materialised(part: Part, name: str, samples: slice) -> torch.Tensor:
    """[k, *shape], zeros where the loss does not depend on the parameter."""
    gradient = part.gradients[name]
    if gradient.is_zero:
        return gradient.new_zeros(samples.stop - samples.start)
    return gradient.at(samples).materialise()


def _times(matrices: torch.Tensor, basis: torch.Tensor | None) -> torch.Tensor:
    """[k, g, a, b] times [g, b, b]."""
    return matrices if basis is None else times_shared(matrices.contiguous(), basis.to(matrices.dtype))


def _both_sides(
    matrices: torch.Tensor, left: torch.Tensor | None, right: torch.Tensor | None
) -> torch.Tensor:
    """left^T M right."""
    product = _times(matrices, right)
    return product if left is None else _times(product.transpose(2, 3), left).transpose(2, 3)


@dataclass(frozen=True)
class KroneckerBlock:
    """(right kron left) diag(values) (right kron left)^T, the mean-form curvature of one weight and its bias.

    Attributes:
        basis: the bases, and how the parameters lie as matrices [g, a, b].
        values: [g, a, b] float64, the mean over samples of the squares of their gradients' elements in these
            bases.
    """

    basis: Basis
    values: torch.Tensor

    @property
    def label(self) -> str:
        return self.basis.label

    def precondition(self, gradients: PerSampleGradients, factor: torch.Tensor) -> Vectors:
        """name -> [k, *shape]: gradients whose elements in the bases are multiplied by `factor` [g, a, b], in
        float64.
        """

        def preconditioned(some: Part) -> Vectors:
            parts = []
            for _, rotated in self.basis.rotated(some, torch.float64):
                found = self.basis.vectors(self.basis.rotate_back(rotated * factor))
                parts.append({name: value.to(some.gradients[name].dtype) for name, value in found.items()})
            return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

        vectors: Vectors = gradients.by_part(preconditioned)
        return vectors

    def multiplied(self, gradients: PerSampleGradients, factor: torch.Tensor) -> torch.Tensor:
        """[k, g, a, b]: gradients in the bases, times `factor` [g, a, b] in float64, in their own type."""

        def multiplied(some: Part) -> torch.Tensor:
            kind = some.gradients[self.basis.name].dtype
            return torch.cat(
                [(part * factor).to(kind) for _, part in self.basis.rotated(some, torch.float64)]
            )

        found: torch.Tensor = gradients.by_part(multiplied)
        return found

    def weighted_squares(
        self, gradients: PerSampleGradients, weights: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """For each of the weights [g, a, b] the sums [n] float64 of the gradients' squared elements in the
        bases times them.
        """
        found: list[torch.Tensor] = gradients.by_part(lambda part: self._weighted_squares(part, weights))
        return found

    def _weighted_squares(self, part: Part, weights: list[torch.Tensor]) -> list[torch.Tensor]:
        outer = self.basis.outer(part)
        if outer is not None:
            left, right = (factor.double().square() for factor in outer)
            return [(torch.einsum("nga,gab->ngb", left, each) * right).sum((1, 2)) for each in weights]
        parts = []
        for _, rotated in self.basis.rotated(part):
            squares = rotated.double().square().flatten(1)
            parts.append(squares @ torch.stack([each.reshape(-1) for each in weights], 1))
        return list(torch.cat(parts).unbind(1))


class Multiplied:
    """Vectors that were multiplied by a block's matrix, for inner products with gradients.

    values: [m, g, a, b], in the block's bases. samples: of how many gradients inner products are taken.
    Gradients are rotated where that is less work than to rotate the vectors back.
    """

    def __init__(self, block: KroneckerBlock, values: torch.Tensor, samples: int) -> None:
        self.basis, self.values, self.samples = block.basis, values, samples

    def inner(self, part: Part) -> torch.Tensor:
        """[n, m] float64: the inner products with the gradients of one part."""
        term = self.basis.product(part)
        if term is not None and term.is_outer_product and self._rotates(term):
            return outer_inner(self.basis.rotated_factors(term), self.values)
        if term is not None and self._rotates(term):
            rotated = DeferredGradient.of(self.basis.rotated_factors(term), self.values.shape[1:])
            pairs = [(rotated, _as_gradient(self.values))]
        else:
            pairs = [(part.gradients[name], _as_gradient(self._vectors[name])) for name in self.basis.names]
        return inner_products(pairs, (len(part), len(self.values)), part.device)

    def _rotates(self, term: Term) -> bool:
        _, rows, columns = self.basis.size
        of_gradients = self.samples * term.factors[0].shape[2] * (rows**2 + columns**2)
        return of_gradients <= len(self.values) * rows * columns * (rows + columns)

    @cached_property
    def _vectors(self) -> Vectors:
        """name -> [m, *shape]"""
        each = [
            self.basis.vectors(self.basis.rotate_back(part.double())) for part in self.values.split(_ROTATED)
        ]
        return {name: torch.cat([part[name].to(self.values) for part in each]) for name in each[0]}


def _as_gradient(values: torch.Tensor) -> DeferredGradient:
    return DeferredGradient.of(Dense(values), values.shape[1:])


# Vectors that are rotated back at once, and the numbers of an intermediate of inner products.
_ROTATED, _NUMBERS = 32, 1 << 22


def outer_inner(term: Product, values: torch.Tensor) -> torch.Tensor:
    """[n, m] float64: the inner products of outer products, of one position, with values [m, g, a, b]."""
    left, right = (factor.squeeze(2).transpose(0, 1) for factor in term.factors)  # [g, n, a], [g, n, b]
    if left.shape[2] < right.shape[2]:
        left, right, values = right, left, values.transpose(2, 3)
    step = max(1, _NUMBERS // max(right.numel(), 1))
    moved = [
        (torch.matmul(left, part) * right).sum(3).sum(1, dtype=torch.float64) for part in values.split(step)
    ]
    return torch.cat(moved).t()


def second_moment(basis: Basis, gradients: PerSampleGradients) -> torch.Tensor:
    """[1, p, p] float64: the sum over samples of the outer products of their gradients, of a parameter that
    is taken as a single row and has no bases yet.
    """
    columns = basis.size[2]
    total = torch.zeros(columns, columns, dtype=torch.float64, device=gradients.losses.device)
    for part in gradients.parts:
        for _, rows in basis.rotated(part, torch.float64):
            flat = rows.flatten(1)
            total += flat.t() @ flat
    return total.unsqueeze(0)


def sum_of_squares(basis: Basis, gradients: PerSampleGradients) -> torch.Tensor:
    """[g, a, b] float64: the sum over samples of the squares of their gradients' elements in the bases."""
    total = torch.zeros(basis.size, dtype=torch.float64, device=gradients.losses.device)
    for part in gradients.parts:
        outer = basis.outer(part)
        if outer is not None:
            left, right = (factor.double().square().transpose(0, 1) for factor in outer)
            total += torch.bmm(left.transpose(1, 2), right)
            continue
        for _, rotated in basis.rotated(part):
            total += rotated.square().sum(0, dtype=torch.float64)
    return total
