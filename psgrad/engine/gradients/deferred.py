"""A deferred gradient: a sum of terms, each with a layout that maps its axes to the parameter's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from psgrad.engine.gradients.layout import AxisLayout
from psgrad.engine.gradients.terms import Dense, Image, Term, narrow
from psgrad.engine.gradients.terms import Placed as Placed
from psgrad.engine.gradients.terms.placed import oriented as oriented
from psgrad.engine.gradients.terms.term import added
from psgrad.engine.transforms.batch_values import Batch


@dataclass(frozen=True)
class DeferredGradient:
    """A per-sample value that is a sum of terms, [n] x `shape`."""

    terms: tuple[Placed, ...]
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, term: Term, shape: tuple[int, ...] | torch.Size) -> DeferredGradient:
        layout = (
            AxisLayout.identity(term.shape).reshape(shape)
            if tuple(shape) != term.shape
            else AxisLayout.identity(term.shape)
        )
        if layout is None:  # an empty term
            term, layout = Dense(term.factors[0].new_zeros(term.samples, *shape)), AxisLayout.identity(shape)
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

    def new_zeros(self, count: int) -> torch.Tensor:
        """[count, *shape]"""
        return torch.zeros(count, *self.shape, dtype=self.dtype, device=self.device)

    def at(self, samples: slice | torch.Tensor, dtype: torch.dtype | None = None) -> DeferredGradient:
        """The gradient of some of the samples: a slice of n, or their numbers [k]; with its factors cast to
        `dtype`, in which they are multiplied, if it is given.
        """
        terms = tuple(placed.at(samples, dtype) for placed in self.terms)
        return replace(self, terms=terms, dtype=dtype or self.dtype)

    def describe(self) -> str:
        """The orders of contraction of its norms, in words."""
        return " + ".join(placed.term.order() for placed in self.terms) or "zero"

    @property
    def lost_at(self) -> str:
        """The operator that could not be applied to the factors, so that the value was materialised for each
        sample; empty if there was none, or if the gradient never had factors (a bias).
        """
        return next((placed.term.lost_at for placed in self.terms if placed.term.lost_at), "")

    def weighted_sum(self, weights: torch.Tensor) -> torch.Tensor:
        """[*shape]: the sum over samples, each times its weight [n]."""
        if not self.terms:
            return torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        return added([placed.weighted_sum(weights) for placed in self.terms])

    def materialise(self) -> torch.Tensor:
        """[n, *shape]"""
        # Half-precision factors of a float32 gradient are multiplied and summed in float32.
        wide = torch.promote_types(self.dtype, self.terms[0].term.dtype)
        return added([placed.at(slice(None), wide).materialise() for placed in self.terms]).to(self.dtype)


def oriented_if_free(placed: Placed) -> Placed:
    """The term with its elements in the parameter's order if this needs no computation, so that the terms of
    a weight and of its transpose can be merged; else unchanged.
    """
    bare = Placed(placed.term, placed.layout.bare)
    term = oriented(bare)
    layout = AxisLayout.identity(term.shape).reshape(bare.layout.shape) if term is not None else None
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
    shape = tuple(value.shape)
    if not batch.is_mapped(value):
        ones = Dense(torch.ones(batch.size, *(1,) * value.dim(), dtype=value.dtype, device=value.device))
        return Image((Placed.plain(ones),), (value,), torch.mul, shape, True)
    physical = batch.physical(value)
    coefficients = narrow(physical)
    if coefficients.shape == physical.shape:
        return Dense(physical)
    return Image((Placed.plain(Dense(coefficients)),), (), partial(_expanded, shape), shape, True)


def _expanded(shape: tuple[int, ...], values: torch.Tensor) -> torch.Tensor:
    return values.expand(len(values), *shape)
