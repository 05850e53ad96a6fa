"""Training that goes on without a row: the retrained truth where that is one, and never an impossible
amount.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from psgrad.engine.gradients.flat import Vectors
from psgrad.engine.influence.continued import Budget, continued
from psgrad.engine.influence.method import Preconditioned
from psgrad.engine.influence.methods.ekfac import EKFAC
from psgrad.engine.influence.methods.influence import Influence
from psgrad.engine.influence.weight_decay import estimated_decay
from tests.engine.influence.problems import (
    SoftmaxRegression,
    classified,
    cross_entropy,
    examples,
    gradient_rows,
    linear,
    mlp,
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


def at_minimum(weight_decay: float = 0.01) -> tuple[torch.nn.Module, torch.Tensor, torch.Tensor]:
    """A network at a minimum of the mean loss with this weight decay, and its training set."""
    inputs, labels = classified(50)
    model = mlp()
    train(model, inputs, labels, weight_decay)
    return model, inputs, labels


def train(
    model: torch.nn.Module, inputs: torch.Tensor, labels: torch.Tensor, weight_decay: float, count: int = 50
) -> None:
    """To the minimum of sum of losses / count + weight_decay / 2 |w|^2, by L-BFGS."""
    optimizer = torch.optim.LBFGS(
        model.parameters(), max_iter=2000, tolerance_grad=1e-10, line_search_fn="strong_wolfe"
    )

    def objective() -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), labels, reduction="sum") / count
        loss = loss + weight_decay / 2 * sum(value.square().sum() for value in model.parameters())
        loss.backward()
        return loss

    optimizer.step(objective)  # type: ignore[no-untyped-call]


def test_removal_check_one_step_equals_score() -> None:
    """To first order."""
    model, inputs, labels = at_minimum()
    training = examples(model, cross_entropy, inputs, labels)
    asked, wanted = classified(3, seed=9)
    queries = examples(model, cross_entropy, asked, wanted)
    method = Influence(damping=30.0, weight_decay=0.01)  # steps so small that the loss is as good as linear
    result = continued(inverse(method, training), [5, 8], 0.01, steps=1)
    assert result.steps == 1
    predicted = scores(fit(method, training), queries)[[5, 8]]
    for query in range(3):
        np.testing.assert_allclose(result.changes(queries, query).numpy(), predicted[:, query], rtol=0.02)


@pytest.mark.long
def test_removal_check_of_a_network_equals_retraining() -> None:
    """With the weight decay of training; without it training goes on towards another minimum."""
    model, inputs, labels = at_minimum(0.05)
    training = examples(model, cross_entropy, inputs, labels)
    asked, wanted = classified(6, seed=9)
    queries = examples(model, cross_entropy, asked, wanted)
    estimate = estimated_decay(training, torch.ones(50))
    fitted = inverse(EKFAC(weight_decay=estimate.value, fisher="exact"), training)
    found = continued(fitted, [3], estimate.value, steps=100)
    silent = continued(inverse(EKFAC(fisher="exact"), training), [3], 0.0, steps=100)
    assert (found.at_minimum, silent.at_minimum, silent.steps) == (True, False, 0)
    other, kept = copy.deepcopy(model), torch.arange(50) != 3
    train(other, inputs[kept], labels[kept], 0.05)
    losses = [
        torch.nn.functional.cross_entropy(each(asked), wanted, reduction="none") for each in (other, model)
    ]
    truth = (losses[0] - losses[1]).detach().numpy()
    changes = [float(found.changes(queries, query)[0]) for query in range(6)]
    np.testing.assert_allclose(changes, truth, rtol=0.05, atol=1e-3 * np.abs(truth).max())


@pytest.mark.parametrize("weight_decay", [0.0, 0.01])
def test_removal_check_at_no_minimum_takes_no_step(weight_decay: float) -> None:
    """An untrained network, and one trained with another weight decay; `excess` by numpy."""
    model, (inputs, labels) = mlp(), classified(50)
    if weight_decay:
        model, inputs, labels = at_minimum(weight_decay)
    training = examples(model, cross_entropy, inputs, labels)
    solver = inverse(Influence(damping=0.5), training)
    result = continued(solver, [5, 8], 0.0)
    assert (result.at_minimum, result.steps) == (False, 0)
    rows = gradient_rows(model, cross_entropy, inputs, labels)
    vectors = torch.from_numpy(np.stack([rows.sum(0), rows[5], rows[8]]))
    steps = training.flat.join(solver.precondition(training.flat.split(vectors)))
    whole, *own = (steps * vectors).sum(1).tolist()
    assert result.excess == pytest.approx(2 * whole / sum(own), rel=1e-6)


class Ticking:
    """A clock on which each pass over the training set takes a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def watch(self, rows: int, of: int) -> None:
        self.now += rows / of


@pytest.mark.parametrize(("seconds", "steps"), [(2.5, 0), (3.5, 1), (11.5, 5), (1e9, 10)])
def test_removal_check_ends_within_its_time(seconds: float, steps: int) -> None:
    """The first values take one pass, and a step takes two: with all rows, and without one."""
    model, inputs, labels = at_minimum()
    clock, heard = Ticking(), list[tuple[int, int]]()
    training = replace(examples(model, cross_entropy, inputs, labels), watch=clock.watch)
    solver = inverse(Influence(relative_damping=1.0, weight_decay=0.01), training)
    began = clock.now
    budget = Budget(clock, seconds, lambda done, of: heard.append((done, of)))
    result = continued(solver, [5], 0.01, budget=budget)
    assert result.steps == steps
    assert clock.now - began == pytest.approx(1 + 2 * steps)
    assert result.seconds == (None if steps == 10 else pytest.approx(2.0))
    assert heard[0] == (0, max(1, min(10, int((seconds - 1) / 2))))


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
