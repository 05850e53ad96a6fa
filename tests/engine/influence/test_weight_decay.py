"""The weight decay of training, read off the weights."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from psgrad.engine.influence.weight_decay import DecayEstimate, estimated_decay
from tests.engine.influence.problems import (
    SoftmaxRegression,
    classified,
    cross_entropy,
    examples,
    gradient_rows,
    linear,
    mlp,
    ridge,
    squared_error,
)


@pytest.mark.parametrize("weight_decay", [1e-4, 0.01, 0.3])
def test_weight_decay_of_a_minimum_is_that_of_training(weight_decay: float) -> None:
    inputs, labels = classified(60)
    weights = SoftmaxRegression.of(inputs, labels, weight_decay).solve()
    found = estimated_decay(examples(linear(weights), cross_entropy, inputs, labels), torch.ones(60))
    assert found.value == pytest.approx(weight_decay, rel=1e-6)
    assert found.cosine == pytest.approx(1.0, abs=1e-9)
    assert found.certain
    assert [found.differs_from(times * weight_decay) for times in (0.0, 0.5, 1.0, 1.05, 2.0)] == [
        True,
        True,
        False,
        False,
        True,
    ]


def test_weight_decay_elsewhere_equals_its_definition_and_is_not_certain() -> None:
    inputs, labels = classified(40)
    model = mlp()
    found = estimated_decay(examples(model, cross_entropy, inputs, labels), torch.ones(40))
    gradient = gradient_rows(model, cross_entropy, inputs, labels).mean(0)
    weights = np.concatenate([value.detach().numpy().ravel() for value in model.parameters()])
    assert found.value == pytest.approx(-gradient @ weights / (weights @ weights))
    sizes = np.linalg.norm(gradient) * np.linalg.norm(weights)
    assert found.cosine == pytest.approx(-gradient @ weights / sizes)
    assert not found.certain


def test_weight_decay_of_a_minimum_without_any_is_not_estimated_from_rounding() -> None:
    torch.manual_seed(0)
    inputs, targets = torch.randn(40, 6, dtype=torch.float64), torch.randn(40, 2, dtype=torch.float64)
    model = linear(ridge(inputs, targets, 0.0))
    found = estimated_decay(examples(model, squared_error, inputs, targets), torch.ones(40))
    assert math.isnan(found.cosine)
    assert not found.certain
    assert not found.differs_from(0.1)


def test_weight_decay_of_few_parameters_is_not_estimated() -> None:
    """The gradient of a single one has the direction of the weight, or the other one, anywhere."""
    inputs, targets = torch.ones(10, 1, dtype=torch.float64), torch.full((10, 1), 5.0, dtype=torch.float64)
    model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.fill_(1.0)
    assert not estimated_decay(examples(model, squared_error, inputs, targets), torch.ones(10)).certain


@pytest.mark.parametrize(("cosine", "certain"), [(0.951, True), (0.949, False), (math.nan, False)])
def test_weight_decay_is_certain_by_the_cosine(cosine: float, certain: bool) -> None:
    assert DecayEstimate(0.01, cosine).certain is certain
