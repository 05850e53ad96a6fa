"""`psgrad influence`: scores, labels and retrained models follow from all that they should, and from nothing
else.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.numpy import load_file
from torch import nn

from psgrad.commands.influence_retraining import behaviour
from psgrad.engine.execution.objective import BY_POSITION
from psgrad.engine.influence.evaluation.jobs import LoadedRows
from tests.influence_workplace import InfluenceWorkplace, loop_of_gradients

DATASET = """\
import numpy as np
import torch

SHIFT = 0


class Rows(torch.utils.data.Dataset):
    def __init__(self):
        self.arrays = np.load("data.npz")

    def __len__(self):
        return len(self.arrays["y"])

    def __getitem__(self, row):
        return self.arrays["x"][row], self.arrays["y"][row] + SHIFT * (row == 5)
"""


@pytest.fixture
def place(influence_place: InfluenceWorkplace, monkeypatch: pytest.MonkeyPatch) -> InfluenceWorkplace:
    found = influence_place
    monkeypatch.setattr("psgrad.reports.influence_page.write_influence_report", lambda result, write: None)
    return found


def products(place: InfluenceWorkplace) -> np.ndarray:
    """[n, m]: the inner products of gradients, by a loop."""
    training = loop_of_gradients(place.model, place.arrays["x"], place.arrays["y"])
    return (training @ loop_of_gradients(place.model, place.queries["x"], place.queries["y"]).T).numpy()


def with_index(place: InfluenceWorkplace, **options: str) -> None:
    place.section["index"] = {"path": "index", "projection": "none"} | options
    built = place.index()
    assert built.code == 0, built.err


# -- Labels --------------------------------------------------------------------------------------------------


def test_labels_that_were_not_read_are_left_out_of_the_table(place: InfluenceWorkplace) -> None:
    (place.folder / "rows.py").write_text(DATASET)
    place.config["data"] = {"factory": "rows.py:Rows"}
    with_index(place)
    place.ranked()  # reads some rows for the self-check
    assert "target" not in pd.read_parquet(place.folder / "out" / "self_influence.parquet")


def test_queries_far_apart_have_their_labels(place: InfluenceWorkplace) -> None:
    (place.folder / "rows.py").write_text(DATASET)
    place.section["queries"] = {"factory": "rows.py:Rows", "rows": [7, 3, 11]}
    place.ranked()
    assert (
        pd.read_parquet(place.folder / "out" / "queries.parquet")["target"].tolist()
        == place.arrays["y"][[7, 3, 11]].tolist()
    )


# -- An index ------------------------------------------------------------------------------------------------


def test_an_index_of_another_target_column_is_refused(place: InfluenceWorkplace) -> None:
    place.save(other=(place.arrays["y"] + 1) % 3)
    with_index(place)
    place.config["data"]["target"] = "other"
    place.influence().refused(3, "the index index is of something else: fingerprint.columns.target was")


@pytest.mark.parametrize("later", ["bfloat16", "as-saved"])
def test_an_index_of_another_type_of_frozen_weights_is_refused(place: InfluenceWorkplace, later: str) -> None:
    place.config["influence"]["parameters"] = ["2.*"]
    place.config["model"]["dtype"] = {"bfloat16": "as-saved", "as-saved": "bfloat16"}[later]
    with_index(place)
    place.config["model"]["dtype"] = later
    place.influence().refused(3, "the index index is of something else: fingerprint.frozen dtype was")


# -- Checkpoints ---------------------------------------------------------------------------------------------


def test_the_same_weights_in_files_that_differ_are_refused(place: InfluenceWorkplace) -> None:
    for name in ("a.pt", "b.pt"):
        torch.save(place.model.state_dict(), place.folder / name)
    assert (place.folder / "a.pt").read_bytes() != (place.folder / "b.pt").read_bytes()
    place.section["checkpoints"] = ["a.pt", "b.pt"]
    place.influence().refused(
        2, "the checkpoints a.pt and b.pt hold the same weights", "it would count double"
    )


SLOW = """\
import time
from pathlib import Path

import numpy as np
import torch


class Rows(torch.utils.data.Dataset):
    busy = False

    def __init__(self):
        self.arrays = np.load("data.npz")

    def __len__(self):
        return len(self.arrays["y"])

    def __getitem__(self, row):
        if Rows.busy:
            Path("twice").touch()
        Rows.busy = True
        time.sleep(0.001)
        Rows.busy = False
        return self.arrays["x"][row], self.arrays["y"][row]
"""


@pytest.mark.long
def test_rows_are_not_read_twice_at_once_for_two_checkpoints(place: InfluenceWorkplace) -> None:
    (place.folder / "rows.py").write_text(SLOW)
    place.config["data"] = {"factory": "rows.py:Rows"}
    place.config["engine"] = {"chunk_size": 4}
    place.save_checkpoint("a.safetensors", 3)
    place.save_checkpoint("b.safetensors", 4)
    place.section["checkpoints"] = ["a.safetensors", "b.safetensors"]
    place.section["queries"] = {"rows": [0, 1, 2, 3, 4, 5, 6, 7]}
    place.ranked()
    assert not (place.folder / "twice").exists()


# -- What the model draws ------------------------------------------------------------------------------------


DROPOUT = """\
def Model():
    return nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, 3))
