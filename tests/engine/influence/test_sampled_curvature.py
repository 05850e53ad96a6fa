"""Influence by random rows of the Gauss-Newton matrix: exact in these rows, other ones at each checkpoint."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from psgrad.engine.influence.curvature.kronecker_fitting import fisher_rows
from psgrad.engine.influence.methods.influence import Influence
from psgrad.errors import ConfigError
from tests.engine.influence.problems import classified, cross_entropy, examples, gradient_rows, mlp
from tests.engine.influence.runs import fit, scores, self_influence

N, DAMPING = 12, 1e-2


def setup() -> tuple[Any, Any, np.ndarray, np.ndarray]:
    """Training set, queries, and the gradients of both."""
    model, (inputs, target) = mlp(), classified(N)
    both = (inputs, target), (inputs[:5] * 0.7, target[:5])
    training, queries = (examples(model, cross_entropy, *each) for each in both)
    return training, queries, *(gradient_rows(model, cross_entropy, *each) for each in both)


def expected(rows: torch.Tensor, gradients: np.ndarray, of_queries: np.ndarray) -> np.ndarray:
    drawn = rows.double().numpy()
    return gradients @ np.linalg.solve(drawn.T @ drawn + N * DAMPING * np.eye(drawn.shape[1]), of_queries.T)  # type: ignore[no-any-return]


@pytest.mark.parametrize("solver", ["exact", "dual"])
@pytest.mark.parametrize("draws", [1, 3])
def test_sampled_curvature_equals_dense_solve_of_the_rows(
    solver: Any, draws: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    training, queries, gradients, of_queries = setup()
    drawn = []

    def recorded(*arguments: Any) -> Any:
        drawn.append(fisher_rows(*arguments))
        return drawn[-1]

    monkeypatch.setattr("psgrad.engine.influence.curvature.operator.fisher_rows", recorded)
    method = Influence("sampled", solver, damping=DAMPING, draws=draws)
    fitted = fit(method, training)
    found = scores(fitted, queries)
    assert len(drawn[0]) == N * draws
    want = expected(drawn[0].materialise(), gradients, of_queries)
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-9 * np.abs(want).max())
    own, norms = self_influence(fitted)
    steps = expected(drawn[0].materialise(), np.eye(gradients.shape[1]), gradients)
    np.testing.assert_allclose(own, np.einsum("np,pn->n", gradients, steps), rtol=1e-9)
    np.testing.assert_allclose(norms, np.linalg.norm(steps, axis=0), rtol=1e-9)


def test_sampled_curvature_large_output() -> None:
    """A language model: 130 words at each of 6 positions, more numbers than the other curvatures take."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(130, 4), nn.Linear(4, 130)).double()
    tokens = torch.randint(130, (7, 7))
    criterion = lambda output, target: F.cross_entropy(output, target)
    training = examples(model, criterion, tokens[:, :-1], tokens[:, 1:])
    fitted = fit(Influence("sampled", damping=DAMPING), training)
    assert fitted.facts.solver == "dual"
    want = scores(fit(Influence("sampled", "exact", damping=DAMPING), training), training)
    found = scores(fitted, training)
    np.testing.assert_allclose(found, want, rtol=0, atol=1e-9 * np.abs(want).max())
    # one row in place of 780 for a sample: the scores resemble those of the exact curvature
    exact = scores(fit(Influence("fisher", damping=DAMPING), training), training)
    assert np.corrcoef(found.ravel(), exact.ravel())[0, 1] > 0.5


def test_sampled_curvature_ranks_only() -> None:
    training, *_ = setup()
    method = Influence("sampled")
    assert method.unit == "relative, no unit"
    assert not method.predicts_removal
    fitted = fit(Influence("sampled", weight_decay=0.1), training)
    assert not fitted.calibrated
    assert "right on average alone" in str(fitted.facts.calibrated_because)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"solver": "conjugate_gradient"}, "the conjugate_gradient solver has no sampled rows"),
        ({"leverage": True}, "leverage correction"),
        ({"draws": 0}, "draws is 0"),
    ],
)
def test_sampled_curvature_options_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Influence("sampled", **options)
