"""`psgrad review`: predictions against training on the changed data, the changed rows, the verdict, the
files, and what is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

import psgrad
from psgrad.errors import ConfigError, PsgradError
from psgrad.quality.changed_rows import NO_ROW
from psgrad.run.results.review import ReviewResult
from tests.workplace import Outcome

ROWS, QUERIES, FEATURES, CLASSES, DECAY = 200, 60, 5, 3, 1e-2

MODELS = """
from torch import nn

def linear():
    return nn.Linear(5, 3).double()

def network():
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
"""


class Place:
    """Rows, queries and a logistic regression at its minimum, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        draw = np.random.default_rng(0)
        self.rows = self.drawn(draw, ROWS, "row")
        self.queries = self.drawn(draw, QUERIES, "query")
        self.write("base.npz", self.rows)
        self.write("queries.npz", self.queries)
        (folder / "models.py").write_text(MODELS)
        self.start = minimum(self.rows)
        save_file(self.start, folder / "linear.safetensors")

    @staticmethod
    def drawn(draw: np.random.Generator, count: int, name: str) -> dict[str, np.ndarray]:
        inputs = draw.normal(size=(count, FEATURES))
        logits = inputs @ np.random.default_rng(1).normal(size=(FEATURES, CLASSES)) * 4
        labels = (logits + draw.gumbel(size=(count, CLASSES))).argmax(1)
        ids = np.array([f"{name}-{place:03d}" for place in range(count)])
        return {"x": inputs, "y": labels, "id": ids, "site": labels % 2}

    def write(self, name: str, rows: dict[str, np.ndarray]) -> Path:
        np.savez(self.folder / name, **rows)
        return self.folder / name

    def config(self, **review: Any) -> dict[str, Any]:
        return {
            "version": 1,
            "model": {
                "factory": f"{self.folder}/models.py:linear",
                "checkpoint": str(self.folder / "linear.safetensors"),
            },
            "loss": "cross_entropy",
            "data": {"path": str(self.folder / "base.npz"), "inputs": "x", "target": "y", "id": "id"},
            "influence": {"queries": {"path": str(self.folder / "queries.npz")}},
            "engine": {"dtype": "float64"},
            "review": review,
            "output": str(self.folder / "run"),
        }

    def review(self, head: dict[str, np.ndarray], report: bool = False, **review: Any) -> ReviewResult:
        path = self.write("head.npz", head)
        base = self.folder / "base.npz"
        return psgrad.review(self.config(**review), base, path, overwrite=True, report=report)

    def flipped(self, count: int) -> dict[str, np.ndarray]:
        labels = self.rows["y"].copy()
        labels[:count] = (labels[:count] + 1) % CLASSES
        return {**self.rows, "y": labels}

    def without(self, count: int) -> dict[str, np.ndarray]:
        return {name: values[count:] for name, values in self.rows.items()}

    def more(self, count: int, wrong: bool = False) -> dict[str, np.ndarray]:
        new = self.drawn(np.random.default_rng(7), count, "new")
        if wrong:
            new["y"] = (new["y"] + 1) % CLASSES
        return {name: np.concatenate([self.rows[name], new[name]]) for name in self.rows}


