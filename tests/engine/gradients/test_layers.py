"""Deferred gradients of single layers, over the shapes and options that the layer takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.engine.gradients.agreement import check_layer, deferred_gradients

CONVOLUTIONS = {
    (1, False): nn.Conv1d,
    (2, False): nn.Conv2d,
    (3, False): nn.Conv3d,
    (1, True): nn.ConvTranspose1d,
    (2, True): nn.ConvTranspose2d,
    (3, True): nn.ConvTranspose3d,
}

samples = st.integers(1, 4)
small = st.integers(1, 4)


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[int, bool, dict[str, Any], list[int]]:
    """Dimensions, transposed or not, the layer's arguments, and the input's shape without the batch axis."""
    dimensions, transposed, groups = draw(st.integers(1, 3)), draw(st.booleans()), draw(st.integers(1, 3))

    def per_axis(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.integers(low, high)) for _ in range(dimensions))

    kernel, stride, padding, dilation = per_axis(1, 3), per_axis(1, 3), per_axis(0, 2), per_axis(1, 2)
    arguments: dict[str, Any] = {
        "in_channels": groups * draw(st.integers(1, 2)),
        "out_channels": groups * draw(st.integers(1, 3)),
        "kernel_size": kernel,
        "stride": stride,
        "padding": padding,
        "dilation": dilation,
        "groups": groups,
        "bias": draw(st.booleans()),
    }
    reach = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    if transposed:
        arguments["output_padding"] = tuple(
            draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True)
        )
        # The output, (size - 1) * stride - 2 * padding + reach + 1, must not be empty.
        smallest = [max(1, -(-(2 * p - r) // s) + 1) for p, r, s in zip(padding, reach, stride, strict=True)]
    else:
        smallest = [max(1, r + 1 - 2 * p) for p, r in zip(padding, reach, strict=True)]
    sizes = [size + draw(st.integers(0, 3)) for size in smallest]
    return dimensions, transposed, arguments, [arguments["in_channels"], *sizes]


@given(n=samples, convolution=convolutions())
def test_layer_convolution(
    n: int, convolution: tuple[int, bool, dict[str, Any], list[int]], device: torch.device
) -> None:
    dimensions, transposed, arguments, shape = convolution
    check_layer(CONVOLUTIONS[dimensions, transposed](**arguments), (randn(n, *shape),), device)


@pytest.mark.parametrize("kernel_size", [3, 4])
def test_layer_convolution_padding_same(kernel_size: int, device: torch.device) -> None:
    check_layer(nn.Conv2d(2, 3, kernel_size, padding="same"), (randn(3, 2, 5, 6),), device)


def perturbed(layer: nn.Module) -> nn.Module:
    """The layer with random affine parameters and statistics, as fresh ones are all ones and zeros."""
    for value in layer.state_dict().values():
        if value.is_floating_point():
            value.uniform_(0.5, 2)
    return layer.eval()


@given(
    n=samples,
    positions=st.lists(small, max_size=2),
    normalised=st.lists(st.integers(2, 4), min_size=1, max_size=2),
    bias=st.booleans(),
)
def test_layer_layer_norm(
    n: int, positions: list[int], normalised: list[int], bias: bool, device: torch.device
) -> None:
    check_layer(perturbed(nn.LayerNorm(normalised, bias=bias)), (randn(n, *positions, *normalised),), device)


@given(
    n=samples,
    groups=st.integers(1, 3),
    each=st.integers(1, 2),
    sizes=st.lists(st.integers(2, 4), min_size=1, max_size=3),
)
def test_layer_group_norm(n: int, groups: int, each: int, sizes: list[int], device: torch.device) -> None:
    check_layer(perturbed(nn.GroupNorm(groups, groups * each)), (randn(n, groups * each, *sizes),), device)


@given(n=samples, channels=small, sizes=st.lists(small, max_size=3))
def test_layer_batch_norm_in_eval(n: int, channels: int, sizes: list[int], device: torch.device) -> None:
    layer = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[len(sizes)]
    check_layer(perturbed(layer(channels)), (randn(n, channels, *sizes),), device)


class Repeated(nn.Module):
    """The same layer, `times` times."""

    def __init__(self, layer: nn.Module, times: int) -> None:
        super().__init__()
        self.layer = layer
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = torch.tanh(self.layer(x))
        return x


def test_layer_convolution_used_twice(device: torch.device) -> None:
    check_layer(Repeated(nn.Conv2d(2, 2, kernel_size=3, padding=1), 2), (randn(3, 2, 5, 4),), device)


def test_layer_norm_used_twice(device: torch.device) -> None:
    check_layer(Repeated(perturbed(nn.LayerNorm(4)), 2), (randn(3, 5, 4),), device)


def test_frozen_parameters_have_no_gradient(device: torch.device) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(device)
    model[0].requires_grad_(False)
    inputs = (torch.randn(5, 3, device=device),)
    grads = deferred_gradients(
        model, F.cross_entropy, inputs, torch.zeros(5, dtype=torch.int64, device=device)
    )
    assert set(grads.materialise()) == {"2.weight", "2.bias"}
    assert set(grads.square_norms(per="parameter")) == {"2.weight", "2.bias"}


def test_unused_parameter_has_a_zero_gradient(device: torch.device) -> None:
    model = nn.Linear(3, 2)
    model.unused = nn.Parameter(torch.randn(4))
    check_layer(model, (randn(3, 3),), device)
