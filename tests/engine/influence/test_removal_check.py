"""Training that goes on without a row: the retrained truth where that is one, and never an impossible
amount.
"""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest
import torch

from psgrad.engine.gradients.flat import Vectors
from psgrad.engine.influence.continued import Budget, continued
from psgrad.engine.influence.method import Preconditioned
from psgrad.engine.influence.methods.ekfac import EKFAC
from psgrad.engine.influence.methods.influence import Influence
from tests.engine.influence.problems import (
    SoftmaxRegression,
    classified,
    cross_entropy,
    digits,
    examples,
    linear,
    mlp,
    squared_error,
    trained_digits_mlp,
)
from tests.engine.influence.runs import fit, scores


def inverse(method: Influence | EKFAC, training: object) -> Preconditioned:
    result = fit(method, training).solver()  # type: ignore[arg-type]
    assert result is not None
    return result


@pytest.mark.long
def test_removal_check_equals_retraining_of_convex_model() -> None:
    inputs, labels = classified(60)
    problem = SoftmaxRegression.of(inputs, labels, 0.02)
    weights = problem.solve()
    training = examples(linear(weights), cross_entropy, inputs, labels)
    asked, wanted = classified(4, seed=9)
    queries = examples(linear(weights), cross_entropy, asked, wanted)
    rows = [3, 17, 40]
    for method in (Influence(weight_decay=0.02), EKFAC(weight_decay=0.02, fisher="exact")):
        result = continued(inverse(method, training), rows, 0.02, steps=200)
        assert result.converged
        for query in range(4):
            truth = [
                problem.losses(problem.without(row).solve(), asked, wanted)[query]
                - problem.losses(weights, asked, wanted)[query]
                for row in rows
            ]
            np.testing.assert_allclose(result.changes(queries, query).numpy(), truth, rtol=2e-3, atol=1e-7)


def minimum(rows: int = 50, weight_decay: float = 0.02) -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    """A softmax regression at its minimum, with its training set."""
    inputs, labels = classified(rows)
    return linear(SoftmaxRegression.of(inputs, labels, weight_decay).solve()), inputs, labels


def test_removal_check_one_step_equals_score() -> None:
    """To first order: steps so small that the loss is as good as linear."""
    model, inputs, labels = minimum()
    training = examples(model, cross_entropy, inputs, labels)
    asked, wanted = classified(3, seed=9)
    queries = examples(model, cross_entropy, asked, wanted)
    method = Influence(damping=30.0, weight_decay=0.02)
    result = continued(inverse(method, training), [5, 8], 0.02, steps=1)
    assert (result.steps, result.at_minimum) == (1, True)
    predicted = scores(fit(method, training), queries)[[5, 8]]
    for query in range(3):
        np.testing.assert_allclose(result.changes(queries, query).numpy(), predicted[:, query], rtol=0.02)


def test_removal_check_takes_no_step_from_weights_at_no_minimum() -> None:
    inputs, labels = classified(50)
    training = examples(mlp(), cross_entropy, inputs, labels)
    result = continued(inverse(Influence(), training), [5, 8], 0.0)
    assert (result.steps, result.at_minimum) == (0, False)
    assert result.excess > 1
    for name, value in training.params.items():
        assert torch.equal(result.params[name][1].to(value), value)


def test_removal_check_of_another_weight_decay_takes_no_step() -> None:
    """Training would go on towards another minimum, and hide what the removal does."""
    model, inputs, labels = minimum(weight_decay=0.05)
    training = examples(model, cross_entropy, inputs, labels)
    found = continued(inverse(Influence(weight_decay=0.001), training), [5], 0.001)
    assert not found.at_minimum