"""


def test_a_model_that_draws_at_random_is_refused(place: InfluenceWorkplace) -> None:
    place.use_model(DROPOUT)
    place.config["model"]["mode"] = "train"
    words = ("the model draws random numbers in train mode", "set model.mode: eval")
    place.influence().refused(2, *words)
    place.section["index"] = "index"
    place.index().refused(2, *words)
    place.config["model"]["mode"] = "eval"
    assert place.index().code == 0


# -- Models that are trained again ---------------------------------------------------------------------------


def test_fresh_models_are_distinguished_by_what_they_do() -> None:
    rows = LoadedRows((torch.randn(5, 4),), None)

    def of(activation: type[nn.Module], spread: float) -> str:
        def fresh(seed: int) -> nn.Module:
            model = nn.Sequential(nn.Linear(4, 3), activation())
            with torch.no_grad():
                model[0].weight.mul_(spread)
            return model

        return behaviour(fresh, rows, BY_POSITION)

    assert of(nn.Tanh, 1) == of(nn.Tanh, 1)
    assert len({of(nn.Tanh, 1), of(nn.Sigmoid, 1), of(nn.Tanh, 2)}) == 3


# -- Rows that are left out ---------------------------------------------------------------


ODD = """\
def loss(output, target):
    sign = torch.where(target == 7, -1.0, 1.0)
    return sign * torch.nn.functional.cross_entropy(output, target.clamp(max=2))
"""


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("influence", "at row 8 the loss is not convex"),
        ({"name": "influence", "solver": "dual"}, "at row 8 the loss is not convex"),
        ("ekfac", "at row 8 the loss is not convex"),
        ("trak", "the loss of row 8 is no function of its margin"),
    ],
)
def test_rows_are_named_by_their_number_in_the_dataset(
    place: InfluenceWorkplace, method: str, words: str
) -> None:
    x, y = place.arrays["x"].copy(), place.arrays["y"].copy()
    x[3, 0], y[8] = np.nan, 7
    place.save(x=x, y=y)
    place.use_loss(ODD)
    place.section["method"] = method
    place.influence().refused(3, words)


@pytest.mark.long
@pytest.mark.parametrize("name", ["projected_influence", "trak"])
def test_an_index_damps_by_the_rows_that_have_a_gradient(place: InfluenceWorkplace, name: str) -> None:
    x = place.arrays["x"].copy()
    x[3, 0] = np.nan
    place.save(x=x)
    place.section["method"] = {"name": name, "projection": "none", "damping": 0.3}
    without = place.ranked()
    with_index(place, features="margin")
    pd.testing.assert_frame_equal(place.ranked("--overwrite"), without, rtol=1e-4, atol=1e-6)


# -- Units ---------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    ("normalize", "words"),
    [
        ("self_influence", "divided by the square root of the training example's influence on itself"),
        ("preconditioned_norm", "divided by the norm of the training example's preconditioned gradient"),
    ],
)
def test_the_unit_says_what_scores_are_divided_by(
    place: InfluenceWorkplace, normalize: str, words: str
) -> None:
    place.section.update(method="influence", normalize=normalize)
    place.ranked()
    assert place.manifest()["influence"]["unit"].endswith(words)


# -- Queries without a score ---------------------------------------------------------------------------------


def test_a_query_without_scores_takes_none_from_the_queries_as_a_whole(place: InfluenceWorkplace) -> None:
    place.save_queries(y=np.array([0, 1, -100, 2, 1]))  # the third has no gradient, and so no cosine
    place.section["method"] = "gradient_cosine"
    ranked = place.ranked("--matrix")
    scores = load_file(place.folder / "out" / "matrix.safetensors")["scores"]
    assert np.isnan(scores[:, 2]).all()
    expected = scores[:, [0, 1, 3, 4]].mean(1)
    overall = pd.read_parquet(place.folder / "out" / "self_influence.parquet")["overall"]
    np.testing.assert_allclose(overall, expected, rtol=1e-6, atol=1e-9)
    everyone = ranked[ranked["query_index"] == -1]
    assert everyone[everyone["rank"] == 1]["train_index"].item() == expected.argmax()


def test_a_query_to_be_ignored_has_no_margin(place: InfluenceWorkplace) -> None:
    place.save_queries(y=np.array([0, 1, -100, 2, 1]))
    place.section["measurement"] = "margin"
    place.ranked("--matrix")
    scores = load_file(place.folder / "out" / "matrix.safetensors")["scores"]
    assert (scores[:, 2] == 0).all()
    assert (scores[:, [0, 1, 3, 4]] != 0).all()
