"""`psgrad influence index --update`: the index follows its data, and answers as a new one would."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

from psgrad.commands.influence_index import kept_rows
from psgrad.data.reader import digests
from psgrad.data.rows import Block
from psgrad.run.gradient_index import GradientIndex
from tests.influence_workplace import InfluenceWorkplace
from tests.workplace import ROWS


@pytest.fixture
def place(influence_place: InfluenceWorkplace) -> InfluenceWorkplace:
    found = influence_place
    found.section["index"] = {"path": "index", "projection": "none", "features": "margin"}
    found.section["index"]["rows_per_shard"] = 7
    return found


def with_rows(place: InfluenceWorkplace, rows: list[int]) -> None:
    """The data become these of their rows; those from ROWS on are new ones."""
    random = np.random.default_rng(5)
    more = {
        "x": random.normal(size=(9, 4)).astype(np.float32),
        "y": random.integers(0, 3, 9),
        "uid": np.array([f"more-{row}" for row in range(9)]),
    }
    whole = {name: np.concatenate([place.arrays[name], more[name]]) for name in more}
    np.savez(place.folder / "data.npz", **{name: array[rows] for name, array in whole.items()})


def scores(place: InfluenceWorkplace, *options: str) -> pd.DataFrame:
    found = place.ranked("--overwrite", "--no-report", *options)
    return found.sort_values(["query_index", "train_id"]).reset_index(drop=True)


def shards_of(place: InfluenceWorkplace) -> dict[str, int]:
    """When each shard was written."""
    folder = place.folder / "index" / "checkpoint-000"
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("gradients-*")}


EVERY = list(range(ROWS))
CHANGES = {
    "append": ("gradient_dot", [*EVERY, 24, 25, 26, 27, 28, 29, 30, 31, 32], 9, 0),
    "delete": ("trak", [row for row in EVERY if row % 5], 0, 5),
    "both": ("trak", [*EVERY[2:10], *EVERY[12:], 30, 24, 25], 3, 4),
    "insert": ("gradient_dot", [*EVERY[:9], 30, *EVERY[9:]], 16, 15),
    "move": ("gradient_dot", [*EVERY[12:], *EVERY[:12]], 12, 12),
    "all others": ("gradient_dot", [24, 25, 26], 3, 24),
}


@pytest.mark.long
@pytest.mark.every(2)
@pytest.mark.parametrize("change", list(CHANGES))
def test_index_update_answers_as_a_new_index(place: InfluenceWorkplace, change: str) -> None:
    place.section["method"], rows, added, deleted = CHANGES[change]
    assert place.index().code == 0
    with_rows(place, rows)
    place.influence().refused(3, "let it follow its data: psgrad influence index CONFIG --update")
    before = shards_of(place)
    updated = place.index("--update").succeeded()
    assert f"{len(rows) - added} rows are kept, {added} are added, and {deleted} are deleted" in updated.err
    after = shards_of(place)
    assert len(after) == 4 + -(-added // 7)
    assert before.items() <= after.items(), "rows that were there were written again"
    found = scores(place)
    assert place.index("--overwrite").code == 0
    pd.testing.assert_frame_equal(found, scores(place), rtol=1e-5, atol=1e-7)
    place.section.pop("index")
    if place.section["method"] == "gradient_dot":
        pd.testing.assert_frame_equal(found, scores(place), rtol=1e-4, atol=1e-6)


def test_index_update_of_unchanged_data(place: InfluenceWorkplace) -> None:
    assert place.index().code == 0
    files = {path: path.read_bytes() for path in (place.folder / "index").rglob("*.safetensors")}
    assert place.index("--update").code == 0
    assert {path: path.read_bytes() for path in (place.folder / "index").rglob("*.safetensors")} == files


@pytest.mark.long
def test_index_update_names_new_rows_that_are_not_finite(place: InfluenceWorkplace) -> None:
    assert place.index().code == 0
    place.arrays["x"][0] = np.nan
    with_rows(place, [*EVERY[1:], 24, 0])
    assert "1 rows have a gradient that is not finite, and no score: 24" in place.index("--update").err
    assert "row-00" not in set(scores(place)["train_id"])


def test_index_update_of_another_model_refused(place: InfluenceWorkplace) -> None:
    assert place.index().code == 0
    with_rows(place, [*EVERY, 24])
    place.save_checkpoint("model.safetensors", 9)
    place.index("--update").refused(
        3, "the index index is of something else: fingerprint.checkpoints was", "put them back"
    )
    place.section["index"]["dtype"] = "float16"
    assert "dtype" in place.index("--update").refused(3, "fingerprint.checkpoints")


def test_index_update_with_other_losses_refused(place: InfluenceWorkplace) -> None:
    assert place.index().code == 0
    index = GradientIndex.open(place.folder / "index")
    arrays = index.read(0, 0)
    index.write(0, 0, arrays | {"loss": arrays["loss"] + 1})
    with_rows(place, [*EVERY[2:], 24])
    place.index("--update").refused(3, "is of something else: it has a loss of", "for row 0")


def test_index_update_without_an_index(place: InfluenceWorkplace) -> None:
    place.index("--update").refused(3, "there is no index in index", "psgrad influence index CONFIG")
    place.index("--update", "--resume").refused(2, "--update was given together with --resume")
    place.index("--update", "--overwrite").refused(2, "--update was given together with --overwrite")
    place.index("--update", "--part", "1/2").refused(2, "--part was given together with --update")


@pytest.mark.parametrize(
    ("stored", "now", "kept"),
    [
        ([3, 7, 3, 5], [3, 3, 5, 8, 7], [0, 2, 3]),
        ([3, 7, 3, 5], [3, 3, 3, 5], [0, 2]),
        ([1, 2, 3], [9, 1, 2, 3], []),
        ([1, 2, 3], [3, 1, 2], [2]),
        ([1, 2, 3], [1, 2, 3], [0, 1, 2]),
    ],
)
def test_index_update_kept_rows_are_the_first_of_the_data(
    stored: list[int], now: list[int], kept: list[int]
) -> None:
    found = kept_rows(*(np.array(numbers, np.uint8)[:, None] for numbers in (stored, now)))
    assert found.tolist() == kept


def test_digests_of_bfloat16() -> None:
    # which numpy does not have
    rows = torch.tensor([[1.0, 2.0], [1.0, 3.0], [1.0, 2.0]], dtype=torch.bfloat16)
    one, other, again = digests(Block((rows,), None))
    assert one == again != other
