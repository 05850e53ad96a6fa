"""Which parameters are found to be products of two factors, with which biases, and what blocks come of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from psgrad.engine.influence.curvature.kronecker_fitting import fisher_rows, fit_blocks
from psgrad.errors import InfluenceError
from tests.engine.influence.kronecker_blocks import Tied
from tests.engine.influence.problems import (
    classified,
    cross_entropy,
    examples,
    gauss_newton,
    mlp,
)

pytestmark = pytest.mark.usefixtures("on_device")


class Bare(nn.Module):
    """Weights that no layer owns: x @ w + b, a scale without factors, and one weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w, self.b = nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(4))
        self.scale, self.shift = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(()))
        self.twice = nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(x @ self.w + self.b) * self.scale + self.shift
        return self.head(torch.tanh(self.twice(torch.tanh(self.twice(h)))))


class Shifted(nn.Module):
    """A factor that is no bias of the weight, though it has as many elements."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(6, 3)), nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.w) * self.b


class Overlapping(nn.Module):
    """Slices that are no factors of the weight, though they have as many elements."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(6, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([torch.tanh(F.linear(x, self.w[:4])), F.linear(x, self.w[2:4])], 1)


def tokens() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randint(7, (12, 5)), torch.randint(7, (12,))


@pytest.mark.parametrize(
    ("model", "data", "expected"),
    [
        (
            Bare,
            lambda: classified(9),
            {
                "w + b": "Kronecker factors 7 x 4",
                "scale": "exact, 4 x 4",
                "shift": "exact, 1 x 1",
                "twice.weight": "Kronecker factors 4 x 4",
                "head.weight + head.bias": "Kronecker factors 3 x 5",
            },
        ),
        (Shifted, lambda: classified(9), {"w": "Kronecker factors 6 x 3", "b": "exact, 3 x 3"}),
        (
            Tied,
            tokens,
            {
                "packed[0:4, 0:4]": "Kronecker factors 4 x 4",
                "packed[4:8, 0:4]": "Kronecker factors 4 x 4",
                "table.weight": "Kronecker factors 7 x 4",
            },
        ),
        (Overlapping, lambda: classified(9, (4,)), {"w": "exact, 24 x 24"}),
    ],
)
def test_kronecker_blocks_of_weights_and_biases(model: Any, data: Any, expected: dict[str, str]) -> None:
    inputs, labels = data()
    blocks = fit_blocks(examples(model().double(), cross_entropy, inputs, labels), len(inputs))
    assert {block.label: block.basis.describe() for block in blocks} == expected


def test_kronecker_tied_table_basis() -> None:
    """Against the factors of both uses, by hooks: counts and the head's cotangents on the left, cotangents of
    rows and the head's input on the right.
    """
    model, (ids, labels) = Tied().double(), tokens()
    left, right = torch.zeros(7, 7).double(), torch.zeros(4, 4).double()
    for x, y in zip(ids, labels, strict=True):
        rows = model.table.weight[x].detach().requires_grad_()
        h = torch.tanh(F.linear(rows, model.packed[:4])) * F.linear(rows, model.packed[4:])
        logits = h @ model.table.weight.detach().t()
        of_rows, of_logits = torch.autograd.grad(
            F.cross_entropy(logits.mean(0)[None], y[None]), (rows, logits)
        )
        left += of_logits.t() @ of_logits + F.one_hot(x, 7).double().sum(0).diag()
        right += of_rows.t() @ of_rows + h.t() @ h.detach()
    block = fit_blocks(examples(model, cross_entropy, ids, labels), 12)[-1]
    assert block.basis.left is not None
    assert block.basis.right is not None
    for basis, moment in ((block.basis.left[0], left), (block.basis.right[0], right)):
        turned = basis.t() @ moment.detach() @ basis
        assert torch.allclose(turned, turned.diagonal().diag(), atol=1e-12 * float(moment.detach().trace()))


@pytest.mark.long
def test_kronecker_sampled_rows_unbiased() -> None:
    """Signs e with e_k e_l = 0 on average: over many draws what is left falls as one over their root."""
    inputs, labels = classified(4)
    model = mlp()
    training = examples(model, cross_entropy, inputs, labels)
    expected = gauss_newton(model, cross_entropy, inputs, labels)

    def error(draws: int) -> float:
        rows = fisher_rows(training, draws, seed=3).materialise().numpy()
        return float(np.linalg.norm(rows.T @ rows - expected) / np.linalg.norm(expected))

    assert error(6400) < 0.03
    assert error(6400) < error(64) / 3


def test_kronecker_nonfinite_gradients_refused() -> None:
    inputs, labels = classified(9)
    inputs[4, 0] = torch.inf
    with pytest.raises(InfluenceError, match="not finite"):
        fit_blocks(examples(mlp(), cross_entropy, inputs, labels), 9)
