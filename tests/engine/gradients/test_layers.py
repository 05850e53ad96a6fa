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
from tests.oracles import one_sample_gradients

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


@given(n=samples, positions=st.lists(small, max_size=2), i=small, o=small, bias=st.booleans())
def test_layer_linear(n: int, positions: list[int], i: int, o: int, bias: bool, device: torch.device) -> None:
    check_layer(nn.Linear(i, o, bias=bias), (randn(n, *positions, i),), device)


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


@given(n=samples, t=st.integers(1, 9), vocabulary=st.integers(1, 5), width=small, padded=st.booleans())
def test_layer_embedding(
    n: int, t: int, vocabulary: int, width: int, padded: bool, device: torch.device
) -> None:
    tokens = torch.randint(vocabulary, (n, t))
    check_layer(nn.Embedding(vocabulary, width, padding_idx=0 if padded else None), (tokens,), device)


def test_layer_embedding_repeated_token(device: torch.device) -> None:
    check_layer(nn.Embedding(4, 3), (torch.full((2, 6), 2),), device)


def test_layer_embedding_one_token_a_sample(device: torch.device) -> None:
    check_layer(nn.Embedding(4, 3), (torch.tensor([1, 3, 1]),), device)


@given(n=samples, positions=st.lists(small, max_size=2), i=small)
def test_layer_bias_only(n: int, positions: list[int], i: int, device: torch.device) -> None:
    layer = nn.Linear(i, 3)
    layer.weight.requires_grad_(False)
    check_layer(layer, (randn(n, *positions, i),), device)


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


class Tied(nn.Module):
    """An embedding that is the output head too, with something between them."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.between = nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.between(self.embedding(tokens))))


@given(n=samples, t=st.integers(1, 6), vocabulary=st.integers(2, 5), width=small)
def test_layer_tied_embedding_and_head(
    n: int, t: int, vocabulary: int, width: int, device: torch.device
) -> None:
    check_layer(Tied(vocabulary, width), (torch.randint(vocabulary, (n, t)),), device)


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


@pytest.mark.parametrize("times", [2, 3])
def test_layer_linear_used_repeatedly(times: int, device: torch.device) -> None:
    check_layer(Repeated(nn.Linear(3, 3), times), (randn(4, 5, 3),), device)


def test_layer_convolution_used_twice(device: torch.device) -> None:
    check_layer(Repeated(nn.Conv2d(2, 2, kernel_size=3, padding=1), 2), (randn(3, 2, 5, 4),), device)


def test_layer_norm_used_twice(device: torch.device) -> None:
    check_layer(Repeated(perturbed(nn.LayerNorm(4)), 2), (randn(3, 5, 4),), device)


class ThereAndBack(nn.Module):
    """One weight as it is, and then transposed."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(F.linear(x, self.weight)), self.weight.t())


@pytest.mark.parametrize("shape", [(4, 3), (4, 5, 3)], ids=["vectors", "positions"])
def test_layer_weight_and_its_transpose(shape: tuple[int, ...], device: torch.device) -> None:
    check_layer(ThereAndBack(3, 2), (randn(*shape),), device)


class Einsum(nn.Module):
    """A bare parameter in an einsum: a projection into heads."""

    def __init__(self, equation: str, *shape: int) -> None:
        super().__init__()
        self.equation = equation
        self.weight = nn.Parameter(torch.randn(*shape))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.einsum(self.equation, x, self.weight))


@pytest.mark.parametrize(
    ("equation", "shape"),
    [("nti,iho->nhto", (3, 2, 4)), ("nti,ti->nt", (5, 3)), ("nti,tio->no", (5, 3, 2)), ("nti,s->nis", (6,))],
)
def test_layer_einsum_with_bare_parameter(
    equation: str, shape: tuple[int, ...], device: torch.device
) -> None:
    check_layer(Einsum(equation, *shape), (randn(4, 5, 3),), device)


class Scaled(nn.Module):
    """Bare parameters in arithmetic: broadcast, and the same one more than once."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(width))
        self.shift = nn.Parameter(torch.randn(1, width))
        self.gate = nn.Parameter(torch.randn(()))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.gate) * x * self.scale + self.shift * self.scale


def test_layer_bare_parameters_in_arithmetic(device: torch.device) -> None:
    check_layer(Scaled(3), (randn(4, 5, 3),), device)


class LowRank(nn.Module):
    """A frozen weight with a trained product of two thin matrices added, in either order of the
    multiplications.
    """

    def __init__(self, inputs: int, outputs: int, rank: int, merged: bool) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, inputs))
        self.up = nn.Parameter(torch.randn(outputs, rank))
        self.merged = merged

    def forward(self, x: Tensor) -> Tensor:
        if self.merged:
            return F.linear(x, self.base.weight + self.up @ self.down, self.base.bias)
        return self.base(x) + x @ self.down.t() @ self.up.t()


@pytest.mark.parametrize("merged", [False, True], ids=["beside", "merged"])
@pytest.mark.parametrize("shape", [(4, 6), (4, 5, 6)], ids=["vectors", "positions"])
def test_layer_low_rank_update_of_frozen_weight(
    merged: bool, shape: tuple[int, ...], device: torch.device
) -> None:
    check_layer(LowRank(6, 5, 2, merged), (randn(*shape),), device)


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


def test_loss_with_weight_penalty(device: torch.device) -> None:
    """A penalty on a weight adds the same to every sample's gradient, beside the factors that stay un-run."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(device, torch.float64)
    inputs, target = randn(5, 3).to(device, torch.float64), torch.randint(2, (5,), device=device)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target) + 0.1 * model[0].weight.square().sum()

    grads = deferred_gradients(model, loss, (inputs,), target)
    norms, values = grads.square_norms(per="parameter"), grads.materialise()
    for name, expected in one_sample_gradients(model, loss, (inputs,), target).items():
        torch.testing.assert_close(values[name], expected)
        torch.testing.assert_close(norms[name].sqrt(), expected.flatten(1).norm(dim=1))
