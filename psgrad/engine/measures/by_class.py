"""Gradients that are values, summed class by class and multiplied with a vector of each class, without being put in order first."""

from __future__ import annotations

import torch

from psgrad.engine.gradients.placed import DeferredGradient
from psgrad.engine.gradients.terms import Dense, accumulating

# Numbers of a parameter that all classes together are computed of at once, each sample's with those of its class beside it.
_FEW = 1024


def is_value(gradient: DeferredGradient, small: bool = False) -> bool:
    """Whether a gradient is there, written out; if `small`, with few numbers."""
    whole = len(gradient.terms) == 1 and isinstance(gradient.terms[0].term, Dense)
    return whole and not (small and gradient.shape.numel() > _FEW)


def sums_of_values(gradient: DeferredGradient, classes: torch.Tensor, groups: int) -> torch.Tensor:
    """[groups, numel] of a gradient that is a value, of samples that are finite, and their classes [n] below `groups`."""
    value = accumulating(_value(gradient))
    if value.shape[1] > _FEW and value.device.type == "cpu":  # row by row; on a GPU the order of additions would be left to chance
        return torch.zeros(groups, value.shape[1], dtype=value.dtype).index_add_(0, classes, value)
    one_hot = classes.unsqueeze(0) == torch.arange(groups, device=classes.device).unsqueeze(1)
    return one_hot.to(value.dtype) @ value


def products_of_values(gradient: DeferredGradient, classes: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
    """[n] of a gradient that is a small value: its inner products with the vectors [groups, numel] of the samples' classes [n]."""
    value = accumulating(_value(gradient))
    return (value * vectors.to(value.dtype)[classes]).sum(1)


def _value(gradient: DeferredGradient) -> torch.Tensor:
    """[n, numel]"""
    (placed,) = gradient.terms
    value = placed.layout.apply(placed.term.materialise(), lead=1)
    return value.reshape(len(value), gradient.shape.numel())
