"""The interface of the kinds of terms, and the place of a term in its parameter.

A term is a per-sample value that is stored as its factors until a query contracts them, such as a sum over
positions of outer products. Each kind of term is one file of this folder, with its norms, inner products,
sums, projections, linear maps and prices. The methods of the base class return None where a kind has no
computation by factors; the query then materialises the value.

Axes: sample n, position t (s), row a, column b, group g. A term's canonical value has the shape `shape` for
each sample. Every query of a term is exact. The order of contraction is chosen from the sizes. Large
intermediates are made for a few samples at a time.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

import torch

from psgrad.engine.gradients.costs import Machine
from psgrad.engine.gradients.layout import AxisLayout
from psgrad.engine.gradients.terms.numerics import (
    CANCELLATION,
    accumulating_dtype,
    blocks,
    norms_at_least,
    rows_of,
    samples_to_recompute,
    square_norm,
    zero_where_lost,
)

Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # torch.mul or torch.div


@dataclass(frozen=True)
class Placed:
    """A term, and how its axes lie in the parameter's."""

    term: Term
    layout: AxisLayout

    @classmethod
    def plain(cls, term: Term) -> Placed:
        return cls(term, AxisLayout.identity(term.shape))

    def at(self, samples: slice | torch.Tensor, dtype: torch.dtype | None = None) -> Placed:
        """As Term.at."""
        return Placed(self.term.at(samples, dtype), self.layout)

    def scaled(self, factor: float) -> Placed:
        """As Term.scaled."""
        return Placed(self.term.scaled(factor), self.layout)

    def materialise(self) -> torch.Tensor:
        """[n, *shape of the parameter]: as Term.materialise."""
        return self.layout.apply(self.term.materialise(), lead=1)

    def weighted_sum(self, weights: torch.Tensor) -> torch.Tensor:
        """[*shape of the parameter]: as Term.weighted_sum."""
        return self.layout.apply(self.term.weighted_sum(weights))

    def dot(self, vector: torch.Tensor) -> torch.Tensor:
        """[n]: as Term.dot, with a vector [*shape of the parameter]."""
        return self.term.dot(self.layout.invert(vector, self.term.shape))


