"""EK-FAC scores against Kronecker products materialised, from hooks on layers (kronecker_blocks.py), in
float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from psgrad.engine.execution.examples import Examples
from psgrad.engine.influence.curvature.kronecker_blocks import Multiplied
from psgrad.engine.influence.method import Checkpoint, Preconditioned
from psgrad.engine.influence.methods.ekfac import EKFAC, KroneckerFactored
from psgrad.errors import InfluenceError
from tests.engine.influence.kronecker_blocks import blocks_of, scores
from tests.engine.influence.problems import (
    both,
    classified,
    cross_entropy,
    examples,
    gauss_newton,
    gradient_rows,
    mlp,
    squared_error,
)
from tests.engine.influence.runs import matrix_of, self_influence

pytestmark = pytest.mark.usefixtures("on_device")

N, M = 11, 4


def strided() -> nn.Module:
    torch.manual_seed(0)
    layers = (
        nn.Conv2d(2, 4, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Conv2d(4, 6, 2, dilation=2, groups=2),
        nn.Tanh(),
        nn.Flatten(),
    )
    return nn.Sequential(*layers, nn.Linear(24, 3)).double()


class Tokens(nn.Module):
    """Linear layers over positions, an embedding, a norm's scale and shift, and one bias that no weight comes
    with.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.norm = nn.Embedding(9, 5), nn.LayerNorm(5)
        self.wide, self.narrow = nn.Linear(5, 7), nn.Linear(7, 5, bias=False)
        self.query, self.key = nn.Linear(5, 5), nn.Linear(5, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.embedding(x))
        weights = (self.query(h) @ self.key(h).transpose(1, 2)).softmax(2)
        h = weights @ h + self.narrow(torch.tanh(self.wide(h)))
        return self.head(h).mean(1)


def tokens(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(2)
    return torch.randint(9, (count, 6)), torch.randint(3, (count,))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], tuple[torch.Tensor, torch.Tensor]]]] = {
    "linear": (mlp, classified),
    "convolution": (strided, lambda count: classified(count, (2, 8, 8))),
    "positions": (lambda: Tokens().double(), tokens),
}


def problem(case: str) -> tuple[nn.Module, Examples, Examples]:
    make, data = CASES[case]
    model, (x, y) = make(), data(N + M)
    return model, *both(model, (x[:N], y[:N], x[N:], y[N:]))


def fitted(training: Examples, exact_blocks: int = 0, **options: Any) -> KroneckerFactored:
    result = EKFAC(exact_blocks=exact_blocks, **options).fit(training, Checkpoint())
    assert isinstance(result, KroneckerFactored)
    return result


def oracle(case: str, relative: float = 0.1) -> np.ndarray:
    make, data = CASES[case]
    model, (x, y) = make(), data(N + M)
    gradients = gradient_rows(model, cross_entropy, x, y)
    return scores(blocks_of(model, cross_entropy, x[:N], y[:N]), gradients[:N], gradients[N:], relative)


@pytest.mark.parametrize("case", CASES)
def test_ekfac_scores_equal_materialised_matrices(case: str) -> None:
    _, training, queries = problem(case)
    result = matrix_of(fitted(training, fisher="empirical"), queries).numpy()
    expected = oracle(case)
    assert np.abs(result - expected).max() < 1e-10 * np.abs(expected).max()


@pytest.mark.parametrize("case", CASES)
def test_ekfac_self_influence(case: str) -> None:
    _, training, _ = problem(case)
    method = fitted(training, fisher="empirical")
    result, norms = self_influence(method)
    np.testing.assert_allclose(result, matrix_of(method, training).diagonal(), rtol=1e-10)
    rows = training.materialise().to(training.device)
    prepared = training.flat.join(method.precondition(training.flat.split(rows)))
    np.testing.assert_allclose(norms, prepared.norm(dim=1).cpu(), rtol=1e-10)


