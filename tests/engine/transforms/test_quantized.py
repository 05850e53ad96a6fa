"""Frozen weights of whole numbers, packed bits and eight-bit floats: gradients of what is around them, beside
PyTorch's autograd on the same weights spelled out.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from psgrad.engine.execution.objective import Objective
from psgrad.engine.gradients import per_sample_gradients
from psgrad.engine.transforms import grad, jvp, vmap
from psgrad.errors import TransformError
from tests.oracles import one_sample_gradients

WIDTH, CLASSES = 64, 3


def frozen(value: Tensor) -> nn.Parameter:
    return nn.Parameter(value, requires_grad=False)


class Quantised(nn.Module):
    """A weight with a scale a row, in eight bits; `spelled_out` is the weight that it stands for."""

    def __init__(self, dtype: torch.dtype = torch.int8) -> None:
        super().__init__()
        weight = torch.randn(WIDTH, WIDTH)
        self.scale = frozen(weight.abs().amax(1) / 127)
        scaled = weight / self.scale[:, None]
        self.weight = frozen(scaled.round().to(dtype) if dtype == torch.int8 else scaled.to(dtype))

    def spelled_out(self) -> Tensor:
        return self.weight.float() * self.scale[:, None]

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale[:, None])


class PackedInt8(Quantised):
    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH).contiguous()
        return torch._weight_int8pack_mm(rows, self.weight, self.scale).reshape(x.shape)


class PackedInt4(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        digits = torch.randint(16, (WIDTH, WIDTH), dtype=torch.int32)
        scale, zero = 0.1 * torch.rand(WIDTH // 32, WIDTH), torch.randn(WIDTH // 32, WIDTH)
        self.weight = frozen(torch.ops.aten._convert_weight_to_int4pack_for_cpu(digits, 2))
        self.scale_and_zero = frozen(torch.stack([scale, zero], -1).contiguous())
        self.digits, self.scale, self.zero = digits, scale, zero

    def spelled_out(self) -> Tensor:
        scale, zero = (x.t().repeat_interleave(32, 1) for x in (self.scale, self.zero))
        return (self.digits - 8) * scale + zero

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH).contiguous()
        product = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self.weight, 32, self.scale_and_zero)
        return product.reshape(x.shape)


class RoundedInputs(Quantised):
    """Inputs of whole numbers too, with a scale a row: all that has a derivative are the scales."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        scale = rows.abs().amax(1, keepdim=True) / 127
        product = torch._int_mm((rows / scale).round().to(torch.int8), self.weight.t())
        return (product.to(x.dtype) * scale * self.scale).reshape(x.shape)


class Float8Inputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = frozen(torch.randn(WIDTH, WIDTH).to(torch.float8_e4m3fn))

    def forward(self, x: Tensor) -> Tensor:
        one = torch.ones(())
        rows = x.reshape(-1, WIDTH).to(torch.float8_e4m3fn)
        return torch._scaled_mm(rows, self.weight.t(), one, one, out_dtype=x.dtype).reshape(x.shape)


class SpelledOut(nn.Module):
    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = frozen(weight)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class Network(nn.Module):
    """The quantised layer between two that are differentiated."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(8, WIDTH), layer, nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(self.first(x).tanh()).tanh()).mean(1)


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "int8, cast up": Quantised,
    "float8_e4m3fn, cast up": lambda: Quantised(torch.float8_e4m3fn),
    "float8_e5m2, cast up": lambda: Quantised(torch.float8_e5m2),
    "_weight_int8pack_mm": PackedInt8,
    "_weight_int4pack_mm_for_cpu": PackedInt4,
    "_int_mm": RoundedInputs,
}


@pytest.mark.parametrize("name", LAYERS)
def test_quantised_weights_are_constants_of_the_forward_pass(name: str) -> None:
    torch.manual_seed(0)
    network = Network(LAYERS[name]())
    x, target = torch.randn(4, 5, 8), torch.tensor([0, 1, 2, 0])
    objective = Objective(network, F.cross_entropy)
    assert set(objective.params) == {"first.weight", "first.bias", "last.weight", "last.bias"}
    found = per_sample_gradients(objective.loss, objective.params, (x,), target, has_aux=True)
    if name != "_int_mm":  # which autograd follows itself
        network.layer = SpelledOut(network.layer.spelled_out())
    expected = one_sample_gradients(network, F.cross_entropy, (x,), target)
    torch.testing.assert_close(found.materialise(), expected, rtol=1e-4, atol=1e-6)
    flat = torch.cat([value.flatten(1) for value in expected.values()], 1).double()
    torch.testing.assert_close(found.square_norms(), flat.square().sum(1), rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", [PackedInt8, PackedInt4])
def test_products_with_packed_weights_in_forward_mode(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    layer = kind()
    x, direction = torch.randn(2, WIDTH), torch.randn(2, WIDTH)
    value, tangent = jvp(layer, (x,), (direction,))
    torch.testing.assert_close(value, layer(x))
    torch.testing.assert_close(tangent, F.linear(direction, layer.spelled_out()), rtol=1e-4, atol=1e-4)


def test_scales_beside_an_int8_weight_have_a_gradient() -> None:
    torch.manual_seed(0)
    layer, x = PackedInt8(), torch.randn(3, 5, WIDTH)

    def loss(scale: Tensor, x: Tensor) -> Tensor:
        return torch._weight_int8pack_mm(x, layer.weight, scale).sin().sum()

    found = vmap(grad(loss), in_dims=(None, 0))(layer.scale, x)
    scale = layer.scale.clone().requires_grad_()
    for row, gradient in zip(x, found, strict=True):
        product = F.linear(row, layer.weight.float()) * scale
        (expected,) = torch.autograd.grad(product.sin().sum(), scale)
        torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-2)


def test_int_mm_of_each_samples_own_matrices() -> None:
    a, b = (torch.randint(-128, 128, shape, dtype=torch.int8) for shape in ((3, 20, 64), (3, 64, 16)))
    found = vmap(torch._int_mm)(a, b)
    assert torch.equal(found, torch.stack([torch._int_mm(x, y) for x, y in zip(a, b, strict=True)]))


def test_a_packed_weight_of_each_samples_own_is_refused() -> None:
    layer = PackedInt8()
    weights = layer.weight.expand(2, WIDTH, WIDTH)
    with pytest.raises(TransformError, match="a quantised weight of each sample's own"):
        vmap(lambda w, x: torch._weight_int8pack_mm(x, w, layer.scale))(weights, torch.randn(2, 3, WIDTH))


def test_float8_inputs_are_refused_by_name() -> None:
    network = Network(Float8Inputs())
    objective = Objective(network, F.cross_entropy)
    with pytest.raises(TransformError, match=r"a product of float8 matrices \(_scaled_mm\)"):
        per_sample_gradients(
            objective.loss, objective.params, (torch.randn(2, 5, 8),), torch.tensor([0, 1]), has_aux=True
        )
