"""`psgrad influence`: scores, labels and retrained models follow from all that they should, and from nothing
else.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

from tests.influence_workplace import InfluenceWorkplace

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


def with_index(place: InfluenceWorkplace, **options: str) -> None:
    place.section["index"] = {"path": "index", "projection": "none"} | options
    place.index().succeeded()


# -- Labels --------------------------------------------------------------------------------------------------


def test_labels_that_were_not_read_are_left_out_of_the_table(place: InfluenceWorkplace) -> None:
    (place.folder / "rows.py").write_text(DATASET)
    place.config["data"] = {"factory": "rows.py:Rows"}
    with_index(place)
    place.ranked()  # reads some rows for the self-check
    assert "target" not in place.table("self_influence")


def test_queries_far_apart_have_their_labels(place: InfluenceWorkplace) -> None:
    (place.folder / "rows.py").write_text(DATASET)
    place.section["queries"] = {"factory": "rows.py:Rows", "rows": [7, 3, 11]}
    place.ranked()
    assert place.table("queries")["target"].tolist() == place.arrays["y"][[7, 3, 11]].tolist()


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


# -- Queries without a score ---------------------------------------------------------------------------------


def test_a_query_without_scores_takes_none_from_the_queries_as_a_whole(place: InfluenceWorkplace) -> None:
    place.save_queries(y=np.array([0, 1, -100, 2, 1]))  # the third has no gradient, and so no cosine
    place.section["method"] = "gradient_cosine"
    scores = place.matrix()["scores"]
    ranked = place.table("scores")
    assert np.isnan(scores[:, 2]).all()
    expected = scores[:, [0, 1, 3, 4]].mean(1)
    overall = place.table("self_influence")["overall"]
    np.testing.assert_allclose(overall, expected, rtol=1e-6, atol=1e-9)
    everyone = ranked[ranked["query_index"] == -1]
    assert everyone[everyone["rank"] == 1]["train_index"].item() == expected.argmax()


def test_a_query_to_be_ignored_has_no_margin(place: InfluenceWorkplace) -> None:
    place.save_queries(y=np.array([0, 1, -100, 2, 1]))
    place.section["measurement"] = "margin"
    scores = place.matrix()["scores"]
    assert (scores[:, 2] == 0).all()
    assert (scores[:, [0, 1, 3, 4]] != 0).all()
