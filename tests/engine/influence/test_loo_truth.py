"""Scores are what retraining without the example does: softmax regression with L2 on digits, and 200 fits to
a gradient below 1e-10.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from scipy.linalg import cho_factor
from scipy.stats import linregress

from psgrad.engine.execution.examples import Examples
from psgrad.engine.influence.method import Checkpoint
from psgrad.engine.influence.methods.influence import Influence
from tests.engine.influence.problems import (
    SoftmaxRegression,
    classified,
    cross_entropy,
    digits,
    examples,
    linear,
)
from tests.engine.influence.runs import fit, scores

WEIGHT_DECAY = 0.01


@dataclass
class Truth:
    """removed: rows [200], those of the largest leverage first. rises: [200, 360], of each query's loss."""

    training: Examples
    queries: Examples
    removed: np.ndarray
    rises: np.ndarray
    corrected: np.ndarray


@pytest.fixture(scope="module")
def truth() -> Truth:
    inputs, labels, test_inputs, test_labels = digits()
    problem = SoftmaxRegression.of(inputs, labels, WEIGHT_DECAY)
    weights = problem.solve()
    model = linear(weights)
    training = examples(model, cross_entropy, inputs, labels)
    queries = examples(model, cross_entropy, test_inputs, test_labels)
    fitted = fit(Influence(damping=0.0, weight_decay=WEIGHT_DECAY, leverage=True), training)
    order = np.argsort(-fitted.leverage.largest.numpy())
    removed = np.concatenate([order[:20], np.random.default_rng(0).permutation(order[20:])[:180]])
    factor = cho_factor(problem.hessian(weights))
    without = [problem.without(row).solve(weights, factor) for row in removed]
    before = problem.losses(weights, test_inputs, test_labels)
    rises = np.stack([problem.losses(each, test_inputs, test_labels) - before for each in without])
    return Truth(training, queries, removed, rises, scores(fitted, queries)[removed])


@pytest.mark.long
def test_influence_function_predicts_left_out_losses(truth: Truth) -> None:
    for curvature in ("gauss_newton", "hessian"):  # the same matrix here
        method = Influence(curvature, damping=0.0, weight_decay=WEIGHT_DECAY)  # type: ignore[arg-type]
        result = scores(fit(method, truth.training), truth.queries)[truth.removed]
        line = linregress(result.ravel(), truth.rises.ravel())
        assert line.rvalue > 0.999
        assert 0.9 < line.slope < 1.1


@pytest.mark.long
def test_influence_with_leverage_the_slope_is_one(truth: Truth) -> None:
    method = Influence(damping=0.0, weight_decay=WEIGHT_DECAY, leverage=True, change="output")
    result = scores(fit(method, truth.training), truth.queries)[truth.removed]
    for some in (slice(None), slice(20)):  # all removals, and those of the largest leverage alone
        line = linregress(result[some].ravel(), truth.rises[some].ravel())
        assert line.rvalue > 0.9999
        assert abs(line.slope - 1) < 0.01
    # What is left to first order in the query's loss is that loss's own curvature: on the way from the plain
    # slope, but not there.
    plain = scores(fit(Influence(damping=0.0, weight_decay=WEIGHT_DECAY), truth.training), truth.queries)[
        truth.removed
    ]
    slopes = [
        linregress(each.ravel(), truth.rises.ravel()).slope for each in (result, truth.corrected, plain)
    ]
    assert 1 < slopes[0] < slopes[1] < slopes[2]


def slope_of(fitted: Any, truth: Truth) -> float:
    result = scores(fitted, truth.queries)[truth.removed]
    return float(linregress(result.ravel(), truth.rises.ravel()).slope)


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"curvature": "hessian"}], ids=str)
def test_influence_default_options_with_weight_decay_have_slope_one(
    truth: Truth, options: dict[str, Any]
) -> None:
    fitted = fit(Influence(weight_decay=WEIGHT_DECAY, **options), truth.training)
    assert fitted.calibrated
    assert fitted.facts.damping == 0
    assert fitted.facts.leverage is True
    assert fitted.facts.change == "output"
    assert abs(slope_of(fitted, truth) - 1) < 0.01


@pytest.mark.long
def test_influence_without_leverage_scores_are_not_calibrated(truth: Truth) -> None:
    method = Influence(weight_decay=WEIGHT_DECAY, leverage=False)
    fitted = fit(method, truth.training)
    assert not fitted.calibrated
    assert "leverage" in fitted.facts.calibrated_because
    assert slope_of(fitted, truth) > 1.04


