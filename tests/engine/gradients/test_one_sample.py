"""What a person meets who writes the loss of one sample: what gradients print, and layers that need a batch
axis.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from psgrad.engine.gradients import PerSampleGradients, per_sample_gradients
from psgrad.engine.transforms import functional_call
from psgrad.errors import TransformError

X, Y = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 0, 1, 1])


def loss_of(model: nn.Module, batch_axis: bool) -> Callable[..., torch.Tensor]:
    def loss(params: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        inputs, target = (x[None], y[None]) if batch_axis else (x, y)
        return F.cross_entropy(functional_call(model, params, (inputs,)), target)

    return loss


def gradients(model: nn.Module, batch_axis: bool) -> PerSampleGradients:
    params = {name: value.detach() for name, value in model.named_parameters()}
    return per_sample_gradients(loss_of(model, batch_axis), params, X, Y)


LAYERS = {
    "GroupNorm": nn.GroupNorm(2, 4),
    "BatchNorm": nn.BatchNorm1d(4).eval(),
    "InstanceNorm of images": nn.InstanceNorm2d(4),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_functional_call_layer_without_its_batch_axis_says_what_to_do(layer: str) -> None:
    with pytest.raises((RuntimeError, ValueError)) as raised:
        gradients(nn.Sequential(nn.Linear(3, 4), LAYERS[layer]), batch_axis=False)
    notes = getattr(raised.value, "__notes__", [])
    assert any("x[None]" in note and "y[None]" in note for note in notes)


def test_functional_call_other_errors_have_no_note() -> None:
    with pytest.raises(Exception) as raised:  # noqa: PT011 - whatever the layer says
        gradients(nn.Sequential(nn.Linear(7, 4)), batch_axis=True)
    assert not getattr(raised.value, "__notes__", [])


@pytest.mark.parametrize("layer", ["GroupNorm", "BatchNorm"])
def test_loss_with_a_batch_axis_of_one_is_that_of_the_sample(layer: str) -> None:
    model = nn.Sequential(nn.Linear(3, 4), LAYERS[layer])
    found = gradients(model, batch_axis=True).materialise()
    params = {name: value.detach() for name, value in model.named_parameters()}
    for row in range(len(X)):
        alone = {name: value.requires_grad_() for name, value in params.items()}
        output = torch.func.functional_call(model, alone, (X[row : row + 1],))
        expected = torch.autograd.grad(F.cross_entropy(output, Y[row : row + 1]), [*alone.values()])
        for name, value in zip(alone, expected, strict=True):
            torch.testing.assert_close(found[name][row], value)


@pytest.mark.parametrize("depth", [1, 40])
def test_gradients_print_three_lines(depth: int) -> None:
    model = nn.Sequential(*(nn.Linear(3, 3) for _ in range(depth)))
    found = gradients(model, batch_axis=True)
    lines = repr(found).splitlines()
    assert len(lines) == 3
    assert max(map(len, lines)) <= 110
    assert lines[0] == "PerSampleGradients of 5 samples, not materialised"
    numbers = sum(each.numel() for each in model.parameters())
    assert f"{numbers:,} numbers in {2 * depth:,} parameters: 0.weight, 0.bias" in lines[1]
    queries = lines[2].split(": ")[1].split(", ")
    assert all(callable(getattr(found, query)) for query in queries)


def test_per_sample_gradients_complex_parameter_is_refused_by_name() -> None:
    weight = torch.ones(3, dtype=torch.complex64)
    with pytest.raises(TransformError, match="the parameter weight is complex"):
        per_sample_gradients(lambda p, x: (p["weight"] * x).abs().sum(), {"weight": weight}, X)
