"""Curvature materialised is what one-sample loops and torch.func say it is."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from psgrad.engine.execution.output_rows import gauss_newton_rows
from psgrad.engine.influence.curvature.matrices import loss_hessian, own_products, sum_of_outer_products
from tests.engine.influence import problems
from tests.engine.influence.problems import (
    classified,
    convolution,
    cross_entropy,
    examples,
    gauss_newton,
    gradient_rows,
    mlp,
)

pytestmark = pytest.mark.usefixtures("on_device")


class Sequence(nn.Module):
    """[n, 4, 5] by one layer at four positions, a tied table and a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.twice, self.last = (
            nn.Linear(5, 6).double(),
            nn.Linear(6, 6, bias=False).double(),
            nn.Linear(6, 3).double(),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.twice(self.twice(self.first(x).tanh()).tanh()).mean(1))


MODELS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "mlp": (mlp, (6,)),
    "convolution": (convolution, (1, 6, 6)),
    "positions": (Sequence, (4, 5)),
}


@pytest.mark.every(3)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("chunk_size", ["auto", 1, 4])
def test_curvature_matrix_equals_that_of_summed_loss(name: str, chunk_size: Any) -> None:
    factory, shape = MODELS[name]
    model = factory()
    inputs, labels = classified(9, shape)
    training = examples(model, cross_entropy, inputs, labels, chunk_size=chunk_size)
    rows = gradient_rows(model, cross_entropy, inputs, labels)
    for result, want in (
        (sum_of_outer_products(training), rows.T @ rows),
        (
            sum_of_outer_products(gauss_newton_rows(training)),
            gauss_newton(model, cross_entropy, inputs, labels),
        ),
        (loss_hessian(training), problems.loss_hessian(model, cross_entropy, inputs, labels)),
    ):
        np.testing.assert_allclose(result.numpy(), want, rtol=0, atol=1e-12)


def test_curvature_matrix_rows_with_shared_factor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = mlp(1, (6, 7, 5, 3))
    inputs, labels = classified(70)
    training = examples(model, cross_entropy, inputs, labels, chunk_size=2000)
    want = gauss_newton(model, cross_entropy, inputs, labels)
    for numbers in (1 << 25, 32 * 90, 1):  # all samples at once, some at a time, rows materialised
        monkeypatch.setattr("psgrad.engine.influence.curvature.matrices._NUMBERS", numbers)
        np.testing.assert_allclose(
            sum_of_outer_products(gauss_newton_rows(training)).numpy(), want, rtol=0, atol=1e-11
        )


@pytest.mark.long
@pytest.mark.parametrize("kept", [0, 1 << 12, 1 << 27])
def test_curvature_matrix_of_kept_chunks(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Factors are added chunk by chunk, some chunks at a time, or all at the end."""
    inputs, labels = classified(23)
    monkeypatch.setattr("psgrad.engine.influence.curvature.matrices._KEPT", kept)
    training = examples(mlp(), cross_entropy, inputs, labels, chunk_size=4)
    np.testing.assert_allclose(
        sum_of_outer_products(gauss_newton_rows(training)).numpy(),
        gauss_newton(mlp(), cross_entropy, inputs, labels),
        rtol=0,
        atol=1e-11,
    )


@pytest.mark.parametrize("size", [1, 512, 1100])
def test_curvature_matrix_symmetric_product(size: int) -> None:
    matrix = torch.randn(9, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    np.testing.assert_allclose(
        own_products(matrix).numpy(), matrix.numpy().T @ matrix.numpy(), rtol=0, atol=1e-13
    )


def test_curvature_matrix_hessian_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, labels = classified(9)
    training = examples(mlp(), cross_entropy, inputs, labels, chunk_size=4)
    whole = loss_hessian(training)
    monkeypatch.setattr("psgrad.engine.influence.curvature.matrices._BLOCK", 53 * 4 * 10)
    np.testing.assert_allclose(loss_hessian(training).numpy(), whole.numpy(), rtol=0, atol=1e-13)


@pytest.mark.long
def test_curvature_matrix_float32_model() -> None:
    inputs, labels = classified(50)
    single = examples(mlp().float(), cross_entropy, inputs.float(), labels, chunk_size=7)
    double = gauss_newton(mlp(), cross_entropy, inputs, labels)
    result = sum_of_outer_products(gauss_newton_rows(single))
    assert result.dtype == torch.float64
    np.testing.assert_allclose(result.numpy(), double, rtol=0, atol=1e-5 * np.abs(double).max())
    rows = single.materialise().double()
    np.testing.assert_allclose(
        sum_of_outer_products(single).numpy(), (rows.t() @ rows).numpy(), rtol=1e-12, atol=1e-14
    )
