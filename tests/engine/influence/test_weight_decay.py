"""The weight decay that the weights tell: that of the training, at a minimum, and none elsewhere."""

from __future__ import annotations

import pytest
import torch

from psgrad.engine.execution.examples import Examples
from psgrad.engine.influence.weight_decay import DecayEstimate, estimated_decay
from tests.engine.influence.problems import (
    SoftmaxRegression,
    classified,
    cross_entropy,
    examples,
    linear,
    mlp,
    squared_error,
)


def estimate(training: Examples) -> DecayEstimate:
    norms = torch.cat([found["square_norm"] for _, found in training.norms()]).sqrt()
    return estimated_decay(training, norms)


@pytest.mark.parametrize("weight_decay", [0.001, 0.01, 0.3])
def test_weight_decay_of_a_minimum_is_that_of_training(weight_decay: float) -> None:
    inputs, labels = classified(60)
    weights = SoftmaxRegression.of(inputs, labels, weight_decay).solve()
    found = estimate(examples(linear(weights), cross_entropy, inputs, labels))
    assert found.certain
    assert found.value == pytest.approx(weight_decay, rel=1e-4)
    assert found.cosine == pytest.approx(1, abs=1e-6)
    assert not found.differs_from(weight_decay * 1.05)
    assert found.differs_from(weight_decay * 1.2)


def test_weight_decay_of_weights_that_were_not_trained_is_unknown() -> None:
    inputs, labels = classified(60)
    assert not estimate(examples(mlp(), cross_entropy, inputs, labels)).certain


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weight_decay_of_a_minimum_without_one_is_unknown(dtype: torch.dtype) -> None:
    """There the gradient is rounding, whose direction may be any."""
    torch.manual_seed(0)
    inputs, targets = torch.randn(40, 6, dtype=torch.float64), torch.randn(40, 2, dtype=torch.float64)
    model = torch.nn.Linear(6, 2, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.linalg.lstsq(inputs, targets).solution.T)
    training = examples(model.to(dtype), squared_error, inputs.to(dtype), targets.to(dtype))
    assert not estimate(training).certain


def test_weight_decay_by_chance_is_rare() -> None:
    """Random weights of ten parameters: no gradient lies within .95 of them."""
    found = 0
    for seed in range(60):
        inputs, labels = classified(30, seed=seed)
        torch.manual_seed(seed)
        model = torch.nn.Linear(inputs.shape[1], int(labels.max()) + 1, dtype=torch.float64)
        found += estimate(examples(model, cross_entropy, inputs, labels)).certain
    assert found == 0