class Term(ABC):
    """One summand of a per-sample gradient. Its kinds are frozen dataclasses of their factors."""

    shape: tuple[int, ...]  # canonical, per sample
    lost_at: str = ""  # the operator at which its factors were lost; empty if that did not happen
    position_axis: ClassVar[int] = 1  # of all factors, if the value is a sum over positions

    @property
    @abstractmethod
    def factors(self) -> tuple[torch.Tensor, ...]:
        """The tensors that the term stores, sample axis first."""

    @property
    def samples(self) -> int:
        return self.factors[0].shape[0]

    @property
    def device(self) -> torch.device:
        return self.factors[0].device

    @property
    def dtype(self) -> torch.dtype:
        return self.factors[0].dtype

    def _with_factors(self, change: Callable[[torch.Tensor, str], torch.Tensor]) -> Self:
        """The term with each factor, and its name, replaced by `change`."""
        factors = {
            field.name: change(factor, field.name)
            for field in fields(self)  # type: ignore[arg-type]
            if isinstance(factor := getattr(self, field.name), torch.Tensor)
        }
        return replace(self, **factors)  # type: ignore[type-var]

    def at(self, samples: slice | torch.Tensor, dtype: torch.dtype | None = None) -> Self:
        """The term of some of the samples, a slice of n or their numbers [k], in another precision if `dtype`
        is given.
        """

        kind = dtype or self.dtype

        def some(factor: torch.Tensor, name: str) -> torch.Tensor:
            return rows_of(factor, samples).to(kind if _are_numbers(factor) else factor.dtype)

        return self._with_factors(some)

    @abstractmethod
    def square_norms(self) -> torch.Tensor:
        """[n]; of a narrower term in float64 only if all arithmetic is, so that nothing leaves its range."""

    @property
    @abstractmethod
    def summands(self) -> int:
        """The largest number of products that are added up for one element of a sample's value."""

    def absolute_sums(self) -> torch.Tensor:
        """[n]: an upper bound of the sum of the norms of all summands, to which the rounding error of the
        value is proportional. The value's own norm is smaller, by any factor if summands cancel. Not finite
        if a product overflows.

        By the Cauchy-Schwarz inequality over positions: the product of the norms of the factors.
        """
        norms = [
            norms_at_least(factor.reshape(len(factor), factor.shape[1:].numel()), 1)
            for factor in self.factors
            if factor.is_floating_point()
        ]
        return torch.stack(norms).prod(0)

    @abstractmethod
    def materialise(self) -> torch.Tensor:
        """[n, *shape]"""

    @abstractmethod
    def weighted_sum(self, weights: torch.Tensor) -> torch.Tensor:
        """[*shape]: the sum over samples, each times its weight [n]."""

    @abstractmethod
    def dot(self, vector: torch.Tensor) -> torch.Tensor:
        """[n]: the inner product of each sample's value with one vector [*shape]."""

    def scaled(self, factor: float) -> Self:
        """The term times a number, which scales its first factor that is not an index."""
        numbers = [name for name, value in vars(self).items() if _are_numbers(value)]
        return self._with_factors(lambda value, name: value * factor if name == numbers[0] else value)

    def merge_key(self) -> tuple[Any, ...]:
        """A key that is equal for terms that can be merged to one term."""
        return type(self), self.shape

    def plus(self, others: Sequence[Any]) -> Self:
        """The sum of this term and others with the same merge key, as one term: by default one with the
        positions of all.
        """
        return self._with_factors(
            lambda factor, name: torch.cat(
                [factor, *(getattr(term, name) for term in others)], self.position_axis
            )
        )

    @property
    def multiplications(self) -> float:
        """The multiplications of the sum over samples, for each sample."""
        return self.summands * math.prod(self.shape)

    # -- norms -----------------------------------------------------------------------------------------------

    def materialised_square_norms(self) -> torch.Tensor:
        """[n]: the norms of the materialised value, a block of samples at a time. Free of cancellation
        between positions.
        """
        kind = accumulating_dtype(self.dtype)
        parts = [square_norm(self.at(block, kind).materialise()) for block in self._blocks(kind)]
        return joined(parts, self)

    def _blocks(self, kind: torch.dtype) -> Iterator[slice]:
        """Blocks of samples whose values, materialised in this type, fit in memory."""
        return blocks(self.samples, math.prod(self.shape) * kind.itemsize, self.device)

    def order(self) -> str:
        """The order of contraction of the norm, in one or two words: the cheapest whose intermediates fit a
        block.
        """
        return "materialise"

    @property
    def matrix_shape(self) -> tuple[int, int, int] | None:
        """Groups, rows and columns of a sum of outer products as matrices; None for any other kind."""
        return None

    def square_sums(self) -> torch.Tensor | None:
        """[*shape] float64: the sum over samples of the squares of the value's elements; None if not by
        factors.
        """
        return None

    # -- inner products of two terms -------------------------------------------------------------------------

    def cross_products(self, other: Term) -> torch.Tensor | None:
        """[n] float64: each sample's inner product with the other term's, elements in the same order; None if
        materialising both is as cheap.
        """
        return None

    # -- parts of the value, materialised --------------------------------------------------------------------

    @property
    def row_count(self) -> int | None:
        """The number of rows into which `some_rows` can cut the value; None if any number is possible."""
        return 1

    def some_rows(self, rows: slice, count: int) -> torch.Tensor:
        """[n, ...]: the values of these rows of `count`."""
        if count == 1:
            return self.materialise()
        part = self.narrow(next(axis for axis, size in enumerate(self.shape) if size == count), rows)
        assert part is not None, "row_count"
        return part.materialise()

    def materialise_seconds(self, dtype: torch.dtype, on: Machine) -> float:
        """The estimated time to materialise all samples in this type."""
        size = math.prod(self.shape) * self.samples * dtype.itemsize
        return on.stream_seconds(size) + on.scattered_seconds(
            sum(f.numel() for f in self.factors) * dtype.itemsize
        )

    # -- projections -----------------------------------------------------------------------------------------

    def times_matrices(
        self, first: Callable[[torch.Tensor], torch.Tensor], second: torch.Tensor, dtype: torch.dtype
    ) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor]]:
        """Of a sum of outer products, whose `matrix_shape` is known: samples, and both factors [m, t, k] and
        [m, t, l] of their values times two matrices. first: from the numbers of rows [i], in all groups, to
        those of the first matrix [i, k]. second: [b, l].
        """
        raise NotImplementedError

    # -- linear maps ----------------------------------------------------------------------------------------
    # Along axes of `shape`. Each returns None where it is no map of the factors.

    def narrow(self, axis: int, some: slice) -> Term | None:
        """Some places of an axis."""
        return None

    def times(self, by: torch.Tensor, product: Multiply) -> Term | None:
        """Element by element times `by`, with length one along the axes on which it does not depend."""
        return None

    def contract(self, axis: int, matrix: torch.Tensor) -> Term | None:
        """An axis contracted with the first axis of a matrix [size, k]."""
        return None


def _are_numbers(value: Any) -> bool:
    """Whether a field of a term is a factor, and no index."""
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


class OuterProducts(Term):
    """A sum over positions of outer products of stored factors, whose inner products with others like it are
    Gram matrices between positions, multiplied.
    """

    @property
    @abstractmethod
    def sizes(self) -> tuple[int, int, int, int]:
        """Groups, positions, rows and columns of the factors; no rows where the first factor is an index."""

    @abstractmethod
    def at_positions(self, some: slice) -> Self:
        """The sum over some positions only."""

    @abstractmethod
    def position_square_norms(self) -> torch.Tensor:
        """[n] float64: the sum over positions of the squared norms of their contributions."""


def added(parts: list[torch.Tensor]) -> torch.Tensor:
    """The sum of one tensor or more, in order; a single one itself."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def joined(parts: list[torch.Tensor], term: Term, shape: tuple[int, ...] = ()) -> torch.Tensor:
    """[n, *shape] from the blocks of a term's samples; a single block is not copied, and there may be
    none.
    """
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts) if parts else torch.zeros(0, *shape, dtype=term.dtype, device=term.device)


def sums_of_grams(term: Term, left: torch.Tensor, right: torch.Tensor, groups: int) -> torch.Tensor:
    """[n]: squared norms of a term from the Gram matrices [n * groups, t, t] of its factors (the first is
    overwritten).

    If the contributions of positions cancel, the rounding error is too large, and those samples are
    materialised instead. The diagonals, with one position each, give the size of the summands.
    """
    largest = [
        gram.diagonal(dim1=1, dim2=2).reshape(-1, groups * gram.shape[1]).amax(1) for gram in (left, right)
    ]
    products = left.mul_(right)
    alone = products.diagonal(dim1=1, dim2=2).sum(1).reshape(-1, groups).sum(1)
    total = products.flatten(1).sum(1).reshape(-1, groups).sum(1)
    cancelled = samples_to_recompute(total < CANCELLATION * alone)
    if len(cancelled):
        total[cancelled] = term.at(cancelled, total.dtype).materialised_square_norms()
    return zero_where_lost(total, *largest)
