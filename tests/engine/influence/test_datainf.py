"""DataInf against its definition: a mean of inverses, each materialised, in numpy and float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from psgrad.engine.execution.examples import Examples
from psgrad.engine.influence.method import Checkpoint
from psgrad.engine.influence.methods import datainf
from psgrad.engine.influence.methods.datainf import DataInf, MeanOfInverses
from psgrad.errors import InfluenceError
from tests.engine.influence.problems import classified, convolution, cross_entropy, examples, gradient_rows
from tests.engine.influence.rows_of_gradients import matrix_of

pytestmark = pytest.mark.usefixtures("on_device")

N, M = 13, 4


def problem(**options: Any) -> tuple[Examples, Examples]:
    x, y = classified(N + M, (1, 6, 6))
    model = convolution()
    return examples(model, cross_entropy, x[:N], y[:N], **options), examples(
        model, cross_entropy, x[N:], y[N:], **options
    )


def fitted(training: Examples, **options: Any) -> MeanOfInverses:
    result = DataInf(**options).fit(training, Checkpoint())
    assert isinstance(result, MeanOfInverses)
    return result


def oracle(relative: float = 0.1, weight_decay: float = 0.0) -> dict[str, np.ndarray]:
    """name -> [N, M]: with each of the n inverses materialised."""
    x, y = classified(N + M, (1, 6, 6))
    rows, columns = gradient_rows(convolution(), cross_entropy, x, y), problem()[0].flat.columns
    result = {}
    for name, own in columns.items():
        training, queries = rows[:N, own], rows[N:, own]
        size = training.shape[1]
        mean = (training**2).mean()
        added = (relative * mean + weight_decay) * np.eye(size)
        inverse = np.mean([np.linalg.inv(np.outer(g, g) + added) for g in training], axis=0)
        result[name] = training @ inverse @ queries.T / N
    return result


def test_datainf_scores_equal_mean_of_inverses() -> None:
    training, queries = problem()
    for options in ({}, {"relative_damping": 0.7, "weight_decay": 0.01}):
        method = fitted(training, **options)
        expected = oracle(options.get("relative_damping", 0.1), options.get("weight_decay", 0.0))
        result = matrix_of(method, queries, "parameter")
        for name, value in expected.items():
            assert np.abs(result[name].numpy() - value).max() < 1e-10 * np.abs(value).max()
        total = sum(expected.values())
        assert np.abs(matrix_of(method, queries)[""].numpy() - total).max() < 1e-10 * np.abs(total).max()


class Scaled(nn.Module):
    """A linear layer and a temperature, which is a parameter without axes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.temperature = nn.Linear(6, 3), nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.temperature


def test_datainf_parameter_of_one_number() -> None:
    x, y = classified(N, (6,))
    model = Scaled().double()
    training = examples(model, cross_entropy, x, y)
    rows = gradient_rows(model, cross_entropy, x, y)[:, training.flat.columns["temperature"]][:, 0]
    expected = np.outer(rows, rows) * np.mean(1 / (rows**2 + 0.1 * np.mean(rows**2))) / N
    result = matrix_of(fitted(training), training, "parameter")["temperature"]
    np.testing.assert_allclose(result, expected, rtol=1e-10)


def test_datainf_one_example_is_solved_exactly() -> None:
    """Of one example the mean of inverses is the inverse of the empirical Fisher, and the score that of an
    influence function.
    """
    x, y = classified(1 + M, (1, 6, 6))
    model = convolution()
    training, queries = (
        examples(model, cross_entropy, x[:1], y[:1]),
        examples(model, cross_entropy, x[1:], y[1:]),
    )
    rows, own = gradient_rows(model, cross_entropy, x, y), training.flat.columns["5.weight"]
    g = rows[0, own]
    expected = rows[1:, own] @ np.linalg.solve(np.outer(g, g) + 0.4 * np.eye(len(g)), g)
    result = matrix_of(fitted(training, damping=0.4), queries, "parameter")["5.weight"][0].numpy()
    assert np.abs(result - expected).max() < 1e-12 * np.abs(expected).max()


def test_datainf_self_influence(monkeypatch: pytest.MonkeyPatch) -> None:
    training, _ = problem(chunk_size=5)
    monkeypatch.setattr(datainf, "_BLOCK_NUMBERS", 3 * training.flat.size)
    method = fitted(training)
    blocks = list(method.self_influence())
    assert [(block.start, block.stop) for block in blocks] == [(0, 3), (3, 5), (5, 8), (8, 10), (10, 13)]
    result = torch.cat([block.self_influence for block in blocks])
    assert torch.allclose(result.cpu(), matrix_of(method, training)[""].diagonal(), rtol=1e-10, atol=0)
    rows = training.materialise().to(training.device)
    prepared = training.flat.join(method.precondition(training.flat.split(rows)))
    norms = torch.cat([block.preconditioned_norm for block in blocks])
    assert torch.allclose(norms.cpu(), prepared.norm(dim=1).cpu(), rtol=1e-10, atol=0)


def test_datainf_zero_damping_refused() -> None:
    training, _ = problem()
    with pytest.raises(InfluenceError, match=r"no inverse for 0\.weight(?s:.*)method\.damping: "):
        fitted(training, damping=0.0)


def test_datainf_nonfinite_gradients_refused() -> None:
    x, y = classified(N, (1, 6, 6))
    x[3, 0, 0, 0] = torch.nan
    with pytest.raises(InfluenceError, match=r"training gradients of 0\.weight are not finite"):
        fitted(examples(convolution(), cross_entropy, x, y))
