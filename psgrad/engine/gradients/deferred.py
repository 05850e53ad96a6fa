"""A deferred gradient: a sum of terms, each with a layout that maps its axes to the parameter's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from psgrad.engine.gradients.layout import Layout
from psgrad.engine.gradients.terms import Dense, Multiples, Term, narrow
from psgrad.engine.gradients.terms import Placed as Placed
from psgrad.engine.transforms.batch_values import Batch


@dataclass(frozen=True)
class DeferredGradient:
    """A per-sample value that is a sum of terms, [n] x `shape`.

    Class attributes:
        groups: the places and the gradients of each group of samples that was computed separately; empty if
            all samples were computed together.
    """

    groups: ClassVar[tuple[tuple[torch.Tensor, DeferredGradient], ...]] = ()

    terms: tuple[Placed, ...]
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, term: Term, shape: tuple[int, ...] | torch.Size) -> DeferredGradient:
        layout = (
            Layout.identity(term.shape).reshape(shape)
            if tuple(shape) != term.shape
            else Layout.identity(term.shape)
        )
        if layout is None:  # an empty term
            term, layout = Dense(term.factors[0].new_zeros(term.samples, *shape)), Layout.identity(shape)
        return cls((Placed(term, layout),), torch.Size(shape), term.dtype, term.device)

    def with_terms(
        self, terms: list[Placed], shape: tuple[int, ...] | torch.Size | None = None
    ) -> DeferredGradient:
        return DeferredGradient(
            tuple(terms), torch.Size(self.shape if shape is None else shape), self.dtype, self.device
        )

    @property
    def is_zero(self) -> bool:
        """Whether the loss of no sample depends on the parameter."""
        return not self.terms

    @property
    def factors(self) -> list[torch.Tensor]:
        """The tensors that the gradient stores."""
        return [factor for placed in self.terms for factor in placed.term.factors]

    def mapped(self, change: Callable[[DeferredGradient], DeferredGradient]) -> DeferredGradient:
        """`change` applied to the gradient, or to the gradient of each group of samples."""
        return change(self)

    def new_zeros(self, count: int) -> torch.Tensor:
        """[count, *shape]"""
        return torch.zeros(count, *self.shape, dtype=self.dtype, device=self.device)

    def at(self, samples: slice | torch.Tensor) -> DeferredGradient:
        """The gradient of some of the samples: a slice of n, or their numbers [k]."""
        return self.with_terms([placed.at(samples) for placed in self.terms])

    def describe(self) -> str:
        """The orders of contraction of its norms, in words."""
        return " + ".join(placed.term.describe() for placed in self.terms) or "zero"

    @property
    def lost_at(self) -> str:
        """The operator that could not be applied to the factors, so that the value was materialised for each
        sample; empty if there was none, or if the gradient never had factors (a bias).
        """
        return next((placed.term.lost_at for placed in self.terms if placed.term.lost_at), "")

    def weighted_sum(self, weights: torch.Tensor) -> torch.Tensor:
        """[*shape]: the sum over samples, each times its weight [n]."""
        parts = [placed.layout.apply(placed.term.weighted_sum(weights)) for placed in self.terms]
        if not parts:
            return torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total

    def materialise(self) -> torch.Tensor:
        """[n, *shape]"""
        # Half-precision factors of a float32 gradient are multiplied and summed in float32.
        wide = torch.promote_types(self.dtype, self.terms[0].term.dtype)
        parts = [placed.at(slice(None), wide).materialise() for placed in self.terms]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total.to(self.dtype)


def oriented(placed: Placed) -> Term | None:
    """The term with its elements in the parameter's order, transposed if necessary; None if they are in
    another order, or in a part of the parameter.
    """
    term, layout = placed.term, placed.layout
    if layout.window is not None:
        return None
    order = [i for i in layout.order if layout.atoms[i] != 1]
    if order == sorted(order):
        return term
    swapped = term.transposed()
    if swapped is None:
        return None
    height = term.shape[-2]
    rows = [i for i in sorted(order) if math.prod(layout.atoms[: i + 1]) <= height]
    columns = [i for i in sorted(order) if i not in rows]
    whole = order == columns + rows and math.prod(layout.atoms[i] for i in rows) == height
    return swapped if whole else None


def oriented_if_free(placed: Placed) -> Placed:
    """The term with its elements in the parameter's order if this needs no computation, so that the terms of
    a weight and of its transpose can be merged; else unchanged.
    """
    bare = Placed(placed.term, placed.layout.bare)
    term = oriented(bare)
    layout = Layout.identity(term.shape).reshape(bare.layout.shape) if term is not None else None
    if term is None or layout is None:
        return Placed(placed.term, placed.layout.without_ones)
    return Placed(term, replace(layout, window=placed.layout.window))


def merged(terms: Iterable[Placed]) -> list[Placed]:
    """The terms, with terms of one kind and layout merged to one with all their positions. The others keep
    cross terms.
    """
    groups: dict[Any, list[Placed]] = {}
    for placed in map(oriented_if_free, terms):
        groups.setdefault((placed.layout, placed.term.merge_key()), []).append(placed)
    return [
        Placed(first.term.plus([placed.term for placed in others]), first.layout) if others else first
        for first, *others in groups.values()
    ]


def deferred_in(batch: Batch, argument: Any) -> DeferredGradient | None:
    """The deferred value of a tracer of this level, None for anything else."""
    if batch.is_mapped(argument) and isinstance(argument.value, DeferredGradient):
        return argument.value
    return None


def term_of(batch: Batch, value: torch.Tensor) -> Term:
    """A value [n, *shape] of the batch, or [*shape] of all samples, as a term: stored, shared, or constant
    along some axes.
    """
    if not batch.is_mapped(value):
        return Multiples(
            torch.ones(batch.size, *(1,) * value.dim(), dtype=value.dtype, device=value.device), value
        )
    physical = batch.physical(value)
    coefficients = narrow(physical)
    if coefficients.shape == physical.shape:
        return Dense(physical)
    return Multiples(coefficients, torch.ones((), dtype=value.dtype, device=value.device).expand(value.shape))
