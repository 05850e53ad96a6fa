"""Scores corrected for leverage are one Newton step without the example, and exact for ridge regression."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from psgrad.engine.influence.methods.influence import Influence
from psgrad.errors import InfluenceError
from tests.engine.influence.problems import (
    classified,
    cross_entropy,
    examples,
    gauss_newton,
    gradient_rows,
    huber,
    linear,
    mlp,
    output_hessians,
    output_jacobians,
    ridge,
    squared_error,
)
from tests.engine.influence.runs import fit, scores, self_influence

pytestmark = pytest.mark.usefixtures("on_device")


def newton_steps(
    model: nn.Module, criterion: Any, inputs: torch.Tensor, target: torch.Tensor, shift: float
) -> np.ndarray:
    """[n, p]: the step for each row, from a Gauss-Newton matrix that is made without it."""
    jacobians, hessians = output_jacobians(model, inputs), output_hessians(model, criterion, inputs, target)
    rows = gradient_rows(model, criterion, inputs, target)
    whole = gauss_newton(model, criterion, inputs, target) + shift * np.eye(rows.shape[1])
    return np.stack(
        [np.linalg.solve(whole - j.T @ h @ j, g) for j, h, g in zip(jacobians, hessians, rows, strict=True)]
    )


VALUES = torch.randn(15, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
LOSSES: dict[str, Any] = {
    "softmax": (cross_entropy, classified(15)[1]),
    "squares": (squared_error, VALUES),
    "gradients outside the span": (huber, VALUES),
}


@pytest.mark.long
@pytest.mark.every(2)
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("solver", ["exact", "dual"])
def test_leverage_scores_equal_one_newton_step(name: str, solver: Any) -> None:
    criterion, target = LOSSES[name]
    model, inputs = mlp(), classified(15)[0]
    training = examples(model, criterion, inputs, target, chunk_size=12)
    queries = examples(model, criterion, -inputs[:4], target[:4])
    method = Influence(solver=solver, damping=0.02, weight_decay=0.01, leverage=True)
    if (name, solver) == ("gradients outside the span", "dual"):
        with pytest.raises(
            InfluenceError, match="needs training gradients that are combinations of the curvature's rows"
        ):
            fit(method, training)
        return
    steps = newton_steps(model, criterion, inputs, target, 15 * 0.03)
    query_rows = gradient_rows(model, criterion, -inputs[:4], target[:4])
    rows = gradient_rows(model, criterion, inputs, target)
    fitted = fit(method, training)
    np.testing.assert_allclose(scores(fitted, queries), steps @ query_rows.T, rtol=0, atol=1e-11)
    np.testing.assert_allclose(self_influence(fitted)[0], (steps * rows).sum(1), rtol=1e-10)
    assert 0.1 < fitted.facts.largest_leverage < 1


@pytest.mark.long
@pytest.mark.parametrize("solver", ["exact", "dual"])
@pytest.mark.parametrize("outputs", [1, 2])
def test_leverage_ridge_regression_leave_one_out(solver: Any, outputs: int) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs, targets = (torch.randn(30, size, generator=generator).double() for size in (4, outputs))
    inputs[0] *= 10  # a row that the fit leans on
    weight_decay = 0.01
    model = linear(ridge(inputs, targets, 30 * weight_decay))
    test_inputs, test_targets = (torch.randn(6, size, generator=generator).double() for size in (4, outputs))

    # linear in the output, as a step is: a squared error has a second order of its own
    def prediction(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return output.sum()

    training = examples(model, squared_error, inputs, targets)
    fitted = fit(Influence(solver=solver, damping=0.0, weight_decay=weight_decay, leverage=True), training)
    result = scores(fitted, examples(model, prediction, test_inputs, test_targets))
    wide = np.concatenate([test_inputs.numpy(), np.ones((6, 1))], axis=1)
    _, moves = self_influence(fitted)
    whole = ridge(inputs, targets, 30 * weight_decay)
    for row in range(30):
        keep = torch.arange(30) != row
        change = ridge(inputs[keep], targets[keep], 30 * weight_decay) - whole
        np.testing.assert_allclose(result[row], (wide @ change.T).sum(1), rtol=0, atol=1e-8)
        np.testing.assert_allclose(moves[row], np.linalg.norm(change), rtol=1e-8)
    assert fitted.facts.largest_leverage > 0.5
    plain = scores(fit(Influence(solver=solver, damping=0.0, weight_decay=weight_decay), training), training)
    assert np.abs(plain[0]).max() < 0.6 * np.abs(scores(fitted, training)[0]).max()


@pytest.mark.parametrize("solver", ["exact", "dual"])
def test_leverage_of_one_refused(solver: Any) -> None:
    inputs = torch.randn(12, 3, generator=torch.Generator().manual_seed(0)).double()
    inputs[:, 2] = 0.0
    inputs[5, 2] = 1.0  # no other row determines the third weight
    targets = torch.randn(12, 1, generator=torch.Generator().manual_seed(1)).double()
    model = linear(ridge(inputs, targets, 1e-12))
    messages: list[str] = []
    training = examples(model, squared_error, inputs, targets)
    fitted = fit(Influence(solver=solver, damping=1e-12, leverage=True), training, messages)
    assert (
        [line for line in messages if line.startswith("without row 5 the training problem has no solution")]
        == messages
        != []
    )
    result = scores(fitted, training)
    assert np.isnan(result[5]).all()
    assert np.isnan(self_influence(fitted)[0][5])
    assert [row for row in range(12) if np.isnan(self_influence(fitted)[1][row])] == [5]
    assert np.isfinite(np.delete(result, 5, axis=0)).all()
    assert np.isfinite(np.delete(self_influence(fitted)[0], 5)).all()


@pytest.mark.long
@pytest.mark.every(2)
@pytest.mark.parametrize("solver", ["exact", "dual"])
@pytest.mark.parametrize("leverage", [False, True])
def test_leverage_by_output_scores(solver: Any, leverage: bool) -> None:
    model, (inputs, labels), criterion = mlp(), classified(15), cross_entropy
    rows, jacobians = gradient_rows(model, criterion, inputs, labels), output_jacobians(model, -inputs[:4])
    steps = np.linalg.solve(gauss_newton(model, criterion, inputs, labels) + 15 * 0.03 * np.eye(53), rows.T).T
    if leverage:
        steps = newton_steps(model, criterion, inputs, labels, 15 * 0.03)
    outputs = model(-inputs[:4]).detach()
    moved = outputs + torch.from_numpy(np.einsum("qcp,np->nqc", jacobians, steps))
    want = torch.stack([F.cross_entropy(each, labels[:4], reduction="none") for each in moved])
    want -= F.cross_entropy(outputs, labels[:4], reduction="none")
    fitted = fit(
        Influence(solver=solver, damping=0.03, leverage=leverage, change="output"),
        examples(model, criterion, inputs, labels),
    )
    queries = examples(model, criterion, -inputs[:4], labels[:4])
    np.testing.assert_allclose(scores(fitted, queries), want.numpy(), rtol=0, atol=1e-11)
