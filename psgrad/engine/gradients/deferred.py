"""A deferred gradient: a sum of terms, each with a layout that maps its axes to the parameter's; or the
gradients of groups of samples that were computed separately, because their lengths or their branches of the
loss differ.

Each query runs for one group after the other, and no factor is padded to the positions of another group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch

from psgrad.engine.gradients.layout import AxisLayout
from psgrad.engine.gradients.terms import Dense, Image, Term, narrow
from psgrad.engine.gradients.terms import Placed as Placed
from psgrad.engine.gradients.terms.placed import oriented as oriented
from psgrad.engine.transforms.batch_values import Batch
from psgrad.engine.transforms.private_torch import tree_map
from psgrad.ragged import padded_and_joined


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

    def mapped(self, change: Callable[[DeferredGradient], DeferredGradient]) -> DeferredGradient:
        """`change` applied to the gradient, or to the gradient of each group of samples."""
        return change(self)

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


SampleIndices = torch.Tensor
"""[k] int64: the indices of a group's samples among all samples. Each sample is in one group."""


class GroupedGradient(DeferredGradient):
    """The gradients of several groups of samples in one parameter. It has no terms of its own.

    Groups of a group, whose samples disagree on a second branch, become groups of this gradient: queries that
    go through the groups expect terms there.

    Attributes:
        groups: the places of each group's samples, and their gradients.
        count: n, the number of samples of all groups.
    """

    count: int

    def __init__(self, groups: Iterable[tuple[SampleIndices, DeferredGradient]]) -> None:
        parts = tuple(
            part
            for places, gradient in groups
            for part in (
                [(places[inner], each) for inner, each in gradient.groups]
                if gradient.groups
                else [(places, gradient)]
            )
        )
        first, count = parts[0][1], sum(len(places) for places, _ in parts)
        vars(self).update(
            groups=parts, terms=(), count=count, shape=first.shape, dtype=first.dtype, device=first.device
        )

    @property
    def is_zero(self) -> bool:
        return all(gradient.is_zero for _, gradient in self.groups)

    @property
    def factors(self) -> list[torch.Tensor]:
        return [factor for _, gradient in self.groups for factor in gradient.factors]

    def at(self, samples: slice | torch.Tensor, dtype: torch.dtype | None = None) -> DeferredGradient:
        wanted = torch.arange(self.count, device=self.device)[samples]
        place, owner = torch.empty(2, self.count, dtype=torch.int64, device=self.device)
        for number, (places, _) in enumerate(self.groups):
            place[places], owner[places] = torch.arange(len(places), device=self.device), number
        parts = []
        for number, (_, gradient) in enumerate(self.groups):
            here = torch.nonzero(owner[wanted] == number).squeeze(1)
            if len(here):
                parts.append((here, gradient.at(place[wanted[here]], dtype)))
        if not parts:
            return self.groups[0][1].at(wanted, dtype)
        return parts[0][1] if len(parts) == 1 else GroupedGradient(parts)

    def mapped(self, change: Callable[[DeferredGradient], DeferredGradient]) -> DeferredGradient:
        return GroupedGradient((places, change(gradient)) for places, gradient in self.groups)

    def describe(self) -> str:
        return in_short(gradient.describe() for _, gradient in self.groups)

    @property
    def lost_at(self) -> str:
        return next((gradient.lost_at for _, gradient in self.groups if gradient.lost_at), "")

    def weighted_sum(self, weights: torch.Tensor) -> torch.Tensor:
        first, *others = [gradient.weighted_sum(weights[places]) for places, gradient in self.groups]
        for other in others:
            first = first + other
        return first

    def materialise(self) -> torch.Tensor:
        values = [
            gradient.new_zeros(len(places)) if gradient.is_zero else gradient.materialise()
            for places, gradient in self.groups
        ]
        return in_order(values, [places for places, _ in self.groups])


def in_short(words: Iterable[str]) -> str:
    """The different words, each once, separated by bars."""
    return " | ".join(dict.fromkeys(words))


def in_order(parts: Sequence[Any], groups: Sequence[SampleIndices]) -> Any:
    """The results of all groups of samples (pytrees of tensors, sample axis in front), joined in the samples'
    order. Tensors whose other axes differ in length are padded: floating-point ones with NaN, others with
    zeros.

    A result may have several entries for each sample, which are neighbours.
    """
    order = torch.cat(list(groups)).argsort()

    def joined(*items: Any) -> Any:
        if not isinstance(items[0], torch.Tensor):
            return items[0]
        whole = padded_and_joined(items, float("nan") if items[0].is_floating_point() else 0)
        each = len(whole) // max(len(order), 1)
        if each == 1:
            return whole.index_select(0, order.to(whole.device))
        return whole.unflatten(0, (-1, each)).index_select(0, order.to(whole.device)).flatten(0, 1)

    return tree_map(joined, *parts)
