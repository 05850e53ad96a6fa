"""Scores are what retraining without the example does: softmax regression with L2 on digits, and 200 fits to a gradient below 1e-10."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from scipy.linalg import cho_factor
from scipy.stats import linregress

from psgrad.engine.examples import Examples
from psgrad.engine.influence.method import Checkpoint
from psgrad.engine.influence.methods.influence import Influence
from tests.engine.influence.problems import SoftmaxRegression, cross_entropy, digits, examples, linear
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


def test_the_influence_function_predicts_left_out_losses(truth: Truth) -> None:
    for curvature in ("gauss_newton", "hessian"):  # the same matrix here
        method = Influence(curvature, damping=0.0, weight_decay=WEIGHT_DECAY)  # type: ignore[arg-type]
        found = scores(fit(method, truth.training), truth.queries)[truth.removed]
        line = linregress(found.ravel(), truth.rises.ravel())
        assert line.rvalue > 0.999
        assert 0.9 < line.slope < 1.1


def test_with_leverage_the_slope_is_one(truth: Truth) -> None:
    method = Influence(damping=0.0, weight_decay=WEIGHT_DECAY, leverage=True, change="output")
    found = scores(fit(method, truth.training), truth.queries)[truth.removed]
    for some in (slice(None), slice(20)):  # all removals, and those of the largest leverage alone
        line = linregress(found[some].ravel(), truth.rises[some].ravel())
        assert line.rvalue > 0.9999
        assert abs(line.slope - 1) < 0.01
    # What is left to first order in the query's loss is that loss's own curvature: on the way from the plain slope, but not there.
    plain = scores(fit(Influence(damping=0.0, weight_decay=WEIGHT_DECAY), truth.training), truth.queries)[truth.removed]
    slopes = [linregress(each.ravel(), truth.rises.ravel()).slope for each in (found, truth.corrected, plain)]
    assert 1 < slopes[0] < slopes[1] < slopes[2]


def slope(method: Influence, truth: Truth, training: Examples | None = None) -> float:
    """Of retrained on predicted rises."""
    found = scores(fit(method, training or truth.training), truth.queries)[truth.removed]
    return float(linregress(found.ravel(), truth.rises.ravel()).slope)


def test_default_options_with_weight_decay_have_slope_one(truth: Truth) -> None:
    method = Influence(weight_decay=WEIGHT_DECAY)
    fitted = fit(method, truth.training)
    assert fitted.calibrated
    assert fitted.facts["damping"] == 0
    assert fitted.facts["leverage"] is True
    assert fitted.facts["change"] == "output"
    assert abs(slope(method, truth) - 1) < 0.01


def test_default_options_by_layer_have_slope_one(truth: Truth) -> None:
    """Scores by layer are to first order in the query's output, and add up."""
    parts = [block.scores for block in fit(Influence(weight_decay=WEIGHT_DECAY), truth.training).scores(truth.queries, "parameter")]
    total = torch.cat([torch.stack(list(part.values())).sum(0) for part in parts]).numpy()[truth.removed]
    assert abs(linregress(total.ravel(), truth.rises.ravel()).slope - 1) < 0.02


def test_wrong_weight_decay_is_not_calibrated(truth: Truth) -> None:
    """Of another weight decay than that of training the weights are no minimum."""
    for wrong in (0.1 * WEIGHT_DECAY, 2 * WEIGHT_DECAY):
        heard: list[str] = []
        fitted = Influence(weight_decay=wrong).fit(truth.training, Checkpoint(say=heard.append))
        assert not fitted.calibrated
        assert "not at the minimum of the training objective" in heard[0]


def test_added_damping_is_not_calibrated(truth: Truth) -> None:
    for method in (Influence(), Influence(weight_decay=WEIGHT_DECAY, relative_damping=1.0), Influence(damping=0.1)):
        fitted = fit(method, truth.training)
        assert not fitted.calibrated
        assert fitted.facts["leverage"] is False
        assert fitted.facts["change"] == "gradient"
