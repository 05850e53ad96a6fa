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


@pytest.mark.parametrize("size", [1, 512, 1100])
def test_curvature_matrix_symmetric_product(size: int) -> None:
    matrix = torch.randn(9, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    np.testing.assert_allclose(
        own_products(matrix).numpy(), matrix.numpy().T @ matrix.numpy(), rtol=0, atol=1e-13
    )
