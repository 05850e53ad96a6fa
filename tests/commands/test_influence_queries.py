"""Which rows `psgrad influence` asks about: keys that queries have from data, and rows chosen by id, by a
condition, by wrong predictions and by loss.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.influence_workplace import QUERIES, InfluenceWorkplace
from tests.workplace import ROWS


def asked(place: InfluenceWorkplace, queries: dict[str, Any] | None, *options: str) -> list[int]:
    """The rows that a run with this section has queries for, in order."""
    place.section["queries"] = queries
    place.influence("--overwrite", *options).succeeded()
    index = place.samples_of_queries()
    return [row for row in dict.fromkeys(index) if row >= 0]


def by_model(place: InfluenceWorkplace, arrays: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """(losses, whether the prediction is wrong), by plain PyTorch."""
    output = place.model(torch.from_numpy(arrays["x"]))
    losses = nn.functional.cross_entropy(output, torch.from_numpy(arrays["y"]), reduction="none")
    return losses.detach().numpy(), output.argmax(1).numpy() != arrays["y"]


@pytest.mark.long
def test_queries_have_the_columns_of_data_and_their_own_where_they_name_them(
    place: InfluenceWorkplace,
) -> None:
    whole = place.ranked()
    place.section["queries"] = {"path": "queries.npz"}
    assert place.ranked("--overwrite").equals(whole)
    place.save_queries(other=place.queries["y"] * 0)
    place.section["queries"] = {"path": "queries.npz", "target": "other", "id": None}
    changed = place.ranked("--overwrite")
    assert changed["score"].tolist() != whole["score"].tolist()
    assert changed.loc[changed["query_index"] == 2, "query_id"].iloc[0] in (2, "2")
    resolved = place.manifest()["config"]["influence"]["queries"]
    assert (resolved["inputs"], resolved["target"], resolved["id"]) == ("x", "other", None)


def test_queries_of_another_kind_of_source_have_no_columns_of_data(place: InfluenceWorkplace) -> None:
    (place.folder / "rows.py").write_text(
        "import torch\nfrom torch.utils.data import TensorDataset\n\n\ndef build():\n"
        "    return TensorDataset(torch.ones(2, 4), torch.tensor([0, 1]))\n"
    )
    assert asked(place, {"factory": "rows.py:build"}) == [0, 1]


@pytest.mark.long
def test_ids_choose_rows_in_their_order(place: InfluenceWorkplace) -> None:
    assert asked(place, {"path": "queries.npz", "ids": ["query-3", "query-1"]}) == [3, 1]
    assert asked(place, {"ids": ["row-07"]}) == [7]
    assert asked(place, None, "--id", "row-07", "--id", "row-02") == [7, 2]


@pytest.mark.long
def test_wrong_worst_and_where_choose_what_the_model_says(place: InfluenceWorkplace) -> None:
    losses, wrong = by_model(place, place.arrays)
    assert 3 < wrong.sum() < ROWS - 3
    rows = np.arange(ROWS)
    falling = np.argsort(-losses, kind="stable")
    labels = place.arrays["y"]
    assert asked(place, {"where": "not correct"}) == rows[wrong].tolist()
    assert asked(place, {"worst": 4}) == falling[:4].tolist()
    assert asked(place, {"where": "label == 1"}) == rows[labels == 1].tolist()
    assert asked(place, {"where": "not correct and target != 1"}) == rows[wrong & (labels != 1)].tolist()
    assert (
        asked(place, None, "--where", "not correct", "--worst", "3")
        == [row for row in falling if wrong[row]][:3]
    )
    where = ("--where", f"loss > {np.median(losses)}")
    assert asked(place, {"rows": [5, 3, 9, 11]}, *where) == [
        row for row in (5, 3, 9, 11) if losses[row] > np.median(losses)
    ]
    losses, _ = by_model(place, place.queries)
    assert asked(place, {"path": "queries.npz", "worst": 2}) == np.argsort(-losses)[:2].tolist()
    assert len(losses) == QUERIES


def test_worst_is_by_the_last_checkpoint(place: InfluenceWorkplace) -> None:
    place.save_checkpoint("later.safetensors", seed=5)
    place.section["checkpoints"] = ["model.safetensors", "later.safetensors"]
    torch.manual_seed(5)
    place.model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    losses, _ = by_model(place, place.arrays)
    assert asked(place, {"worst": 3}) == np.argsort(-losses)[:3].tolist()


@pytest.mark.long
def test_checkpoints_are_read_as_the_models_own_is(place: InfluenceWorkplace) -> None:
    for name, seed in (("a.pt", 1), ("b.pt", 2), ("c.pt", 3)):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        torch.save({"epoch": 1, "state_dict": model.state_dict()}, place.folder / name)
    place.config["model"] |= {"checkpoint": "a.pt"}
    place.section["checkpoints"] = ["a.pt", "b.pt"]
    assert asked(place, {"rows": [0]}) == [0]
    place.config["analyze"] = {"measures": ["vog"], "checkpoints": ["a.pt", "b.pt", "c.pt"]}
    place.analyze("--overwrite", "--no-report").succeeded()


@pytest.mark.parametrize(
    ("queries", "words"),
    [
        ({"ids": ["row-99"]}, "influence.queries.ids names 'row-99', which no row has"),
        ({"ids": ["row-1"], "rows": [1]}, "rows and ids both say which rows are asked about"),
        ({"ids": ["row-01", "row-01"]}, "a row is listed twice in ids"),
        ({"where": "lable == 1"}, "there is no column 'lable'; did you mean label?"),
        ({"where": "open('x') == 1"}, "has \"open('x')\", which is no part of a condition"),
        ({"where": "label == 7"}, "where leave none of 24 rows"),
        ({"worst": 0}, "influence.queries.worst: got 0, expected at least 1"),
    ],
)
def test_queries_that_can_not_be_chosen_are_reported(
    place: InfluenceWorkplace, queries: dict[str, Any], words: str
) -> None:
    place.section["queries"] = queries
    place.influence().refused(2, words)


def test_where_correct_needs_a_loss_of_classes(place: InfluenceWorkplace) -> None:
    (place.folder / "loss.py").write_text("def loss(output, target):\n    return output.square().sum()\n")
    place.config["loss"] = "loss.py:loss"
    place.section["queries"] = {"where": "not correct"}
    place.influence().refused(2, "there is no column 'correct'")
    place.section["queries"] = {"worst": 2}
    place.influence().succeeded()
    assert len(json.loads(json.dumps(place.manifest()["influence"]["queries"]))) == 2
