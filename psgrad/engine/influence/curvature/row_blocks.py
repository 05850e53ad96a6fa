"""Rows of a curvature matrix for a chunk of samples, as factors or materialised, and their products with a
block of vectors.

Rows of one sample are gradients at the same activations: for a matrix product they share one factor, and the
product of a vector with that factor is computed once for all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from psgrad.engine.gradients.deferred import DeferredGradient, oriented
from psgrad.engine.gradients.terms import Product, Term

# Factors take less memory than materialised rows, and need no conversion: they may cost this much more work.
_WORTH = 2
# Factors that differ by at most so many roundings of their largest number are the same.
_ROUNDING = 16


@dataclass(frozen=True)
class MaterialisedRows:
    """The rows of n samples, R each, in one parameter. Blocks of k vectors come with the vectors along the
    last axis.

    rows: [n, R, numel]. form: parts of one form arrange alike. samples: n. bytes: what is kept.
    """

    rows: torch.Tensor

    form = "materialised"

    @property
    def samples(self) -> int:
        return self.rows.shape[0]

    @property
    def bytes(self) -> int:
        return self.rows.numel() * self.rows.element_size()

    def arrange(self, block: torch.Tensor) -> torch.Tensor:
        """[numel, k] in the order that `inner` needs."""
        return block

    def restore(self, total: torch.Tensor) -> torch.Tensor:
        """An arranged block as [numel, k]."""
        return total

    def inner(self, block: torch.Tensor, samples: slice) -> torch.Tensor:
        """[n * R, k]: each row's inner product with each vector, of a block that was arranged."""
        return self.rows[samples].flatten(0, 1).to(block.dtype) @ block

    def add_back(self, total: torch.Tensor, weights: torch.Tensor, samples: slice) -> None:
        """Add the sums over rows, each times its weights [n * R, k], to `total`, which is arranged."""
        total.addmm_(self.rows[samples].flatten(0, 1).to(weights.dtype).t(), weights)

    def square_sum(self) -> float:
        """The sum over rows of the squares of their elements, added in float64."""
        return sum(float(sample.double().square().sum()) for sample in self.rows)

    def room(self, vectors: int) -> int:
        """The numbers that a product makes for one sample."""
        return self.rows.shape[1] * self.rows.shape[2]


@dataclass(frozen=True)
class SharedFactorRows:
    """Rows that are sums over positions of outer products, one factor of which is the same for all rows of a
    sample, with the methods of `MaterialisedRows`.

    own: [n, R, t, a]. shared: [n, t, b]. transposed: whether the parameter is [b, a], not [a, b].
    """

    own: torch.Tensor
    shared: torch.Tensor
    transposed: bool

    @property
    def form(self) -> str:
        return "shared right" if self.transposed else "shared left"

    @property
    def samples(self) -> int:
        return self.own.shape[0]

    @property
    def bytes(self) -> int:
        return (self.own.numel() + self.shared.numel()) * self.own.element_size()

    @property
    def _sizes(self) -> tuple[int, int]:
        return self.own.shape[3], self.shared.shape[2]

    def arrange(self, block: torch.Tensor) -> torch.Tensor:
        a, b = self._sizes
        block = block.reshape(b, a, -1) if self.transposed else block.reshape(a, b, -1).transpose(0, 1)
        return block.reshape(b, -1)  # [b, a * k]

    def restore(self, total: torch.Tensor) -> torch.Tensor:
        a, b = self._sizes
        total = total.reshape(b, a, -1)
        return (total if self.transposed else total.transpose(0, 1)).reshape(a * b, -1)

    def inner(self, block: torch.Tensor, samples: slice) -> torch.Tensor:
        own, shared = self.own[samples].to(block.dtype), self.shared[samples].to(block.dtype)
        n, _, positions, a = own.shape  # no position where a sample sends nothing to a layer
        moved = (shared.flatten(0, 1) @ block).reshape(n, positions * a, block.shape[1] // a)
        return torch.bmm(own.flatten(2), moved).flatten(0, 1)

    def add_back(self, total: torch.Tensor, weights: torch.Tensor, samples: slice) -> None:
        own, shared = self.own[samples].to(weights.dtype), self.shared[samples].to(weights.dtype)
        n, rows, positions, a = own.shape
        vectors = weights.shape[1]
        moved = torch.bmm(own.flatten(2).transpose(1, 2), weights.reshape(n, rows, vectors))  # [n, t * a, k]
        total.addmm_(shared.flatten(0, 1).t(), moved.reshape(n * positions, a * vectors))

    def square_sum(self) -> float:
        if self.own.shape[2] == 1:
            own, shared = (each.double().square().flatten(1).sum(1) for each in (self.own, self.shared))
            return float(own @ shared)
        return sum(
            float(torch.matmul(own.double().transpose(1, 2), shared.double()).square().sum())
            for own, shared in zip(self.own, self.shared, strict=True)
        )

    def room(self, vectors: int) -> int:
        return 2 * self.own.shape[2] * self.own.shape[3] * vectors


ParameterRows = MaterialisedRows | SharedFactorRows


def part_of(gradient: DeferredGradient, rows: int) -> ParameterRows:
    """Gradients of n * R losses, the R of one sample next to one another, in the form that products with
    vectors are cheapest in.
    """
    term = oriented(gradient.terms[0]) if len(gradient.terms) == 1 else None
    shared = _shared(term, rows) if isinstance(term, Product) and term.shape[0] == 1 else None
    if shared is not None:
        return shared
    value = gradient.materialise()
    return MaterialisedRows(value.reshape(-1, rows, math.prod(gradient.shape)))


def _are_equal(factors: torch.Tensor) -> bool:
    """Whether the factors [n, R, ...] of a sample's R rows are the same. They come from one sample, repeated:
    a kernel may add up the rows of a large matrix in another order than others, which changes the last bits.
    """
    if not factors.numel():
        return True
    first = factors[:, :1]
    rounding = _ROUNDING * torch.finfo(factors.dtype).eps * first.abs().amax()
    return bool(((factors - first).abs() <= rounding).all())


def _shared(term: Term, rows: int) -> SharedFactorRows | None:
    """The term with the common factor of its rows stored once; None where they have none, or materialised
    rows are less work.
    """
    left, right = (
        factor.squeeze(1).unflatten(0, (-1, rows)) for factor in term.factors
    )  # [n, R, t, a], [n, R, t, b]
    positions, a, b = left.shape[2], left.shape[3], right.shape[3]
    for own, shared, transposed in ((left, right, False), (right, left, True)):
        work = positions * (a * b + rows * own.shape[3])
        if work <= _WORTH * rows * a * b and _are_equal(shared):
            return SharedFactorRows(own, shared[:, 0].clone(), transposed)
    return None