def minimum(rows: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """A logistic regression at the minimum of the mean loss and its weight decay, by Newton's method."""
    inputs, labels = torch.from_numpy(rows["x"]), torch.from_numpy(rows["y"])

    def objective(flat: torch.Tensor) -> torch.Tensor:
        matrix = flat.reshape(CLASSES, FEATURES + 1)
        outputs = inputs @ matrix[:, :-1].T + matrix[:, -1]
        return F.cross_entropy(outputs, labels) + DECAY / 2 * flat.square().sum()

    weights = torch.zeros(CLASSES * (FEATURES + 1), dtype=torch.float64)
    for _ in range(30):
        slope = torch.func.grad(objective)(weights)
        weights = weights - torch.linalg.solve(torch.func.hessian(objective)(weights), slope)
    matrix = weights.reshape(CLASSES, FEATURES + 1)
    return {"weight": matrix[:, :-1].clone(), "bias": matrix[:, -1].clone()}


def losses(state: dict[str, torch.Tensor], rows: dict[str, np.ndarray]) -> np.ndarray:
    outputs = torch.from_numpy(rows["x"]) @ state["weight"].T + state["bias"]
    return F.cross_entropy(outputs, torch.from_numpy(rows["y"]), reduction="none").numpy()


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


# -- predictions ---------------------------------------------------------------------------------------------

CHANGES: dict[str, Callable[[Place], dict[str, np.ndarray]]] = {
    "one row flipped": lambda place: place.flipped(1),
    "15 % flipped": lambda place: place.flipped(30),
    "10 % removed": lambda place: place.without(20),
    "10 % new": lambda place: place.more(20),
    "10 % new and wrong": lambda place: place.more(20, wrong=True),
    "as many wrong as there were": lambda place: place.more(200, wrong=True),
}


@pytest.mark.parametrize("name", CHANGES)
def test_prediction_of_a_convex_model_is_the_retrained_loss(place: Place, name: str) -> None:
    head = CHANGES[name](place)
    found = place.review(head, seconds=0)
    real = losses(minimum(head), place.queries) - losses(place.start, place.queries)
    assert found.trust.exact
    np.testing.assert_allclose(found.queries["predicted_change"], real, atol=1e-4 * np.abs(real).max())
    assert found.totals[0].predicted == pytest.approx(real.mean(), rel=1e-3)
    by_class = {each.name: each for each in found.totals if each.level == "class"}
    assert set(by_class) == {"0", "1", "2"}
    ones = place.queries["y"] == 1
    assert by_class["1"].predicted == pytest.approx(real[ones].mean(), rel=1e-3, abs=1e-6)


def test_training_that_goes_on_measures_what_is_predicted(place: Place) -> None:
    found = place.review(place.flipped(10), seconds=30)
    assert found.trust.tried
    assert found.trust.epochs is None, "to the minimum"
    assert found.trust.agreement == pytest.approx(1, abs=1e-3)
    assert found.trust.slope == pytest.approx(1, abs=1e-2)
    np.testing.assert_allclose(found.queries["measured_change"], found.queries["predicted_change"], atol=1e-4)


@pytest.mark.parametrize("name", CHANGES)
def test_effects_of_rows_add_up_to_the_change(place: Place, name: str) -> None:
    found = place.review(CHANGES[name](place), seconds=0)
    assert found.totals[0].margin_predicted is not None
    total = found.changes["predicted_effect"].sum()
    if len(found.changes) == ROWS:  # a change that is no small one: the parts keep its sign and its size
        assert 0.5 < total / -found.totals[0].margin_predicted < 2
        return
    assert total == pytest.approx(-found.totals[0].margin_predicted, rel=0.1)


def test_harmful_rows_come_first(place: Place) -> None:
    good, bad = place.more(12), place.more(12, wrong=True)
    head = {name: np.concatenate([good[name], bad[name][ROWS:]]) for name in good}
    head["id"][-12:] = [f"bad-{number}" for number in range(12)]
    found = place.review(head, seconds=0)
    first = found.changes["id"].head(12).str.startswith("bad").sum()
    assert first >= 10


def test_a_network_is_predicted_from_its_checkpoints_and_scaled_by_training(tmp_path: Path) -> None:
    place = Place(tmp_path)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    inputs, labels = torch.from_numpy(place.rows["x"]).float(), torch.from_numpy(place.rows["y"])
    for step in range(200):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        if step in (49, 199):
            save_file(model.state_dict(), tmp_path / f"step-{step}.safetensors")
    config = place.config(seconds=20)
    files = [str(tmp_path / f"step-{step}.safetensors") for step in (49, 199)]
    config["model"] = {"factory": f"{tmp_path}/models.py:network", "checkpoint": files[-1]}
    config["influence"] |= {
        "checkpoints": files,
        "evaluate": {"train": {"epochs": 20, "learning_rate": 0.01}},
    }
    config["engine"] = {"dtype": "float32"}
    head = place.write("head.npz", place.flipped(20))
    found = psgrad.review(config, tmp_path / "base.npz", head, overwrite=True, report=False)
    trust, total = found.trust, found.totals[0]
    assert not trust.exact
    assert (trust.tried, trust.scaled) == (True, True)
    assert trust.agreement is not None
    assert trust.agreement > 0.3
    assert total.margin_measured is not None
    assert total.margin_measured < 0
    assert total.margin_predicted is not None
    assert 0.3 < total.margin_predicted / total.margin_measured < 3
    assert total.low is not None
    assert total.low < total.predicted


# -- rows ----------------------------------------------------------------------------------------------------


def test_rows_are_matched_by_id_whatever_their_order(place: Place) -> None:
    head = place.flipped(2)
    order = np.random.default_rng(3).permutation(ROWS)
    found = place.review({name: values[order] for name, values in head.items()}, seconds=0)
    assert found.counts == {"added": 0, "removed": 0, "changed": 2}
    assert set(found.changes["id"]) == {"row-000", "row-001"}
    assert set(found.changes["what"]) == {"label"}
    assert (order[found.changes["after"]] == found.changes["before"]).all()


def test_rows_without_ids_are_matched_by_content(place: Place) -> None:
    head = place.flipped(1)
    config = place.config(seconds=0)
    del config["data"]["id"]
    path = place.write("head.npz", {name: np.roll(values, 5, axis=0) for name, values in head.items()})
    found = psgrad.review(config, place.folder / "base.npz", path, overwrite=True, report=False)
    assert found.counts == {"added": 1, "removed": 1, "changed": 0}
    removed = found.changes[found.changes["kind"] == "removed"]
    assert (removed["before"].item(), removed["after"].item()) == (0, NO_ROW)


def test_leaks_and_contradictions_are_suspect(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    extra = {name: values[:2].copy() for name, values in place.queries.items()}
    extra["x"][1], extra["y"][1] = place.rows["x"][50], (place.rows["y"][50] + 1) % CLASSES
    extra["id"] = np.array(["leak", "other-label"])
    head = {name: np.concatenate([place.rows[name], extra[name]]) for name in place.rows}
    found = place.review(head, seconds=0, max_suspect=1)
    rows = found.changes.set_index("id")
    assert (rows["suspect"] == 1).all()
    assert "nearly equals the query query-000" in rows.loc["leak", "reasons"]
    assert "nearly equals the training row row-050 of another label" in rows.loc["other-label", "reasons"]
    assert found.check.exit_code == 1
    assert {each.id for each in found.check.findings} == {"leak", "other-label"}
    monkeypatch.setattr("psgrad.commands.analyze_issues.MOST", 10)
    copies = place.review(head, seconds=0, max_suspect=1).changes.set_index("id")["reasons"]
    assert ("query query-000" in copies["leak"], "nearly" in copies["other-label"]) == (True, False)


def test_too_few_queries_for_p_values_are_said(place: Place) -> None:
    found = place.review(place.more(2, wrong=True), seconds=0)
    assert "60 queries are too few" in " ".join(found.notes)
    assert (found.changes["suspect"] < 0.99).all()


def test_a_loss_far_above_those_of_the_queries_is_suspect(place: Place) -> None:
    place.queries = place.drawn(np.random.default_rng(5), 250, "query")
    place.write("queries.npz", place.queries)
    head = place.more(1)
    head["x"][-1], head["y"][-1] = 10 * place.rows["x"][0], (place.rows["y"][0] + 1) % CLASSES
    found = place.review(head, seconds=0)
    assert found.changes["suspect"].item() >= 0.99
    assert "loss" in found.changes["reasons"].item()


def test_all_rows_may_be_others(place: Place) -> None:
    new = place.drawn(np.random.default_rng(8), 150, "new")
    found = place.review(new, seconds=0)
    assert found.counts == {"added": 150, "removed": ROWS, "changed": 0}
    real = losses(minimum(new), place.queries) - losses(place.start, place.queries)
    assert found.totals[0].predicted == pytest.approx(real.mean(), rel=1e-3)


def test_sound_rows_are_seldom_suspect(place: Place) -> None:
    place.write("queries.npz", place.drawn(np.random.default_rng(5), 250, "query"))
    found = place.review(place.more(100), seconds=0)
    assert (found.changes["suspect"] >= 0.99).mean() <= 0.03


# -- the verdict ---------------------------------------------------------------------------------------------


def test_the_verdict_of_each_limit(place: Place) -> None:
    review = {"max_increase": {"overall": 1e-4, "class": 10}, "max_margin_fall": {"group": 1e-4}}
    found = place.review(place.more(20, wrong=True), seconds=0, group="site", **review)
    outcomes = {each.rule: each for each in found.check.outcomes}
    assert {rule: each.outcome for rule, each in outcomes.items()} == {
        "max_increase.overall": "failed",
        "max_increase.class": "passed",
        "max_margin_fall.group": "failed",
    }
    assert outcomes["max_increase.overall"].found == pytest.approx(found.totals[0].predicted)
    assert {each.name for each in found.totals if each.level == "group"} == {"0", "1"}
    assert found.check.exit_code == 1


def test_a_prediction_that_nothing_supports_is_not_evaluable(place: Place) -> None:
    save_file(
        {name: torch.randn_like(value) for name, value in place.start.items()},
        place.folder / "linear.safetensors",
    )
    config = place.config(seconds=0, max_increase={"overall": 1e-6})
    config["influence"]["method"] = {"name": "influence", "damping": 1.0}
    head = place.write("head.npz", place.flipped(20))
    found = psgrad.review(config, place.folder / "base.npz", head, overwrite=True, report=False)
    assert not found.trust.exact
    assert found.check.exit_code == 4
    assert "was not checked" in found.check.outcomes[0].message


def test_no_change_passes(place: Place) -> None:
    found = place.review(place.rows, max_increase={"overall": 0.0}, max_suspect=0)
    assert (len(found.changes), found.check.exit_code) == (0, 0)
    assert found.totals[0].predicted == 0


# -- files and the command -----------------------------------------------------------------------------------


def test_the_files_of_a_review(place: Place) -> None:
    found = place.review(place.flipped(5), report=True, seconds=0, max_suspect=0)
    assert {each.name for each in found.folder.iterdir()} == {
        "manifest.json",
        "review.parquet",
        "changes.parquet",
        "review.json",
        "report.html",
    }
    queries = pd.read_parquet(found.folder / "review.parquet")
    assert list(queries)[:5] == ["query_id", "loss", "predicted_change", "low", "high"]
    assert "predicted_change_margin" in queries
    changes = pd.read_parquet(found.folder / "changes.parquet")
    assert {"id", "kind", "predicted_effect", "suspect", "reasons"} <= set(changes)
    content = json.loads((found.folder / "review.json").read_text())
    assert content["counts"] == {"added": 0, "removed": 0, "changed": 5}
    assert content["verdict"]["outcomes"][0]["rule"] == "max_suspect"
    assert json.loads((found.folder / "manifest.json").read_text())["state"] == "finished"
    page = (found.folder / "report.html").read_text()
    assert "What will this change of the training data do?" in page
    assert "row-000" in page


def test_the_command_and_its_formats(place: Place, run: Callable[..., Outcome]) -> None:
    config = place.folder / "config.yaml"
    config.write_text(json.dumps(place.config(seconds=0, max_increase={"overall": 1e-4})))
    head = place.write("head.npz", place.more(20, wrong=True))

    def command(*options: str) -> Outcome:
        files = ("--base", place.folder / "base.npz", "--head", head)
        return run("review", config, *files, "--no-report", *options)

    shown = command()
    assert shown.code == 1
    assert "20 added" in shown.out
    assert "FAIL max_increase.overall" in shown.out
    command().refused(2, "holds an earlier run")
    for style, word in (("sarif", '"changed-row"'), ("junit", "max_increase.overall"), ("github", "::error")):
        told = command("--overwrite", "--format", style)
        assert (told.code, word in told.out) == (1, True)


def change(config: dict[str, Any], **parts: Any) -> dict[str, Any]:
    for key, value in parts.items():
        section, _, name = key.partition("__")
        if value is None:
            del config[section][name]
        else:
            config[section] = {**config[section], name: value}
    return config


REFUSED = {
    "no queries": ({"influence__queries": None}, "influence.queries names no dataset"),
    "no inverse": ({"influence__method": "gradient_dot"}, "no inverse"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_review_refuses(place: Place, name: str) -> None:
    parts, words = REFUSED[name]
    config = change(place.config(seconds=0), **parts)
    head = place.write("head.npz", place.flipped(2))
    with pytest.raises(PsgradError, match=words):
        psgrad.review(config, place.folder / "base.npz", head, overwrite=True, report=False)


def test_review_refuses_data_that_code_makes(place: Place) -> None:
    config = place.config(seconds=0)
    config["data"] = {"factory": "rows.py:rows"}
    config["influence"]["queries"] |= {"inputs": "x", "target": "y"}
    with pytest.raises(ConfigError, match=r"data\.factory"):
        psgrad.review(config, place.folder / "base.npz", place.folder / "base.npz", report=False)


def test_a_base_that_is_not_there_is_named(place: Place) -> None:
    with pytest.raises(PsgradError, match="nowhere"):
        psgrad.review(place.config(seconds=0), place.folder / "nowhere.npz", overwrite=True, report=False)
