"""The rows of the Gauss-Newton matrix are those of the output's Jacobian times a root of the loss's second
derivatives.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from psgrad.engine.execution.output_derivatives import OutputDerivatives
from psgrad.engine.execution.output_rows import gauss_newton_rows, jacobian_rows
from psgrad.engine.execution.row_grams import gram_matrix, inner_products
from psgrad.errors import InfluenceError
from tests.engine.influence.problems import (
    classified,
    convolution,
    cross_entropy,
    examples,
    gauss_newton,
    mlp,
    squared_error,
)

pytestmark = pytest.mark.usefixtures("on_device")


def weighted(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross-entropy over positions [classes, t], one of them not counted."""
    return F.cross_entropy(
        output[None], target[None], torch.tensor([1.0, 2.0]).to(output), reduction="none", ignore_index=9
    ).sum()


class Positions(nn.Module):
    """[n, 6] to [n, 2, 3]"""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.linear = nn.Linear(6, 6).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh().reshape(-1, 2, 3)


def problems() -> dict[str, tuple[nn.Module, Any, torch.Tensor, torch.Tensor]]:
    inputs, labels = classified(7)
    pictures, picture_labels = classified(5, (1, 6, 6))
    values = torch.randn(7, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    positions = torch.tensor([[0, 1, 9], [1, 1, 0], [9, 9, 9], [0, 0, 0], [1, 9, 1], [0, 1, 0], [1, 1, 1]])
    return {
        "softmax": (mlp(), cross_entropy, inputs, labels),
        "pictures": (convolution(), cross_entropy, pictures, picture_labels),
        "squares": (mlp(), squared_error, inputs, values),
        "binary": (
            mlp(),
            lambda z, y: F.binary_cross_entropy_with_logits(z, y),
            inputs,
            (values > 0).double(),
        ),
        "positions": (Positions(), weighted, inputs, positions),
    }


@pytest.mark.parametrize("name", problems())
@pytest.mark.parametrize("chunk_size", ["auto", 1, 30])
def test_output_rows_sum_to_gauss_newton_matrix(name: str, chunk_size: Any) -> None:
    model, criterion, inputs, target = problems()[name]
    rows = gauss_newton_rows(examples(model, criterion, inputs, target, chunk_size=chunk_size))
    written = rows.materialise().numpy()
    assert written.shape == (len(rows), rows.flat.size)
    np.testing.assert_allclose(
        written.T @ written, gauss_newton(model, criterion, inputs, target), rtol=0, atol=1e-12
    )


def test_output_rows_gradients_of_selected_samples() -> None:
    model, criterion, inputs, target = problems()["softmax"]
    rows = gauss_newton_rows(examples(model, criterion, inputs, target))
    some = rows.flat.join(rows.gradients(range(2, 5)).materialise())
    np.testing.assert_allclose(some.numpy(), rows.materialise()[6:15].numpy(), rtol=0, atol=1e-14)


@pytest.mark.parametrize("most_bytes", [1, 1 << 30])
@pytest.mark.parametrize("count", [5, 61], ids=["one pass", "several passes"])
@pytest.mark.parametrize("kind", ["rows of outputs", "gradients"])
def test_inner_products_of_rows_that_are_held_in_parts(kind: str, count: int, most_bytes: int) -> None:
    model = mlp(2, (4, 6, 3))
    inputs, labels = classified(count + 7, (4,), 3)
    rows, others = (
        examples(model, cross_entropy, inputs[some], labels[some], chunk_size=16)
        for some in (slice(count), slice(count, None))
    )
    if kind == "rows of outputs":
        rows = jacobian_rows(rows)
    each, queries = rows.materialise(), others.materialise()
    close = {"rtol": 1e-12, "atol": 1e-13}
    torch.testing.assert_close(gram_matrix(rows, most_bytes).cpu(), each @ each.t(), **close)
    torch.testing.assert_close(inner_products(rows, others, most_bytes).cpu(), each @ queries.t(), **close)


def test_output_rows_confident_predictions_float32() -> None:
    outputs = torch.tensor([[20.0, 0.0, 1.0]])
    result = OutputDerivatives.of(cross_entropy, outputs, torch.tensor([0])).hessian[0]
    p = outputs[0].double().softmax(0)
    eps = torch.finfo(torch.float64).eps  # p - p^2 is rounded as a number of order one
    np.testing.assert_allclose(result.numpy(), (p.diag() - torch.outer(p, p)).numpy(), rtol=0, atol=2 * eps)


def test_output_rows_nonconvex_loss_refused() -> None:
    inputs, _ = classified(5)

    def bent(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.where(target == 4, -1.0, 1.0) * output.square().sum()

    rows = gauss_newton_rows(examples(mlp(), bent, inputs, torch.arange(5), chunk_size=2))
    with pytest.raises(
        InfluenceError,
        match=r"at row 4 the loss is not convex in the model's output: its second derivative there is -2",
    ):
        rows.materialise()


def test_output_rows_nonfinite_output_refused() -> None:
    inputs, labels = classified(5)
    inputs[3, 0] = torch.inf
    linear = mlp(0, (6, 3))
    with pytest.raises(
        InfluenceError, match="at row 3 the loss has derivatives in the model's output that are not finite"
    ):
        gauss_newton_rows(examples(linear, cross_entropy, inputs, labels)).materialise()


def test_output_rows_large_or_several_outputs_refused() -> None:
    inputs, labels = classified(2)
    with pytest.raises(InfluenceError, match="the model's output has 129 numbers for one sample") as error:
        gauss_newton_rows(examples(mlp(0, (6, 129)), cross_entropy, inputs, labels))
    assert "set solver: conjugate_gradient" in str(error.value)

    class Pair(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x), x

    with pytest.raises(InfluenceError, match="the model's output is a tuple"):
        gauss_newton_rows(examples(Pair(6, 3).double(), cross_entropy, inputs, labels))


@pytest.mark.parametrize("classes", [2, 3, 10])
@pytest.mark.parametrize("spread", [0.0, 1.0, 8.0])
def test_hessian_root_is_stable_against_rounding_of_outputs(classes: int, spread: float) -> None:
    """Where all classes are as likely, eigenvalues are equal, and eigenvectors are anything."""
    generator = torch.Generator().manual_seed(classes)
    outputs = spread * torch.randn(50, classes, generator=generator, dtype=torch.float64)
    noise = 1e-7 * torch.randn(50, classes, generator=generator, dtype=torch.float64)
    target = torch.randint(0, classes, (50,), generator=generator)
    first, second = (OutputDerivatives.of(cross_entropy, each, target) for each in (outputs, outputs + noise))
    (root, along), (other, _) = first.root(torch.arange(50)), second.root(torch.arange(50))
    torch.testing.assert_close(root @ root.transpose(1, 2), first.hessian, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(other, root, rtol=0, atol=2e-6)
    likely = outputs.softmax(1).amin(1) > 1e-6  # else a direction of the gradient is cut off as rounding
    reached = (root @ along.unsqueeze(2)).squeeze(2)[likely]
    torch.testing.assert_close(reached, first.gradient[likely], rtol=1e-6, atol=1e-8)
    assert (root[:, :, -1].abs() < 1e-7).all()  # no output is changed by equal logits


def test_hessian_root_of_a_matrix_of_rank_one() -> None:
    direction = torch.tensor([1e-9, 1.0, -2.0], dtype=torch.float64)
    found = OutputDerivatives(3 * direction[None], torch.outer(direction, direction)[None])
    root, along = found.root(torch.arange(1))
    torch.testing.assert_close(root[0] @ root[0].t(), found.hessian[0])
    torch.testing.assert_close(root[0] @ along[0], found.gradient[0], rtol=1e-6, atol=1e-12)
