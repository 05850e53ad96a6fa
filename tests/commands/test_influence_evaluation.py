"""`psgrad influence --evaluate` from its config to evaluation.json, against models that numpy retrains."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file
from scipy import stats

from psgrad.engine.influence.evaluation.metrics import random_subsets
from psgrad.engine.influence.evaluation.retraining import EnsembleTrainer
from tests.engine.influence.problems import SoftmaxRegression, linear
from tests.influence_workplace import QUERIES, InfluenceWorkplace, loop_of_gradients
from tests.workplace import CLASSES, ROWS

DECAY = 0.05
LINEAR = "def Model():\n    return nn.Linear(4, 3).double()\n"
OWN = """\
def train(model, inputs, target, seed):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs[0]), target).backward()
        optimizer.step()
    return model
"""


class EvaluationWorkplace(InfluenceWorkplace):
    """A softmax regression in float64, at its minimum; trained again by Newton."""

    def start(self) -> None:
        self.prepare()
        self.use_model(LINEAR)
        self.problem = SoftmaxRegression.of(
            torch.tensor(self.arrays["x"]).double(), torch.tensor(self.arrays["y"]), DECAY
        )
        self.minimum = self.problem.solve()
        self.model = linear(self.minimum)
        save_file(self.model.state_dict(), self.folder / "minimum.safetensors")
        self.config["model"]["checkpoint"] = "minimum.safetensors"
        self.config["engine"] = {"dtype": "float64", "verify": 0}
        self.evaluate = {
            "train": {"optimizer": "newton", "weight_decay": DECAY},
            "subsets": 12,
            "removals": 8,
            "seeds": 2,
        }
        self.section["evaluate"] = self.evaluate

    def evaluated(self, kind: str, *options: str) -> dict[str, Any]:
        """evaluation.json of a run that ends well."""
        self.influence("--evaluate", kind, *options).succeeded()
        found: dict[str, Any] = json.loads((self.folder / f"out-{kind}" / "evaluation.json").read_text())
        return found

    def retrained(self, rows: np.ndarray) -> np.ndarray:
        """[m]: the queries' losses after training on these rows, by numpy."""
        wanted = SoftmaxRegression(
            self.problem.inputs[rows], self.problem.labels[rows], CLASSES, self.problem.penalty
        )
        return self.losses(wanted.solve())

    def losses(self, weights: np.ndarray) -> np.ndarray:
        return self.problem.losses(
            weights, torch.tensor(self.queries["x"]).double(), torch.tensor(self.queries["y"])
        )


@pytest.fixture
def place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> EvaluationWorkplace:
    found = EvaluationWorkplace(tmp_path, monkeypatch, capfd)
    found.start()
    monkeypatch.setattr("psgrad.commands.influence_evaluate.evaluation_plots", lambda result: [])
    return found


# -- the four of them ----------------------------------------------------------------------------------------


@pytest.mark.long
def test_lds_is_the_rank_correlation_with_subsets_that_numpy_retrains(place: EvaluationWorkplace) -> None:
    found = place.evaluated("lds")["lds"]
    drawn, products = random_subsets(ROWS, 12, 0.5, np.random.default_rng([0, 3])), place.products()
    outcomes = np.stack([place.retrained(np.flatnonzero(subset)) for subset in drawn])
    each = [stats.spearmanr(drawn @ products[:, q], -outcomes[:, q]).statistic for q in range(QUERIES)]
    assert found["mean"] == pytest.approx(np.mean(each), abs=1e-9)
    assert found["interval"][0] <= found["mean"] <= found["interval"][1]
    assert found["methods"]["gradient_dot"]["mean"] == found["mean"]
    assert (found["subsets"], found["seeds"], found["models"], found["queries"]) == (
        12,
        1,
        12,
        QUERIES,
    )  # newton has no seeds
    assert found["ceiling"] is None
    controls = {name for name, values in found["methods"].items() if values["control"]}
    assert controls == {
        "random",
        "same label",
        "nearest neighbour (input)",
        "penultimate cosine",
        "training loss",
        "gradient norm",
    }
    details = pd.read_parquet(place.folder / "out-lds" / "evaluation_details.parquet")
    np.testing.assert_allclose(details[details["method"] == "gradient_dot"]["value"], each, atol=1e-9)
    assert details["query_id"].unique().tolist() == [f"query-{row}" for row in range(QUERIES)]


