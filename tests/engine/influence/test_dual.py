"""The dual form is the exact solve at any damping, for any number of parameters."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from psgrad.engine.influence.methods.influence import Influence
from psgrad.errors import InfluenceError
from tests.engine.influence.problems import (
    classified,
    convolution,
    cross_entropy,
    examples,
    gauss_newton,
    gradient_rows,
    huber,
    mlp,
    squared_error,
)
from tests.engine.influence.runs import fit, scores, self_influence

VALUES = torch.randn(12, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
PROBLEMS: dict[str, Any] = {
    "softmax": (mlp(), cross_entropy, *classified(12)),
    "more rows than parameters": (mlp(0, (3, 3)), cross_entropy, *classified(30, (3,))),
    "convolution": (convolution(), cross_entropy, *classified(12, (1, 6, 6))),
    "squares": (mlp(), squared_error, classified(12)[0], VALUES),
    "gradients outside the span": (mlp(), huber, classified(12)[0], VALUES),
}


def setup(name: str) -> tuple[Any, Any, np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Training set, queries, their gradients, and the curvatures."""
    model, criterion, inputs, target = PROBLEMS[name]
    rows = gradient_rows(model, criterion, inputs, target)
    curvatures = {"fisher": rows.T @ rows, "gauss_newton": gauss_newton(model, criterion, inputs, target)}
    asked = inputs[:5] * 0.7, target[:5]
    training, queries = (examples(model, criterion, *each) for each in ((inputs, target), asked))
    return training, queries, rows, gradient_rows(model, criterion, *asked), curvatures


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("curvature", ["gauss_newton", "fisher"])
def test_dual_equals_dense_solve(name: str, curvature: Any) -> None:
    training, queries, rows, query_rows, curvatures = setup(name)
    fitted = fit(Influence(curvature, "dual", damping=1e-3, weight_decay=1e-3), training)
    matrix = np.linalg.inv(curvatures[curvature] + len(rows) * 2e-3 * np.eye(rows.shape[1]))
    want = rows @ matrix @ query_rows.T
    np.testing.assert_allclose(scores(fitted, queries), want, rtol=0, atol=1e-9 * np.abs(want).max())
    own, norms = self_influence(fitted)
    np.testing.assert_allclose(own, np.einsum("np,pq,nq->n", rows, matrix, rows), rtol=1e-8)
    np.testing.assert_allclose(norms, np.linalg.norm(rows @ matrix, axis=1), rtol=1e-8)
    assert fitted.facts.mean_eigenvalue == pytest.approx(
        np.trace(curvatures[curvature]) / len(rows) / rows.shape[1], rel=1e-10
    )


@pytest.mark.parametrize("curvature", ["gauss_newton", "fisher"])
def test_dual_small_damping_precision(curvature: Any) -> None:
    training, queries, rows, query_rows, curvatures = setup("softmax")
    relative = 1e-9
    fitted = fit(Influence(curvature, "dual", relative_damping=relative), training)
    values, vectors = np.linalg.eigh(curvatures[curvature])
    # What of the gradients lies outside the curvature's span is rounding, which 1 / damping would blow up.
    kept = values > 1e-13 * values[-1]
    shift = relative * values.sum() / rows.shape[1]
    want = (rows @ vectors[:, kept] / (values[kept] + shift)) @ (query_rows @ vectors[:, kept]).T
    np.testing.assert_allclose(scores(fitted, queries), want, rtol=0, atol=1e-6 * np.abs(want).max())


@pytest.mark.long
def test_dual_zero_damping_refused() -> None:
    training, queries, *_ = setup("softmax")
    with pytest.raises(
        InfluenceError, match="the Gauss-Newton matrix is singular: it is made of 36 rows"
    ) as error:
        fit(Influence(solver="dual", damping=0.0), training)
    enough = float(str(error.value).split("set influence.method.damping: ")[1].split(",")[0])
    assert np.isfinite(scores(fit(Influence(solver="dual", damping=enough), training), queries)).all()