@dataclass
class Few:
    """A problem of few rows, all of which are removed one by one."""

    problem: SoftmaxRegression
    weights: np.ndarray
    queries: tuple[torch.Tensor, torch.Tensor]
    truth: Truth

    @classmethod
    def of(
        cls,
        rows: tuple[torch.Tensor, torch.Tensor],
        queries: tuple[torch.Tensor, torch.Tensor],
        weight_decay: float,
    ) -> Few:
        problem = SoftmaxRegression.of(*rows, weight_decay)
        weights = problem.solve()
        training, asked = (examples(linear(weights), cross_entropy, *some) for some in (rows, queries))
        removed = np.arange(len(rows[0]))
        result = cls(problem, weights, queries, Truth(training, asked, removed, np.zeros(0), np.zeros(0)))
        result.truth.rises = result.rises([problem.without(row).solve(weights) for row in removed])
        return result

    def rises(self, moved: list[np.ndarray]) -> np.ndarray:
        """[removals, queries]: of the queries' losses, with the weights of each removal."""
        return np.stack([self.problem.losses(each, *self.queries) for each in moved]) - self.problem.losses(
            self.weights, *self.queries
        )


@pytest.mark.long
@pytest.mark.every(2)
@pytest.mark.parametrize("solver", ["exact", "dual"])
def test_influence_default_options_of_each_solver_have_slope_one(few: Truth, solver: Any) -> None:
    method = Influence(weight_decay=0.05, solver=solver)
    fitted = fit(method, few.training)
    assert fitted.calibrated
    assert fitted.facts.leverage is True
    assert 0.98 < slope_of(fitted, few) < 1.02


@pytest.fixture(scope="module")
def few() -> Truth:
    inputs, labels, test_inputs, test_labels = digits()
    return Few.of((inputs[:150], labels[:150]), (test_inputs[:100], test_labels[:100]), 0.05).truth


@pytest.mark.long
def test_influence_fewer_rows_than_one_newton_step_serves_are_not_calibrated() -> None:
    """24 rows of high leverage: scores are one exact Newton step without the row, and a second step is what
    they miss.
    """
    few = Few.of(classified(24, seed=0), classified(40, seed=100), 0.1)
    heard: list[str] = []
    fitted = fit(Influence(weight_decay=0.1), few.truth.training, heard)
    result = scores(fitted, few.truth.queries)
    assert fitted.facts.largest_leverage > 0.5
    assert linregress(result.ravel(), few.truth.rises.ravel()).slope > 1.04
    assert not fitted.calibrated
    assert "the one Newton step of a score would be followed by a second one 0.066 times as long" in heard[0]
    moved = [few.weights] * 24
    for slopes in ((1.04, 1.06), (0.995, 1.005)):
        for row in range(24):
            rest, here = few.problem.without(row), moved[row]
            moved[row] = here - np.linalg.solve(rest.hessian(here), rest.gradient(here).reshape(-1)).reshape(
                here.shape
            )
        predicted = few.rises(moved)
        assert slopes[0] < linregress(predicted.ravel(), few.truth.rises.ravel()).slope < slopes[1]
        if slopes[0] > 1:
            np.testing.assert_allclose(result, predicted, rtol=1e-6, atol=1e-9)


@pytest.mark.long
def test_influence_wrong_weight_decay_is_not_calibrated(truth: Truth) -> None:
    """Of another weight decay than that of training the weights are no minimum."""
    for wrong in (0.1 * WEIGHT_DECAY, 2 * WEIGHT_DECAY):
        heard: list[str] = []
        fitted = Influence(weight_decay=wrong).fit(truth.training, Checkpoint(say=heard.append))
        assert not fitted.calibrated
        assert "not at the minimum of the training objective" in heard[0]


@pytest.mark.long
def test_influence_added_damping_is_not_calibrated(truth: Truth) -> None:
    for method in (
        Influence(),
        Influence(weight_decay=WEIGHT_DECAY, relative_damping=1.0),
        Influence(damping=0.1),
    ):
        fitted = fit(method, truth.training)
        assert not fitted.calibrated
        assert fitted.facts.leverage is False
        assert fitted.facts.change == "gradient"
