"""What the engine is measured against: slow or rival ways to the same numbers."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from psgrad.engine.execution.self_check import differentiable_kernels

Loss = Callable[[Tensor, Tensor], Tensor]
Gradients = dict[str, Tensor]


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that want a gradient; one that has several names goes by its first."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def one_sample_gradients(
    model: nn.Module, loss: Loss, inputs: tuple[Tensor, ...], target: Tensor
) -> Gradients:
    """Parameter name to the gradient of each sample's loss [n, *shape], by one backward pass a sample."""
    parameters = trainable(model)
    rows = []
    for sample in range(len(target)):
        with differentiable_kernels(model):
            output = model(*(value[sample : sample + 1] for value in inputs))
        output = tree_map(lambda value: value[0], output)
        rows.append(
            torch.autograd.grad(
                loss(output, target[sample]), list(parameters.values()), materialize_grads=True
            )
        )
    return {
        name: torch.stack(column) for name, column in zip(parameters, zip(*rows, strict=True), strict=True)
    }
