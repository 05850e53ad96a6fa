"""Products with the training set's curvature are those of the matrix that PyTorch makes, whichever way, chunk
and type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from psgrad.engine.execution.examples import Examples
from psgrad.engine.influence.curvature.curvature_products import (
    CurvatureKind,
    CurvatureProducts,
    PassProducts,
    RowProducts,
    curvature_products,
)
from psgrad.engine.influence.curvature.matrices import loss_hessian
from tests.engine.influence import problems
from tests.engine.influence.problems import cross_entropy, examples, squared_error

N, CLASSES, DECAY = 19, 4, 0.3


class Transposed(nn.Module):
    """A linear layer whose weight is stored inputs first."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def image_model() -> nn.Module:
    """All that rows may look like: of a convolution, of products of two positions and of one, either way
    round, of a bias.
    """
    return nn.Sequential(
        nn.Conv2d(1, 3, 3),
        nn.Tanh(),
        nn.Flatten(),
        nn.Unflatten(1, (2, 6)),
        nn.Linear(6, 6),
        nn.LayerNorm(6),
        nn.Tanh(),
        nn.Flatten(),
        Transposed(12, 5),
        nn.Tanh(),
        nn.Linear(5, CLASSES),
    ).double()


class Sequences(nn.Module):
    """Four positions a sample; one weight is stored transposed, and is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 3, padding_idx=2)  # which has a tangent, and no gradient
        self.mix = nn.Parameter(torch.randn(3, 3) / 2)
        self.out = nn.Linear(3, CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.embedding(tokens) @ self.mix)
        return self.out(torch.tanh(hidden @ self.mix).mean(1))


def problem(kind: str, **options: Any) -> tuple[nn.Module, Examples, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    if kind == "images":
        model, inputs = image_model(), torch.randn(N, 1, 4, 4, dtype=torch.float64)
    else:
        model, inputs = Sequences().double(), torch.randint(7, (N, 4))
    target = torch.randint(CLASSES, (N,))
    return model, examples(model, cross_entropy, inputs, target, **options), inputs, target


def dense(
    model: nn.Module, inputs: torch.Tensor, target: torch.Tensor, curvature: CurvatureKind
) -> torch.Tensor:
    """[p, p], with the weight decay."""
    if curvature == "fisher":
        rows = problems.gradient_rows(model, cross_entropy, inputs, target)
        total = rows.T @ rows
    else:
        of_kind = {"hessian": problems.loss_hessian, "gauss_newton": problems.gauss_newton}[curvature]
        total = of_kind(model, cross_entropy, inputs, target)
    return torch.from_numpy(total) / N + DECAY * torch.eye(len(total), dtype=torch.float64)


def by_rows(training: Examples, curvature: CurvatureKind) -> CurvatureProducts:
    result = RowProducts.of(training, curvature, DECAY)
    assert result is not None
    return result


def by_passes(training: Examples, curvature: CurvatureKind) -> CurvatureProducts:
    return PassProducts(training, curvature, DECAY)


WAYS = [
    (by_rows, "gauss_newton"),
    (by_rows, "fisher"),
    (by_passes, "gauss_newton"),
    (by_passes, "fisher"),
    (by_passes, "hessian"),
]


@pytest.mark.parametrize("kind", ["images", "sequences"])
@pytest.mark.parametrize(("way", "curvature"), WAYS)
def test_curvature_products_equal_dense_matrix(
    way: Callable[..., CurvatureProducts], curvature: CurvatureKind, kind: str
) -> None:
    model, training, inputs, target = problem(kind)
    matrix = dense(model, inputs, target, curvature)
    result = way(training, curvature)
    block = torch.randn(35, training.flat.size, dtype=torch.float64)  # more than one pass takes
    torch.testing.assert_close(result.apply(block), block @ matrix, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(
        result.damped(0.7)(block), block @ matrix + 0.7 * block, rtol=1e-10, atol=1e-10
    )
    mean, error = result.mean_eigenvalue()
    exact = float(matrix.diagonal().mean()) - DECAY
    if curvature == "hessian":
        assert error > 0
        assert abs(mean - exact) < 4 * error
        own = loss_hessian(training) / N + DECAY * torch.eye(training.flat.size).double()
        torch.testing.assert_close(own, matrix, rtol=1e-10, atol=1e-10)
    else:
        assert error == 0
        assert mean == pytest.approx(exact, rel=1e-10)


@pytest.mark.parametrize("curvature", ["gauss_newton", "fisher"])
def test_curvature_products_ignored_samples(curvature: CurvatureKind) -> None:
    model, _, x, y = problem("images")
    y = y.clone()
    y[[0, 3, 4]] = -100

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output[None], target[None], reduction="sum")

    result = by_rows(examples(model, loss, x, y, chunk_size=1), curvature)
    matrix = dense(model, x[y != -100], y[y != -100], curvature)
    block = torch.randn(2, len(matrix), dtype=torch.float64)
    torch.testing.assert_close(result.apply(block), block @ matrix, rtol=1e-10, atol=1e-12)


def test_curvature_products_shared_factor() -> None:
    _, training, _, _ = problem("images")
    result = by_rows(training, "gauss_newton")
    assert isinstance(result, RowProducts)
    forms = {name: part.form for name, part in result.chunks[0].items()}
    shared = {name: form for name, form in forms.items() if form != "materialised"}
    assert shared == {"4.weight": "shared left", "8.weight": "shared right", "10.weight": "shared left"}
    assert forms["0.weight"] == "materialised"


def test_curvature_products_estimated_trace() -> None:
    torch.manual_seed(0)
    model = nn.Linear(2, 200).double()
    training = examples(
        model, squared_error, torch.randn(9, 2, dtype=torch.float64), torch.randn(9, 200, dtype=torch.float64)
    )
    result = curvature_products(training)
    assert isinstance(result, PassProducts)
    mean, error = result.mean_eigenvalue()
    inputs = torch.cat([torch.as_tensor(training.rows.take(range(9)).inputs[0]), torch.ones(9, 1)], 1)
    exact = float(inputs.square().sum()) / 9 * 200 / training.flat.size
    # a linear model's Jacobian has orthogonal rows, so that all signs give the same
    assert error < 1e-10 * exact
    assert mean == pytest.approx(exact, rel=1e-10)
