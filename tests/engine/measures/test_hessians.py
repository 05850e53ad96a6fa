"""Traces and extreme eigenvalues of single samples' Hessians, beside torch.func's dense ones."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from psgrad.engine.measures.builtin.curvature import HessianTopEigenvalue, HessianTrace, extreme_eigenvalues
from psgrad.engine.measures.passes import random_signs
from psgrad.errors import MeasureError
from tests.engine.measures.own_passes import columns_of, setting_of
from tests.small_models import ARCHITECTURES, Architecture

pytestmark = pytest.mark.usefixtures("on_device")

N = 7


def small(dtype: torch.dtype = torch.float64) -> tuple[nn.Module, tuple[Tensor, ...], Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3)).to(dtype)
    return model, (torch.randn(N, 3, dtype=dtype),), torch.arange(N) % 3


def dense(model: nn.Module, loss: object, inputs: tuple[Tensor, ...], target: Tensor) -> Tensor:
    """[n, p, p]: each sample's Hessian, by torch.func."""
    params = {name: value.detach() for name, value in model.named_parameters()}
    sizes = {name: value.numel() for name, value in params.items()}

    def loss_of(params: dict[str, Tensor], inputs: tuple[Tensor, ...], target: Tensor) -> Tensor:
        return loss(torch.func.functional_call(model, params, tuple(x[None] for x in inputs))[0], target)

    rows = []
    for sample in range(len(target)):
        blocks = torch.func.hessian(loss_of)(params, tuple(x[sample] for x in inputs), target[sample])
        rows.append(
            torch.cat(
                [torch.cat([blocks[a][b].reshape(sizes[a], sizes[b]) for b in sizes], dim=1) for a in sizes]
            ).detach()
        )
    return torch.stack(rows)


