"""Which models are affine in their parameters, and which scores are amounts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from psgrad.engine.influence.amounts import distance_from_minimum, is_affine
from psgrad.engine.influence.method import RELATIVE, UNCALIBRATED
from psgrad.engine.influence.methods.ekfac import EKFAC
from psgrad.engine.influence.methods.influence import Influence
from psgrad.errors import InfluenceError
from psgrad.plugins import METHODS, own_classes
from tests.engine.influence.problems import (
    classified,
    cross_entropy,
    examples,
    linear,
    mlp,
    ridge,
    squared_error,
)
from tests.engine.influence.runs import fit, scores


class Bilinear(nn.Module):
    """Two linear layers without anything in between: affine in each alone, and in both together not."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class OnFeatures(nn.Module):
    """A linear layer on features that are fixed, but not affine in the input."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mixed", torch.randn(6, 5))
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(x @ self.mixed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (lambda: nn.Linear(6, 3), True),
        (lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 3, bias=False)), True),
        (OnFeatures, True),
        (Bilinear, False),
        (lambda: nn.Sequential(nn.Linear(6, 3), nn.Tanh()), False),
        (lambda: nn.Sequential(nn.Linear(6, 3), nn.LogSoftmax(1)), False),
        (lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), False),
        (lambda: nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 3)), False),
    ],
)
def test_calibration_affine_models_recognised(
    model: type[nn.Module], expected: bool, dtype: torch.dtype
) -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        inputs, labels = classified(20, seed=seed)
        built = model().to(dtype)
        assert is_affine(examples(built, cross_entropy, inputs.to(dtype), labels)) is expected
        with torch.no_grad():  # an untrained layer of zeros
            for parameter in built.parameters():
                parameter.zero_()
        if expected:
            assert is_affine(examples(built, cross_entropy, inputs.to(dtype), labels))


def test_calibration_affine_in_selected_parameters() -> None:
    model = Bilinear().double()
    inputs, labels = classified(20)
    model.first.requires_grad_(False)
    assert is_affine(examples(model, cross_entropy, inputs, labels))


def test_calibration_least_squares_default_is_exact() -> None:
    """Strictly convex, as the inputs have full rank: no damping, and the change that retraining brings to the
    last digit.
    """
    torch.manual_seed(0)
    inputs, targets = torch.randn(40, 6, dtype=torch.float64), torch.randn(40, 2, dtype=torch.float64)
    weights = ridge(inputs, targets, 0.0)
    asked, wanted = torch.randn(5, 6, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    training = examples(linear(weights), squared_error, inputs, targets)
    fitted = fit(Influence(), training)
    assert fitted.calibrated
    assert fitted.facts.damping == 0
    result = scores(fitted, examples(linear(weights), squared_error, asked, wanted))

    def losses(layer: nn.Linear) -> np.ndarray:
        with torch.no_grad():
            return (0.5 * (layer(asked) - wanted).square().sum(1)).numpy()

    for row in range(0, 40, 7):
        kept = torch.arange(40) != row
        truth = losses(linear(ridge(inputs[kept], targets[kept], 0.0))) - losses(linear(weights))
        np.testing.assert_allclose(result[row], truth, rtol=1e-8, atol=1e-10)


def test_calibration_newton_decrement() -> None:
    """Of least squares with a weight decay, at weights that are no minimum: both numbers by numpy, to the
    last digits.
    """
    torch.manual_seed(0)
    inputs, targets = torch.randn(40, 5, dtype=torch.float64), torch.randn(40, 1, dtype=torch.float64)
    model = nn.Linear(5, 1, bias=False, dtype=torch.float64)
    training = examples(model, squared_error, inputs, targets)
    solver = fit(Influence(weight_decay=0.3, damping=0.0), training).solver()
    x, y, weights = inputs.numpy(), targets.numpy()[:, 0], model.weight.detach().numpy()[0]
    inverse = np.linalg.inv(x.T @ x + 40 * 0.3 * np.eye(5))
    each = (x @ weights - y)[:, None] * x
    whole = each.sum(0) + 40 * 0.3 * weights
    rows = sorted({place * 40 // 16 for place in range(16)})
    one = np.mean([each[row] @ inverse @ each[row] for row in rows])
    np.testing.assert_allclose(distance_from_minimum(solver, 0.3), (whole @ inverse @ whole, one), rtol=1e-9)


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (Influence(curvature="fisher"), "the empirical Fisher is no curvature"),
        (Influence(relative_damping=0.1), "a damping is added to the curvature"),
    ],
)
def test_calibration_reason_names_the_option_of_affine_models(method: Influence, expected: str) -> None:
    inputs, targets = torch.randn(30, 6, dtype=torch.float64), torch.randn(30, 2, dtype=torch.float64)
    fitted = fit(method, examples(linear(ridge(inputs, targets, 1.0)), squared_error, inputs, targets))
    assert not fitted.calibrated
    assert fitted.facts.calibrated_because.startswith(expected)


def test_calibration_networks_damping_value() -> None:
    inputs, labels = classified(30)
    training = examples(mlp(), cross_entropy, inputs, labels)
    for options in ({}, {"weight_decay": 1e-3}):
        facts = fit(EKFAC(**options), training).facts
        assert facts.damping == pytest.approx(
            {name: 0.1 * mean for name, mean in facts.mean_eigenvalue.items()}
        )


@pytest.mark.long
def test_calibration_affine_model_of_many_outputs_has_scores_by_default() -> None:
    """Its corrections would take its outputs one by one, so that its scores are to first order, and no
    amounts.
    """
    torch.manual_seed(0)
    inputs, labels = torch.randn(20, 5, dtype=torch.float64), torch.randint(0, 200, (20,))
    training = examples(nn.Linear(5, 200).double(), cross_entropy, inputs, labels)
    fitted = fit(Influence(weight_decay=0.1), training)
    assert (fitted.facts.solver, fitted.facts.damping, fitted.facts.leverage) == (
        "conjugate_gradient",
        0,
        False,
    )
    assert not fitted.calibrated
    assert scores(fitted, training).shape == (20, 20)
    with pytest.raises(
        InfluenceError, match="the leverage correction takes the output's 200 numbers one by one"
    ):
        fit(Influence(weight_decay=0.1, leverage=True), training)


def test_calibration_units_of_methods() -> None:
    """Only scores that a fit vouches for go without a word that says otherwise."""
    relative = {"ekfac", "trak", "projected_influence"}
    for name, kind in own_classes(METHODS).items():
        method = kind()
        if name in relative:
            assert (method.unit, method.predicts_removal) == (RELATIVE, False)
        elif method.predicts_removal:
            assert method.unit == UNCALIBRATED
        else:
            assert "removed" not in method.unit
    for method in (EKFAC(fisher="empirical"), EKFAC(fisher="exact"), Influence(curvature="fisher")):
        assert (method.unit, method.predicts_removal) == (RELATIVE, False)