@pytest.mark.long
def test_leave_one_out_is_what_numpy_retrains(place: EvaluationWorkplace) -> None:
    place.section["method"] = {
        "name": "influence",
        "damping": 0.0,
        "weight_decay": DECAY,
        "curvature": "hessian",
    }
    found = place.evaluated("loo")["loo"]
    points = pd.read_parquet(place.folder / "out-loo" / "evaluation_points.parquet")
    assert len(points) == 8 * QUERIES
    whole = place.losses(place.minimum)
    for name, rows in points.groupby("train_id"):
        row = int(str(name).removeprefix("row-"))
        np.testing.assert_allclose(
            rows["actual"], place.retrained(np.delete(np.arange(ROWS), row)) - whole, rtol=0, atol=1e-8
        )
    line = stats.linregress(points["predicted"], points["actual"])
    assert found["slope"] == pytest.approx(line.slope)
    assert found["pooled"] == pytest.approx(line.rvalue)
    assert found["models"] == 9
    dense = dense_scores(place, place.problem.hessian(place.minimum), np.arange(QUERIES))
    for name, rows in points.groupby("train_id"):
        np.testing.assert_allclose(rows["predicted"], dense[int(str(name).removeprefix("row-"))], atol=1e-10)


@pytest.mark.long
def test_what_an_evaluation_does_not_take_from_the_config_is_reported(place: EvaluationWorkplace) -> None:
    place.section["index"] = "index"
    place.section["method"] = {"name": "influence", "weight_decay": 2 * DECAY}
    told = " ".join(place.evaluated("lds")["notes"])
    assert "the index is not asked" in told
    engine = place.manifest("out-lds")["engine"]
    assert engine["chunks"] >= engine["chunks_replayed"] == 0
    assert "chunks of one size" in engine["not_replayed"]
    assert "influence takes a weight decay of 0.1 for the one of training, and models are trained" in told


@pytest.mark.long
def test_removal_curves_are_what_numpy_retrains(place: EvaluationWorkplace) -> None:
    place.evaluate |= {"ks": [2, 5], "queries": 3, "methods": ["gradient_cosine"]}
    found = place.evaluated("removal")["removal"]
    asked = np.sort(np.random.default_rng([0, 2]).choice(np.arange(QUERIES), 3, replace=False))
    products, whole = place.products(), place.losses(place.minimum)
    for entry in found["curve"] if "curve" in found else found["methods"]["gradient_dot"]["curve"]:
        rises = []
        for query in asked:
            left = np.sort(np.argsort(-products[:, query])[entry["removed"] :])
            rises.append(place.retrained(left)[query] - whole[query])
        assert entry["rise"] == pytest.approx(np.mean(rises), abs=1e-8)
    assert set(found["methods"]) == {"gradient_dot", "gradient_cosine", "random", "nearest neighbour (input)"}
    assert found["models"] <= 1 + 4 * 2 * 3


# -- dampings ------------------------------------------------------------------------------------------------


def dense_scores(place: EvaluationWorkplace, matrix: np.ndarray, asked: np.ndarray) -> np.ndarray:
    """[n, m]: g_i' matrix^-1 g_q; the matrix is of the weights flattened class by class, as SoftmaxRegression
    has its Hessian.
    """
    model = linear(place.minimum)
    training = loop_of_gradients(model, place.arrays["x"], place.arrays["y"]).numpy()
    queries = loop_of_gradients(model, place.queries["x"], place.queries["y"]).numpy()[asked]
    places = np.arange(len(matrix)).reshape(CLASSES, -1)
    order = np.concatenate([places[:, :-1].ravel(), places[:, -1]])  # a layer has its weight before its bias
    return training @ np.linalg.solve(matrix[np.ix_(order, order)], queries.T)


# -- training ------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_run_that_was_stopped_goes_on_and_a_finished_one_trains_nothing(
    place: EvaluationWorkplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    place.evaluate["train"]["together"] = 5
    batches = list[int]()
    original: Callable[..., Any] = EnsembleTrainer.__call__

    def counted(self: EnsembleTrainer, jobs: Any) -> Any:
        if len(batches) == 1:
            batches.append(-1)
            raise KeyboardInterrupt
        batches.append(len(jobs))
        return original(self, jobs)

    monkeypatch.setattr(EnsembleTrainer, "__call__", counted)
    assert place.influence("--evaluate", "lds").code == 130
    assert not (place.folder / "out-lds" / "evaluation.json").exists()
    first = place.evaluated("lds", "--overwrite")
    assert batches == [5, -1, 5, 2]
    again = place.evaluated("lds", "--overwrite")
    assert batches == [5, -1, 5, 2]
    assert again == first
    place.evaluate["train"]["weight_decay"] = 2 * DECAY
    assert place.evaluated("lds", "--overwrite") != first
    assert batches == [5, -1, 5, 2, 5, 5, 2]


@pytest.mark.sweep
def test_models_of_other_labels_of_the_same_file_are_trained_anew(place: EvaluationWorkplace) -> None:
    place.save(other=(place.arrays["y"] + 1) % CLASSES)
    first = place.evaluated("lds")
    place.config["data"]["target"] = "other"
    place.evaluated("lds", "--overwrite")
    assert len(list((place.folder / "out-lds" / "retrained").iterdir())) == 2
    place.config["data"]["target"] = "y"
    assert place.evaluated("lds", "--overwrite")["lds"]["mean"] == first["lds"]["mean"]


