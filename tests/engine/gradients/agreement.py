"""Every query of the engine beside the same number from gradients that were built one sample at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from psgrad.engine.execution.objective import Objective
from psgrad.engine.gradients import PerSampleGradients, per_sample_gradients
from tests.oracles import Gradients, Loss, one_sample_gradients

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


@dataclass(frozen=True)
class Answers:
    """What the engine says to every query; norms are square roots, in the order of the samples."""

    norms: Tensor
    parameter_norms: Gradients
    dot: Tensor
    weighted_sum: Gradients
    materialised: Gradients


def answers(grads: PerSampleGradients, weights: Tensor, vector: Gradients) -> Answers:
    return Answers(
        norms=grads.square_norms().sqrt(),
        parameter_norms={name: square.sqrt() for name, square in grads.square_norms(per="parameter").items()},
        dot=grads.dot(vector),
        weighted_sum=grads.weighted_sum(weights),
        materialised=grads.materialise(),
    )


def joined(chunks: list[Answers]) -> Answers:
    """The answers for all samples from those for consecutive chunks: sums add up, everything else is strung
    together.
    """

    def strung(parts: list[Gradients]) -> Gradients:
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    return Answers(
        norms=torch.cat([chunk.norms for chunk in chunks]),
        parameter_norms=strung([chunk.parameter_norms for chunk in chunks]),
        dot=torch.cat([chunk.dot for chunk in chunks]),
        weighted_sum={
            name: torch.stack([chunk.weighted_sum[name] for chunk in chunks]).sum(0)
            for name in chunks[0].weighted_sum
        },
        materialised=strung([chunk.materialised for chunk in chunks]),
    )


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


def assert_answers_agree(
    actual: Answers, expected: Gradients, weights: Tensor, vector: Gradients, tolerance: float
) -> None:
    """Hold every answer against the materialised float64 gradients `expected`, name -> [n, *shape].

    An error is relative to the quantity itself; for a dot product to the sum of the absolute products, as its
    terms cancel.
    """
    every, direction = flat(expected), flat({name: value.double()[None] for name, value in vector.items()})[0]
    whole = every.norm(dim=1)
    assert_close("norms", actual.norms, whole, whole, tolerance)

    norms = {name: rows(gradient).norm(dim=1) for name, gradient in expected.items()}
    assert actual.parameter_norms.keys() == norms.keys()
    for name, norm in norms.items():
        scale = torch.maximum(norm, SMALLEST_SHARE * whole)
        assert_close(f"norm of {name}", actual.parameter_norms[name], norm, scale, tolerance)

    assert_close("dot", actual.dot, every @ direction, every.abs() @ direction.abs(), tolerance)
    assert_vectors_close("materialised", actual.materialised, expected, whole, tolerance)

    sums = {
        name: torch.einsum("n,n...->...", weights.double(), gradient)[None]
        for name, gradient in expected.items()
    }
    summed = {name: value[None] for name, value in actual.weighted_sum.items()}
    assert_vectors_close("weighted sum", summed, sums, flat(sums).norm(dim=1), tolerance)


def draw_weights_and_vector(expected: Gradients, dtype: torch.dtype) -> tuple[Tensor, Gradients]:
    """Weights [n] in 0..1, such as clipping gives, and a random vector of the parameters' shapes."""
    some = next(iter(expected.values()))
    weights = torch.rand(len(some), dtype=dtype, device=some.device)
    return weights, {name: torch.randn_like(gradient[0], dtype=dtype) for name, gradient in expected.items()}


def check_layer(model: nn.Module, inputs: tuple[Tensor, ...], device: torch.device) -> None:
    """Every query of a float64 network against the loop; each sample's loss is its scaled mean squared
    output.
    """
    model, inputs = model.to(device, torch.float64), tuple(value.to(device) for value in inputs)
    target = torch.linspace(0.5, 2, len(inputs[0]), dtype=torch.float64, device=device)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return target * output.square().mean()

    expected = one_sample_gradients(model, loss, inputs, target)
    weights, vector = draw_weights_and_vector(expected, torch.float64)
    actual = answers(deferred_gradients(model, loss, inputs, target), weights, vector)
    assert_answers_agree(actual, expected, weights, vector, TOLERANCES[torch.float64])


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
