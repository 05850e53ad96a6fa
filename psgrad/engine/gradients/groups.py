"""One gradient from the gradients of groups of samples that were computed separately, because their lengths
or their branches of the loss differ.

Each query runs for one group after the other, and no factor is padded to the positions of another group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

import torch

from psgrad.engine.gradients.deferred import DeferredGradient, Placed, merged
from psgrad.engine.transforms.private_torch import tree_map
from psgrad.ragged import padded_and_joined

Places = torch.Tensor
"""[k] int64: the indices of a group's samples among all samples. Each sample is in one group."""


class GroupedGradient(DeferredGradient):
    """The gradients of several groups of samples in one parameter.

    Attributes:
        groups: the places of each group's samples, and their gradients.
        count: n, the number of samples of all groups.
    """

    count: int

    def __init__(self, groups: Iterable[tuple[Places, DeferredGradient]]) -> None:
        parts = tuple(groups)
        first, count = parts[0][1], sum(len(places) for places, _ in parts)
        vars(self).update(
            groups=parts, count=count, shape=first.shape, dtype=first.dtype, device=first.device
        )

    @cached_property
    def terms(self) -> tuple[Placed, ...]:  # type: ignore[override]
        """The terms of all groups, each padded with zeros to all samples. Exact, but each group then costs as
        much as all samples: queries that can work by groups do not use it.
        """
        each = [
            Placed(placed.term.among(places, self.count), placed.layout)
            for places, gradient in self.groups
            for placed in gradient.terms
        ]
        return tuple(merged(each))

    @property
    def is_zero(self) -> bool:
        return all(gradient.is_zero for _, gradient in self.groups)

    @property
    def factors(self) -> list[torch.Tensor]:
        return [factor for _, gradient in self.groups for factor in gradient.factors]

    def at(self, samples: slice | torch.Tensor) -> DeferredGradient:
        wanted = torch.arange(self.count, device=self.device)[samples]
        place, owner = torch.empty(2, self.count, dtype=torch.int64, device=self.device)
        for number, (places, _) in enumerate(self.groups):
            place[places], owner[places] = torch.arange(len(places), device=self.device), number
        parts = []
        for number, (_, gradient) in enumerate(self.groups):
            here = torch.nonzero(owner[wanted] == number).squeeze(1)
            if len(here):
                parts.append((here, gradient.at(place[wanted[here]])))
        if not parts:
            return self.groups[0][1].at(wanted)
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


def in_order(parts: Sequence[Any], groups: Sequence[Places]) -> Any:
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