def test_ekfac_exact_for_one_layer_squared_error() -> None:
    """The layer's Gauss-Newton matrix, which is its Hessian, is a Kronecker product."""
    inputs, targets = torch.randn(N + M, 6, dtype=torch.float64), torch.randn(N + M, 3, dtype=torch.float64)
    model = nn.Linear(6, 3).double()
    training, queries = (
        examples(model, squared_error, inputs[rows], targets[rows]) for rows in (slice(N), slice(N, None))
    )
    result = matrix_of(fitted(training, fisher="exact", damping=0.02, weight_decay=0.03), queries).numpy()
    rows = gradient_rows(model, squared_error, inputs, targets)
    curvature = gauss_newton(model, squared_error, inputs[:N], targets[:N]) + N * 0.05 * np.eye(21)
    expected = rows[:N] @ np.linalg.solve(curvature, rows[N:].T)
    assert np.abs(result - expected).max() < 1e-10 * np.abs(expected).max()


@pytest.mark.parametrize("case", CASES)
def test_ekfac_small_blocks_are_exact(case: str) -> None:
    """Each weight with its bias has the second moment of its gradients, and a damping of its own."""
    make, data = CASES[case]
    model, training, queries = problem(case)
    method = fitted(training, 1024, fisher="empirical")
    assert all(block.basis.describe().startswith("exact") for block in method.blocks)
    x, y = data(N + M)
    gradients, flat = gradient_rows(make(), cross_entropy, x, y), training.flat
    expected = np.zeros((N, M))
    for block in method.blocks:
        own = np.concatenate([np.arange(flat.size)[flat.columns[name]] for name in block.basis.names])
        rows = gradients[:N, own]
        matrix = rows.T @ rows
        matrix += 0.1 * np.trace(matrix) / len(own) * np.eye(len(own))
        expected += rows @ np.linalg.solve(matrix, gradients[N:, own].T)
    assert sum(len(block.basis.names) for block in method.blocks) == len(dict(model.named_parameters()))
    result = matrix_of(method, queries).numpy()
    assert np.abs(result - expected).max() < 1e-9 * np.abs(expected).max()
    own, _ = self_influence(method)
    np.testing.assert_allclose(own, matrix_of(method, training).diagonal(), rtol=1e-9)


def test_ekfac_facts() -> None:
    _, training, _ = problem("linear")
    facts = fitted(training, fisher="empirical", weight_decay=0.25, relative_damping=0.2).facts
    squares = training.materialise().square().mean(0)
    for label, columns in (("0.weight + 0.bias", slice(0, 35)), ("2.weight + 2.bias", slice(35, 53))):
        # a rotation leaves the trace, and weight decay is no part of it
        mean = float(squares[columns].mean())
        assert facts.mean_eigenvalue[label] == pytest.approx(mean, rel=1e-12)
        assert facts.damping[label] == pytest.approx(0.2 * mean, rel=1e-12)


def test_ekfac_singular_block_refused() -> None:
    _, training, queries = problem("linear")
    with pytest.raises(InfluenceError, match=r"curvature of 2\.weight \+ 2\.bias has no inverse") as error:
        fitted(training, fisher="empirical", damping=0.0)
    advised = float(str(error.value).split("method.damping: ")[1].split(",")[0])
    assert torch.isfinite(matrix_of(fitted(training, fisher="empirical", damping=advised), queries)).all()


def test_ekfac_unused_layer_refused() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.other = nn.Linear(6, 3), nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x) + 0 * self.other(x)

    inputs, labels = classified(N)
    with pytest.raises(InfluenceError, match=r"other\.weight(?s:.*)leave it out of `parameters`"):
        fitted(examples(Unused().double(), cross_entropy, inputs, labels))


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_ekfac_rotated_gradients_or_rotated_vectors(case: str) -> None:
    """Both orders of a product with multiplied vectors give the inner products of materialised ones."""
    _, training, queries = problem(case)
    scores = fitted(training)
    plain = torch.cat([block.scores for block in Preconditioned.scores(scores, queries)]).cpu()
    for block, inverse in zip(scores.blocks, scores._inverses, strict=True):
        values = torch.cat(
            [each[""] for _, each in queries.each(lambda g: {"": block.multiplied(g, inverse)})]  # noqa: B023
        ).to(training.device)
        one, other = (
            torch.cat([each[""] for _, each in training.each(lambda g: {"": g.by_part(kind.inner)})])  # noqa: B023
            for kind in (Multiplied(block, values, 0), Multiplied(block, values, 1 << 40))
        )
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
        plain -= one
    assert float(plain.abs().max()) < 1e-9