@pytest.mark.long
def test_hessian_exact_of_few_parameters() -> None:
    model, inputs, target = small()
    setting = setting_of(model, F.cross_entropy, inputs, target)
    hessians = dense(model, F.cross_entropy, inputs, target)
    result = columns_of(HessianTrace(probes=64), setting) | columns_of(
        HessianTopEigenvalue(iterations=64), setting
    )
    values = torch.linalg.eigvalsh(hessians)
    torch.testing.assert_close(
        result["hessian_trace"], hessians.diagonal(dim1=1, dim2=2).sum(1), rtol=1e-10, atol=1e-12
    )
    assert not result["hessian_trace_error"].any()
    torch.testing.assert_close(result["hessian_top_eigenvalue"], values[:, -1], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(result["hessian_lowest_eigenvalue"], values[:, 0], rtol=1e-10, atol=1e-12)
    assert (result["hessian_top_residual"] < 1e-10).all()


def test_hessian_trace_equals_hutchinson() -> None:
    model, inputs, target = small()
    measure = HessianTrace(probes=11)
    result = columns_of(measure, setting_of(model, F.cross_entropy, inputs, target, seed=3))
    hessians = dense(model, F.cross_entropy, inputs, target)
    probes = random_signs(3, "hessian_trace", torch.arange(N), hessians.shape[1], 0, 11).double()
    along = torch.einsum("kmp,kpq,kmq->km", probes, hessians, probes)
    torch.testing.assert_close(result["hessian_trace"], along.mean(1), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(
        result["hessian_trace_error"], along.std(1) / math.sqrt(11), rtol=1e-10, atol=1e-12
    )


def test_hessian_ritz_values_and_residuals() -> None:
    model, inputs, target = small()
    values = torch.linalg.eigvalsh(dense(model, F.cross_entropy, inputs, target)).cpu()
    result = columns_of(
        HessianTopEigenvalue(iterations=4), setting_of(model, F.cross_entropy, inputs, target)
    )
    for end in ("top", "lowest"):
        value, residual = result[f"hessian_{end}_eigenvalue"], result[f"hessian_{end}_residual"]
        assert (residual > 1e-6).any()
        assert ((values - value[:, None]).abs().min(1).values <= residual + 1e-12).all()
        assert (value <= values[:, -1] + 1e-12).all()
        assert (value >= values[:, 0] - 1e-12).all()


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda each: each.name)
def test_hessian_products_of_every_architecture(architecture: Architecture) -> None:
    model = architecture.build()
    for table in (each for each in model.modules() if isinstance(each, nn.Embedding)):
        table.padding_idx = 1  # a row that has a tangent, and no gradient
    inputs, target = architecture.batch(2)
    setting = setting_of(model, architecture.loss, inputs, target)
    result = columns_of(HessianTrace(probes=2), setting)
    flat = setting.examples.flat
    probes = random_signs(0, "hessian_trace", torch.arange(2), flat.size, 0, 2)
    params = list(model.parameters())
    for sample in range(2):
        with torch.nn.attention.sdpa_kernel(
            torch.nn.attention.SDPBackend.MATH
        ):  # the others have no second derivative
            output = model(*(x[sample : sample + 1] for x in inputs))[0]
            first = torch.autograd.grad(architecture.loss(output, target[sample]), params, create_graph=True)
        gradient, along = torch.cat([part.flatten() for part in first]), []
        for probe in probes[sample]:
            second = torch.autograd.grad(gradient @ probe, params, retain_graph=True)
            along.append(torch.cat([part.flatten() for part in second]).double() @ probe.double())
        expected = torch.stack(along)
        torch.testing.assert_close(
            result["hessian_trace"][sample],
            expected.mean(),
            rtol=1e-5,
            atol=1e-5 * float(expected.abs().max()),
        )


@pytest.mark.long
def test_hessian_nonfinite_rows() -> None:
    model, inputs, target = small()
    clean = setting_of(model, F.cross_entropy, inputs, target)
    dirty = inputs[0].clone()
    dirty[2, 1], dirty[5, 0] = math.nan, math.inf
    for measure in (HessianTrace(probes=3), HessianTopEigenvalue(iterations=5)):
        result = columns_of(measure, setting_of(model, F.cross_entropy, (dirty,), target))
        expected = columns_of(measure, clean)
        for name, column in result.items():
            assert torch.isnan(column[[2, 5]]).all(), name
            kept = [0, 1, 3, 4, 6]
            torch.testing.assert_close(column[kept], expected[name][kept], rtol=1e-10, atol=1e-12)


def test_hessian_loss_without_curvature_has_zeros() -> None:
    model = nn.Linear(3, 1)
    setting = setting_of(model, lambda output, target: output.sum(), (torch.randn(4, 3),), None)
    result = columns_of(HessianTrace(probes=2), setting) | columns_of(HessianTopEigenvalue(), setting)
    assert all(not column.any() for column in result.values())


def test_hessian_krylov_space_ends_early() -> None:
    """Two eigenvalues in all: the space ends after two steps, and zero is none of them."""
    values = torch.tensor([[2.0, 2, 2, 5, 5, 5], [-3.0, -3, -3, -3, -1, -1]], dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(2, 6, 6, dtype=torch.float64)).Q
    matrices = turn @ torch.diag_embed(values) @ turn.mT
    result, _ = extreme_eigenvalues(lambda block: block @ matrices, torch.randn(2, 6, dtype=torch.float64), 6)
    expected = torch.stack([values.min(1).values, values.max(1).values], 1)
    torch.testing.assert_close(result, expected, rtol=1e-10, atol=0)


def test_hessian_without_second_derivative_refused() -> None:
    class Once(torch.autograd.Function):
        """It leaves PyTorch in the backward pass."""

        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x * x

        @staticmethod
        def backward(ctx: object, cotangent: Tensor) -> Tensor:
            return torch.from_numpy(2 * cotangent.numpy())

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return Once.apply(self.layer(x))

    setting = setting_of(Model(), F.cross_entropy, (torch.randn(4, 3),), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(
        MeasureError,
        match="the measure hessian_trace needs second derivatives, which this model does not give",
    ):
        columns_of(HessianTrace(), setting)


def test_hessian_model_that_draws_at_random_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 3)).train()
    setting = setting_of(model, F.cross_entropy, (torch.randn(4, 3),), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(MeasureError, match="random"):
        columns_of(HessianTopEigenvalue(), setting)


@pytest.mark.parametrize(
    ("kind", "option"), [(HessianTrace, {"probes": 1}), (HessianTopEigenvalue, {"iterations": 1})]
)
def test_hessian_options_refused(kind: type, option: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected at least 2"):
        kind(**option)
