"""TRAK beside its formula materialised, beside ridge regression, which it is exactly, and where it must
refuse.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from psgrad.engine.gradients.projections.projector import Projector
from psgrad.engine.influence.index.index_rows import RowPass, margin
from psgrad.engine.influence.method import Checkpoint
from psgrad.engine.influence.methods.projected import TRAK, ProjectedInfluence
from psgrad.errors import InfluenceError
from tests.engine.influence.problems import both, cross_entropy, examples, mlp, parts, squared_error
from tests.engine.influence.rows_of_gradients import (
    log_odds,
    probabilities,
    ridge_products,
    rows_of,
    scores_of,
)
from tests.engine.influence.runs import matrix_of, self_influence

N, M, CLASSES = 13, 4, 3
KINDS = ["none", "sparse", "two-sided"]


def network(seed: int = 0) -> nn.Module:
    return mlp(seed, (6, 7, CLASSES))


@pytest.fixture(scope="module")
def data() -> tuple[torch.Tensor, ...]:
    return parts(N, M)


def minus_margin(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return -margin(output, target)


def projector(method: TRAK | ProjectedInfluence, model: nn.Module, number: int) -> Projector:
    return Projector(method.projection, method.dimension, method.seed, number, dict(model.named_parameters()))


def trak_written_out(
    method: TRAK, models: list[nn.Module], data: Any, measured: Any = log_odds, sign: float = 1.0
) -> np.ndarray:
    x, y, xq, yq = data
    products, misses = [], []
    for number, model in enumerate(models):
        p = projector(method, model, number)
        queries, rows = sign * rows_of(model, measured, xq, yq, p), rows_of(model, log_odds, x, y, p)
        products.append(
            ridge_products(
                queries, rows, method.relative_damping if method.damping is None else None, method.damping
            )
        )
        misses.append(1 - probabilities(model, x, y))
    return np.mean(products, axis=0) * np.mean(misses, axis=0)[:, None]


def assert_close(found: np.ndarray, expected: np.ndarray, tolerance: float = 1e-10) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * np.abs(expected).max())


# -- The formula ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("checkpoints", [1, 3])
def test_trak_scores_equal_formula(data: Any, kind: Any, checkpoints: int) -> None:
    method = TRAK(dimension=9, projection=kind, seed=5, relative_damping=0.3)
    models = [network(seed) for seed in range(checkpoints)]
    training, queries = zip(*[both(model, data, minus_margin) for model in models], strict=True)
    assert_close(scores_of(method, training, queries), trak_written_out(method, models, data))


def test_trak_self_influence(data: Any) -> None:
    method, model = TRAK(dimension=9), network()
    training, _ = both(model, data)
    own, _ = self_influence(method.fit(training, Checkpoint()))
    p, (x, y, _, _) = projector(method, model, 0), data
    rows, misses = rows_of(model, log_odds, x, y, p), 1 - probabilities(model, x, y)
    expected = np.diagonal(ridge_products(rows, rows, method.relative_damping)) * misses**2
    assert_close(own, expected)


# -- Several checkpoints -------------------------------------------------------------------------------------


def test_trak_two_checkpoints(data: Any) -> None:
    method, models = TRAK(dimension=9), [network(0), network(1)]
    single = [scores_of(method, *([each] for each in both(model, data, minus_margin))) for model in models]
    joined = scores_of(method, *zip(*[both(model, data, minus_margin) for model in models], strict=True))
    assert all(
        np.abs(joined - factor * one).max() > 0.05 * np.abs(joined).max()
        for one in single
        for factor in (1, 2)
    )
    same = scores_of(method, *zip(*[both(models[0], data, minus_margin)] * 2, strict=True))
    # each checkpoint has a projection of its own
    assert np.abs(same - single[0]).max() > 1e-3 * np.abs(same).max()


# -- The margin ----------------------------------------------------------------------------------------------


def weights_of(criterion: Any, model: nn.Module, inputs: torch.Tensor, target: torch.Tensor) -> np.ndarray:
    p = Projector("none", 1, 0, 0, dict(model.named_parameters()))
    blocks = RowPass(examples(model, criterion, inputs, target), p, "margin").blocks()
    return torch.cat([block.weight for block in blocks if block.weight is not None]).numpy()


def test_trak_margin_equals_log_odds() -> None:
    for output, label in zip(torch.randn(20, 5, dtype=torch.float64), torch.arange(20) % 5, strict=True):
        torch.testing.assert_close(margin(output, label), log_odds(output, label), rtol=1e-12, atol=1e-12)


def test_trak_weights_precision() -> None:
    model = nn.Linear(2, 3, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[15.0, 0.0], [0.0, 1.0], [0.0, 0.0]]))
    result = weights_of(cross_entropy, model, torch.tensor([[1.0, 1.0]]), torch.tensor([0]))
    assert result == pytest.approx([1 / (1 + math.exp(15) / (math.e + 1))], rel=1e-9, abs=0)


def test_trak_ignored_label_has_no_gradient_and_no_weight(data: Any) -> None:
    x, y, _, _ = data
    labels = torch.cat([torch.tensor([-100]), y[1:]])

    def ignoring(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output[None], label[None], reduction="sum")

    training = examples(network(), ignoring, x, labels, chunk_size=N)
    (block,) = RowPass(training, Projector("none", 1, 0, 0, training.params), "margin").blocks()
    assert block.weight is not None
    assert block.weight[0] == 0
    assert not block.rows.double()[0].any()
    assert block.rows.double()[1:].any(1).all()


@pytest.mark.parametrize(
    "criterion",
    [
        lambda output, label: F.cross_entropy(output[None], label[None], label_smoothing=0.2),
        lambda output, label: (output - F.one_hot(label, CLASSES)).square().sum(),
    ],
)
def test_trak_loss_without_margin_refused(data: Any, criterion: Any) -> None:
    x, y, _, _ = data
    with pytest.raises(InfluenceError, match="the loss of row 0 is no function of its margin") as caught:
        TRAK().fit(examples(network(), criterion, x, y), Checkpoint())
    assert "choose another method, such as influence or ekfac" in str(caught.value)


def test_trak_outputs_without_a_margin_are_refused(data: Any) -> None:
    x, _, _, _ = data
    values = torch.randn(N, CLASSES, dtype=torch.float64)
    with pytest.raises(
        InfluenceError,
        match=r"TRAK has no margin here: one sample has an output \[3\] and a float64 target \[3\]",
    ):
        TRAK().fit(examples(network(), squared_error, x, values), Checkpoint())


# -- Projected influence -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_projected_influence_equals_damped_empirical_fisher(data: Any, kind: Any) -> None:
    method, model = ProjectedInfluence(dimension=9, projection=kind, relative_damping=0.2), network()
    x, y, xq, yq = data
    p = projector(method, model, 0)
    rows, queries = rows_of(model, F.cross_entropy, x, y, p), rows_of(model, F.cross_entropy, xq, yq, p)
    training, asked = both(model, data)
    assert_close(scores_of(method, [training], [asked]), ridge_products(queries, rows, 0.2))
    fitted = method.fit(training, Checkpoint())
    own, norms = self_influence(fitted)
    assert_close(own, np.diagonal(ridge_products(rows, rows, 0.2)))
    moment = rows.T @ rows
    solved = np.linalg.solve(moment + N * fitted.facts.damping * np.eye(len(moment)), rows.T)
    assert_close(norms, np.linalg.norm(solved, axis=0))
    assert fitted.facts.mean_eigenvalue == pytest.approx(np.trace(moment) / N / len(moment))


# -- Refusals ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [TRAK(damping=0.0), ProjectedInfluence(relative_damping=0.0)])
def test_trak_singular_moment_refused(data: Any, method: Any) -> None:
    training, queries = both(network(), data)  # 13 examples, 73 parameters
    with pytest.raises(
        InfluenceError, match="is singular: damping 0, 73 columns, 13 training examples"
    ) as caught:
        method.fit(training, Checkpoint())
    enough = float(str(caught.value.hint).split("damping: ")[1].split(",")[0])
    fitted = type(method)(damping=enough).fit(training, Checkpoint())
    assert matrix_of(fitted, queries).isfinite().all()


def test_trak_nonfinite_rows(data: Any) -> None:
    x, y, xq, yq = data
    spoilt = x.clone()
    spoilt[4] = torch.nan
    training, queries = both(network(), (spoilt, y, xq, yq))
    result = matrix_of(ProjectedInfluence(damping=0.1).fit(training, Checkpoint()), queries)
    keep = torch.arange(N) != 4
    without, _ = both(network(), (x[keep], y[keep], xq, yq))
    expected = matrix_of(ProjectedInfluence(damping=0.1).fit(without, Checkpoint()), queries)
    torch.testing.assert_close(result[keep], expected, rtol=1e-10, atol=1e-14)
    assert result[4].isnan().all()
