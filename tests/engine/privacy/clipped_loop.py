"""What clipped sums are held against: each record's gradient by itself, clipped and added up in float64."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from psgrad.engine.privacy.clipping import MARGIN, Clipping
from tests.oracles import Gradients, one_sample_gradients
from tests.small_models import Architecture

Batch = tuple[tuple[Tensor, ...], Tensor]


def doubled(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(value.double() if value.is_floating_point() else value for value in inputs)


def gradients_of(architecture: Architecture, model: nn.Module, batch: Batch) -> Gradients:
    """name -> [n, *shape] float64: a backward pass a record."""
    inputs, target = batch
    return one_sample_gradients(copy.deepcopy(model).double(), architecture.loss, doubled(inputs), target)


def median_norm(gradients: Gradients) -> float:
    """A bound at which half of the records are clipped."""
    return float(
        torch.stack([value.flatten(1).square().sum(1) for value in gradients.values()]).sum(0).sqrt().median()
    )


def clipped_loop(gradients: Gradients, clipping: Clipping) -> Gradients:
    """name -> [*shape]: a record after the other, each group scaled to its bound, less the margin, where its
    norm is larger.
    """
    sums = {name: torch.zeros_like(value[0]) for name, value in gradients.items()}
    for record in range(len(next(iter(gradients.values())))):
        for group in clipping.groups:
            norm = torch.cat([gradients[name][record].flatten() for name in group.parameters]).norm()
            factor = min(1.0, group.bound * (1 - MARGIN) / float(norm)) if norm > 0 else 1.0
            for name in group.parameters:
                sums[name] += factor * gradients[name][record]
    return sums


def distance(sums: Mapping[str, Tensor], others: Mapping[str, Tensor] | None = None) -> float:
    """The Euclidean distance of two sums in all parameters together, or the norm of one."""
    assert others is None or sums.keys() == others.keys()
    parts = [
        value.double() - (others[name].double() if others is not None else 0) for name, value in sums.items()
    ]
    return float(torch.cat([part.flatten() for part in parts]).norm())


def group_norms(sums: Mapping[str, Tensor], clipping: Clipping) -> list[float]:
    return [distance({name: sums[name] for name in group.parameters}) for group in clipping.groups]
