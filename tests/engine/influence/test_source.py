"""SOURCE against the derivative of gradient descent itself, by autograd through all of its steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from psgrad.engine.influence.evaluation.statistics import score_matrix
from psgrad.engine.influence.method import Checkpoint
from psgrad.engine.influence.methods.source import Source, times_of
from psgrad.errors import ConfigError, InfluenceError
from tests.engine.influence.problems import examples, squared_error

RATE, STEPS, EVERY, DECAY = 0.02, 120, 4, 0.01
EXACT = Source(fisher="exact", weight_decay=DECAY)


def problem() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs, targets, and those of the queries: least squares with one output."""
    generator = torch.Generator().manual_seed(5)
    x, xq = (torch.randn(size, 3, generator=generator, dtype=torch.float64) for size in (14, 4))
    weights = torch.tensor([[1.0, -2.0, 0.5]], dtype=torch.float64)
    y, yq = (
        part @ weights.T + torch.randn(len(part), 1, generator=generator, dtype=torch.float64)
        for part in (x, xq)
    )
    return x, y, xq, yq


def descent(weights: torch.Tensor, momentum: float = 0.0) -> list[torch.Tensor]:
    """The parameters [4] after 0, EVERY, ... steps on the examples' losses, which have these weights [n]."""
    x, y, _, _ = problem()
    theta, velocity, found = torch.zeros(4, dtype=torch.float64), 0.0, []
    rows = torch.cat([x, torch.ones(len(x), 1, dtype=torch.float64)], 1)
    for step in range(STEPS + 1):
        if step % EVERY == 0:
            found.append(theta)
        gradient = rows.T @ (weights * (rows @ theta - y.squeeze(1))) / len(x) + DECAY * theta
        velocity = momentum * velocity + gradient
        theta = theta - RATE * velocity
    return found


def truth(momentum: float = 0.0) -> np.ndarray:
    """[n, m]: minus the derivative of each query's loss at the end in each example's weight."""
    x, _, xq, yq = problem()

    def losses(weights: torch.Tensor) -> torch.Tensor:
        theta = descent(weights, momentum)[-1]
        rows = torch.cat([xq, torch.ones(len(xq), 1, dtype=torch.float64)], 1)
        return 0.5 * (rows @ theta - yq.squeeze(1)) ** 2

    derivative = torch.autograd.functional.jacobian(losses, torch.ones(len(x), dtype=torch.float64))
    return -np.asarray(derivative.T)


def scores(method: Source, momentum: float = 0.0) -> np.ndarray:
    x, y, xq, yq = problem()
    run, queries = [], []
    for number, theta in enumerate(descent(torch.ones(len(x), dtype=torch.float64), momentum)[1:]):
        model = nn.Linear(3, 1).double()
        with torch.no_grad():
            model.weight.copy_(theta[None, :3])
            model.bias.copy_(theta[3:])
        place = Checkpoint(number, RATE, step=(number + 1) * EVERY)
        run.append((examples(model, squared_error, x, y), place))
        queries.append(examples(model, squared_error, xq, yq))
    return score_matrix(method, method.fit_run(run), queries)


@pytest.mark.sweep
def test_source_is_the_derivative_of_gradient_descent_in_many_segments() -> None:
    found, expected = scores(EXACT), truth()
    assert np.corrcoef(found.ravel(), expected.ravel())[0, 1] > 0.999
    slope = (found * expected).sum() / (found**2).sum()
    assert slope == pytest.approx(1, abs=0.03)


@pytest.mark.long
def test_source_with_momentum_goes_further_in_a_step() -> None:
    found, expected = scores(replace(EXACT, momentum=0.5), 0.5), truth(0.5)
    assert np.corrcoef(found.ravel(), expected.ravel())[0, 1] > 0.998
    slope = (found * expected).sum() / (found**2).sum()
    assert slope == pytest.approx(1, abs=0.05)


def test_times_are_sums_of_learning_rates_by_the_trapezoid() -> None:
    checkpoints = [Checkpoint(0, 0.4, step=10), Checkpoint(1, 0.2, step=30), Checkpoint(2, 0.1, step=40)]
    assert times_of(checkpoints) == pytest.approx([10 * 0.4, 20 * 0.3, 10 * 0.15])


@pytest.mark.parametrize(
    ("checkpoints", "words"),
    [
        ([Checkpoint(0, None, step=3)], "checkpoint 0 has no learning rate"),
        ([Checkpoint(0, 0.1, step=3), Checkpoint(1, 0.1)], "checkpoint 1 has no step"),
        ([Checkpoint(0, 0.1, step=3), Checkpoint(1, 0.1, step=3)], "checkpoint 1 is of step 3, and the one"),
        ([Checkpoint(0, 0.1, step=0)], "checkpoint 0 is of step 0"),
    ],
)
def test_checkpoints_that_are_no_run_are_refused(checkpoints: list[Checkpoint], words: str) -> None:
    with pytest.raises(InfluenceError, match=words):
        times_of(checkpoints)


@pytest.mark.parametrize("options", [{"draws": 0}, {"momentum": 1.0}, {"weight_decay": -1.0}])
def test_options_that_cannot_be_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(options))}"):
        Source(**options)  # type: ignore[arg-type]
