"""`psgrad influence` with `data.weight`: the training objective is the sum of the weighted losses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.influence_workplace import QUERIES, InfluenceWorkplace
from tests.workplace import FEATURES, ROWS

DECAY = 0.05


@pytest.fixture
def place(influence_place: InfluenceWorkplace) -> InfluenceWorkplace:
    """Ridge regression at the minimum of its weighted objective; row 0 weighs nothing."""
    found = influence_place
    random = np.random.default_rng(3)
    weights = random.integers(1, 4, ROWS) / 2
    weights[0] = 0.0
    found.save(y=random.normal(size=(ROWS, 1)).astype(np.float32), w=weights)
    found.save_queries(y=random.normal(size=(QUERIES, 1)).astype(np.float32))
    theta = minimum(found.arrays["x"], found.arrays["y"], weights)
    found.use_model(
        "class Model(nn.Linear):\n    def __init__(self):\n"
        f"        super().__init__({FEATURES}, 1, bias=False)\n"
        f"        self.weight.data = torch.tensor([{theta.tolist()}], dtype=torch.float64)\n"
    )
    found.config |= {"loss": "mse", "engine": {"dtype": "float64", "chunk_size": 7}}
    found.config["data"]["weight"] = "w"
    return found


def minimum(x: np.ndarray, y: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Of sum w (x theta - y)^2 + ROWS * DECAY / 2 |theta|^2."""
    x = x.astype(np.float64)
    moment = 2 * x.T @ (weights[:, None] * x) + ROWS * DECAY * np.eye(FEATURES)
    return np.linalg.solve(moment, 2 * x.T @ (weights * y[:, 0]))


def matrix(place: InfluenceWorkplace, **options: Any) -> np.ndarray:
    decay = {} if "name" in options else {"name": "influence", "weight_decay": DECAY}
    place.section["method"] = {**decay, **options}
    place.influence("--no-report", "--matrix", "--overwrite").succeeded()
    scores: np.ndarray = load_file(place.folder / "out/matrix.safetensors")["scores"]
    return scores


@pytest.mark.long
@pytest.mark.every(2)
@pytest.mark.parametrize(
    "options",
    [
        {"solver": "exact"},
        {"solver": "dual"},
        {"solver": "conjugate_gradient", "tolerance": 1e-12},
        {"curvature": "hessian"},
    ],
    ids=str,
)
def test_weighted_removals_are_those_of_training_without_the_row(
    place: InfluenceWorkplace, options: dict[str, Any]
) -> None:
    """The model is linear and the loss a square: scores are exact."""
    x, y, weights = (place.arrays[name] for name in ("x", "y", "w"))
    asked, answers = place.queries["x"].astype(np.float64), place.queries["y"][:, 0]

    def losses(weights: np.ndarray) -> np.ndarray:
        return (asked @ minimum(x, y, weights) - answers) ** 2

    truth = [losses(np.where(np.arange(ROWS) == row, 0, weights)) - losses(weights) for row in range(ROWS)]
    found = matrix(place, **options)
    if options.get("curvature") == "hessian":  # without what a removal does to the curvature
        assert all(np.corrcoef(found[:, q], np.array(truth)[:, q])[0, 1] > 0.98 for q in range(QUERIES))
        return
    if options.get("solver") == "conjugate_gradient":  # which has no leverage
        truth = list(matrix(place, solver="exact", leverage=False))
    np.testing.assert_allclose(found, truth, rtol=1e-6, atol=1e-10)
    np.testing.assert_array_equal(found[0], 0)


@pytest.mark.long
@pytest.mark.every(2)
@pytest.mark.parametrize("solver", ["exact", "conjugate_gradient"])
def test_a_row_of_weight_two_scores_as_the_row_twice(place: InfluenceWorkplace, solver: str) -> None:
    options = {"solver": solver, "leverage": False, "change": "gradient"}
    place.save(w=np.where(np.arange(ROWS) == 5, 2.0, 1.0))
    weighted = matrix(place, **options)
    del place.config["data"]["weight"]
    twice = {name: np.concatenate([place.arrays[name], place.arrays[name][5:6]]) for name in ("x", "y")}
    place.save(**twice, uid=np.array([f"row-{row}" for row in range(ROWS + 1)]))
    place.section["method"] = {}
    doubled = matrix(place, **options, **{"weight_decay": DECAY * ROWS / (ROWS + 1)})
    np.testing.assert_allclose(weighted[5], doubled[5] + doubled[ROWS], rtol=1e-6)
    np.testing.assert_allclose(np.delete(weighted, 5, 0), np.delete(doubled, [5, ROWS], 0), rtol=1e-6)


@pytest.mark.long
def test_gradients_have_the_weights_of_their_rows(place: InfluenceWorkplace) -> None:
    weighted = matrix(place, name="gradient_dot")
    del place.config["data"]["weight"]
    np.testing.assert_allclose(
        weighted, place.arrays["w"][:, None] * matrix(place, name="gradient_dot"), rtol=1e-9
    )


@pytest.mark.parametrize("queries", [{"rows": [3, 4]}, {"worst": 2}])
def test_training_rows_with_weights_are_queries(place: InfluenceWorkplace, queries: dict[str, Any]) -> None:
    """A query's own loss has no weight."""
    place.section["queries"] = queries
    with_weights = matrix(place, name="gradient_cosine")
    rows = load_file(place.folder / "out/matrix.safetensors")["query_index"]
    x, y = place.arrays["x"].astype(np.float64), place.arrays["y"][:, 0]
    residuals = x @ minimum(x, place.arrays["y"], place.arrays["w"]) - y
    gradients = residuals[:, None] * x
    cosines = gradients @ gradients.T / np.outer(*[np.linalg.norm(gradients, axis=1)] * 2)
    np.testing.assert_allclose(with_weights[1:], cosines[1:, rows], rtol=1e-7)


@pytest.mark.parametrize(
    "method", ["projected_influence", "trak", {"name": "ekfac", "fisher": "empirical"}], ids=str
)
def test_squares_of_weights_are_refused(place: InfluenceWorkplace, method: Any) -> None:
    place.section["method"] = method
    place.influence().refused(2, "is not computed for losses with weights", "its curvature")


def test_evaluation_with_weights_is_refused(place: InfluenceWorkplace) -> None:
    place.influence("--evaluate", "loo").refused(2, "models are trained again without weights")