@pytest.mark.long
def test_models_may_be_trained_by_a_function_of_ones_own(place: EvaluationWorkplace) -> None:
    (place.folder / "own.py").write_text("import torch\nfrom torch import nn\n\n\n" + OWN)
    place.section["evaluate"] = {"train": "own.py:train", "subsets": 5, "seeds": 2}
    found = place.evaluated("lds")["lds"]
    assert found["models"] == 10
    assert found["ceiling"] is not None
    shards = sorted((place.folder / "out-lds" / "retrained").iterdir())
    place.section["evaluate"]["subsets"] = 5
    (place.folder / "own.py").write_text(
        "import torch\nfrom torch import nn\n\n\n" + OWN.replace("lr=0.1", "lr=0.2")
    )
    assert place.evaluated("lds", "--overwrite")["lds"]["mean"] != found["mean"]
    assert len(sorted((place.folder / "out-lds" / "retrained").iterdir())) == 2 * len(shards)


@pytest.mark.long
def test_weights_that_do_not_depend_on_the_seed_are_reported(place: EvaluationWorkplace) -> None:
    place.evaluate["subsets"] = 3
    assert not any("whatever the seed" in note for note in place.evaluated("lds")["notes"])
    place.use_model("def Model():\n    torch.manual_seed(0)\n    return nn.Linear(4, 3)\n")
    assert any("whatever the seed" in note for note in place.evaluated("lds", "--overwrite")["notes"])


# -- methods and refusals ------------------------------------------------------------------------------------


@pytest.mark.long
def test_methods_of_one_name_are_distinguished_and_one_without_scores_is_left_out(
    place: EvaluationWorkplace,
) -> None:
    place.section["method"] = {"name": "influence", "weight_decay": DECAY}
    place.evaluate["subsets"] = 3
    place.evaluate["methods"] = [
        {"name": "influence", "weight_decay": DECAY, "damping": 1.0},
        "gradient_cosine",
        {"name": "influence", "damping": 0.0},
    ]
    content = place.evaluated("lds")
    names = [name for name, values in content["lds"]["methods"].items() if not values["control"]]
    assert names == [
        f"influence (weight_decay {DECAY})",
        f"influence (damping 1.0, weight_decay {DECAY})",
        "gradient_cosine",
    ]
    assert content["method"] == names[0]
    assert any(note.startswith("left out: influence (damping 0.0), as ") for note in content["notes"])
    assert content["lds"]["methods"]["gradient_cosine"]["ahead"] == pytest.approx(
        content["lds"]["mean"] - content["lds"]["methods"]["gradient_cosine"]["mean"]
    )


@pytest.mark.long
def test_a_method_without_scores_of_its_own_ends_the_run(place: EvaluationWorkplace) -> None:
    """And nothing of an earlier one is left that could be taken for its own."""
    place.evaluate["subsets"] = 3
    place.evaluated("lds")
    place.section["method"] = {"name": "influence", "damping": 0.0}
    place.influence("--evaluate", "lds", "--overwrite").refused(3, "damping")
    assert sorted(path.name for path in (place.folder / "out-lds").iterdir()) == [
        "manifest.json",
        "retrained",
    ]


@pytest.mark.long
def test_a_method_of_ones_own_that_fails_is_left_out_of_the_comparison(place: EvaluationWorkplace) -> None:
    (place.folder / "own.py").write_text(
        "from dataclasses import dataclass\nfrom psgrad.engine.influence.methods.gradient_products import"
        " GradientDot\n\n\n@dataclass(frozen=True)\nclass Broken(GradientDot):\n    by: int = 0\n\n    def"
        " fit(self, training, checkpoint):\n        return 1 / self.by\n"
    )
    place.evaluate["methods"] = [{"name": "own.py:Broken", "by": 0}]
    place.evaluate["subsets"] = 3
    outcome = place.influence("--evaluate", "lds").succeeded()
    assert "left out: own.py:Broken, as scoring by the method own.py:Broken raised" in outcome.out
    place.section["method"] = "own.py:Broken"
    place.influence("--evaluate", "lds", "--overwrite").refused(
        3, "scoring by the method own.py:Broken raised ZeroDivisionError"
    )


@pytest.mark.parametrize(
    ("kind", "options", "rows", "words"),
    [
        ("lds", {"fraction": 1e-3}, ROWS, f"fraction: 0.001 of {ROWS} training examples are 0 of them"),
        ("lds", {"fraction": 0.999}, ROWS, f"0.999 of {ROWS} training examples are {ROWS} of them"),
        ("loo", {}, 2, "there are 2 training examples to leave out, one at a time"),
        ("removal", {"ks": [ROWS]}, ROWS, f"has {ROWS}, and there are {ROWS} training examples"),
    ],
)
def test_evaluation_refused(
    place: EvaluationWorkplace, kind: str, options: dict[str, Any], rows: int, words: str
) -> None:
    place.save(**{name: column[:rows] for name, column in place.arrays.items()})
    place.evaluate |= options
    place.influence("--evaluate", kind).refused(2, words)