def test_removal_check_fall_bounded_by_loss() -> None:
    """Of a network whose scores are: those of EK-FAC with the empirical Fisher and a small damping."""
    inputs, labels, asked, wanted = digits()
    model = trained_digits_mlp()
    training = examples(model, cross_entropy, inputs[:300], labels[:300])
    queries = examples(model, cross_entropy, asked, wanted)
    fitted = fit(EKFAC(fisher="empirical", relative_damping=1e-3), training)
    predicted = scores(fitted, queries)
    losses = torch.cat([result["loss"] for _, result in queries.norms()]).numpy()
    impossible = np.argwhere(predicted < -losses)
    assert len(impossible) > 100
    row, query = impossible[np.argmin(predicted[tuple(impossible.T)] + losses[impossible[:, 1]])]
    change = float(
        continued(
            inverse(EKFAC(fisher="empirical", relative_damping=1e-3), training), [row], 0.0, steps=3
        ).changes(queries, query)[0]
    )
    assert -losses[query] <= change < 0.1 * abs(predicted[row, query])


def test_removal_check_ends_by_time() -> None:
    """A clock that counts the calls: as many steps as are predicted to end in time."""
    model, inputs, labels = minimum()
    training = examples(model, cross_entropy, inputs, labels)
    told: list[tuple[int, int]] = []

    def steps_in(seconds: float) -> tuple[int, float | None]:
        ticks, damped = count(), Influence(damping=30.0, weight_decay=0.02)
        budget = Budget(lambda: float(next(ticks)), seconds, lambda *said: told.append(said))
        found = continued(inverse(damped, training), [5], 0.02, budget=budget)
        return found.steps, found.seconds

    none, seconds = steps_in(3.0)
    assert none == 0
    assert seconds is not None
    some, seconds = steps_in(25.0)
    assert 0 < some < 10
    assert seconds is not None
    assert steps_in(1e9) == (10, None)
    assert told[-1] == (9, 10)


class Overflowing(Preconditioned):
    """An "inverse" whose steps leave the numbers of float32."""

    def precondition(self, vectors: Vectors) -> Vectors:
        return {name: value * 1e60 for name, value in vectors.items()}


def test_removal_check_nonfinite_objective() -> None:
    inputs, labels = classified(50)
    training = examples(mlp(), cross_entropy, inputs, labels)
    result = continued(Overflowing(training), [5], 0.0)
    assert (result.steps, result.converged) == (0, False)
    assert all(
        torch.equal(result.params[name][0].to(value), value) for name, value in training.params.items()
    )


def test_removal_check_nonfinite_gradients() -> None:
    inputs, labels = classified(50)
    model = mlp()
    with torch.no_grad():
        next(model.parameters())[0, 0] = torch.nan
    training = examples(model, cross_entropy, inputs, labels)
    assert not continued(Overflowing(training), [5], 0.0).converged


class OnceTooLong(Preconditioned):
    """The inverse curvature of least squares with these inputs, whose first step is 200 times too long."""

    calls = 0

    def precondition(self, vectors: Vectors) -> Vectors:
        inputs = self.training.stream.load(0, self.training.count)[0]
        inverse = torch.linalg.inv(inputs[0].T @ inputs[0])
        self.calls += 1
        return {
            name: (200 if self.calls == 1 else 1) * value.double() @ inverse
            for name, value in vectors.items()
        }


def test_removal_check_step_size_grows_again() -> None:
    torch.manual_seed(0)
    inputs, targets = torch.randn(40, 6, dtype=torch.float64), torch.randn(40, 2, dtype=torch.float64)
    model = torch.nn.Linear(6, 2, bias=False, dtype=torch.float64)
    truth = torch.linalg.lstsq(inputs, targets).solution.T
    with torch.no_grad():
        model.weight.copy_(truth)
    training = examples(model, squared_error, inputs, targets)
    result = continued(OnceTooLong(training), [5], 0.0, steps=30)
    assert result.converged
    assert 0.2 < result.length < 0.8
    np.testing.assert_allclose(result.params["weight"][0].numpy(), truth.numpy(), atol=1e-6)
    others = torch.arange(40) != 5
    without = torch.linalg.lstsq(inputs[others], targets[others]).solution.T
    np.testing.assert_allclose(result.params["weight"][1].numpy(), without.numpy(), atol=1e-6)
