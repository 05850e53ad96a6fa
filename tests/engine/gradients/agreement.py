"""How far the engine's numbers may be from those of gradients that were built one sample at a time."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from psgrad.engine.execution.objective import Objective
from psgrad.engine.gradients import PerSampleGradients, per_sample_gradients
from tests.oracles import Gradients, Loss

TOLERANCES = {torch.float32: 1e-5, torch.float64: 1e-10}

# The gradient of one parameter may be zero but for rounding, such as that of a bias before a norm: its error
# is then measured against this share of the whole gradient.
SMALLEST_SHARE = 0.01


def deferred_gradients(
    model: nn.Module, loss: Loss, inputs: tuple[Tensor, ...], target: Tensor
) -> PerSampleGradients:
    """The engine's gradients of all the samples in one call."""
    objective = Objective(model, loss)
    return per_sample_gradients(objective.loss, objective.params, inputs, target, has_aux=True)


def rows(gradient: Tensor) -> Tensor:
    """[n, *shape] to [n, entries], for a parameter without axes too."""
    return gradient.reshape(len(gradient), math.prod(gradient.shape[1:]))


def flat(gradients: Gradients) -> Tensor:
    """[n, *shape] for each parameter to [n, entries of all of them]."""
    return torch.cat([rows(gradient) for gradient in gradients.values()], dim=1)


def assert_close(query: str, actual: Tensor, expected: Tensor, scale: Tensor, tolerance: float) -> None:
    """The error of each entry, relative to its scale, stays within the tolerance."""
    assert actual.shape == expected.shape, (
        f"{query}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    )
    if not expected.numel():
        return
    tiny = torch.finfo(torch.float64).tiny
    worst = ((actual.double() - expected).abs() / scale.clamp(min=tiny)).max().item()
    assert worst <= tolerance, f"{query}: relative error {worst:.2e}, at most {tolerance:.0e} expected"


def assert_vectors_close(
    query: str, actual: Gradients, expected: Gradients, whole: Tensor, tolerance: float
) -> None:
    """As `assert_close`, but a parameter's tensor is one vector a row, whose error is measured by its length;
    whole [rows].
    """
    assert actual.keys() == expected.keys()
    for name, vectors in expected.items():
        assert actual[name].shape == vectors.shape, (
            f"{query} of {name}: {tuple(actual[name].shape)}, expected {tuple(vectors.shape)}"
        )
        error = rows(actual[name].double() - vectors).norm(dim=1)
        scale = torch.maximum(rows(vectors).norm(dim=1), SMALLEST_SHARE * whole)
        assert_close(f"{query} of {name}", error, torch.zeros_like(error), scale, tolerance)


class LargestTensor(TorchDispatchMode):
    """The number of elements of the largest tensor that an operator returned. Arguments are not counted. A
    view counts as its storage.
    """

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                self.elements = max(self.elements, leaf.untyped_storage().nbytes() // leaf.element_size())
        return out
