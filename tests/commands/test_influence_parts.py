"""`psgrad influence --part K/N` and `psgrad merge`, against the same run in one piece."""

from __future__ import annotations

import random
import shutil
from typing import Any

import numpy as np
import pandas as pd
import pytest
from safetensors.numpy import load_file

from tests.influence_workplace import QUERIES, InfluenceWorkplace


@pytest.fixture
def place(influence_place: InfluenceWorkplace) -> InfluenceWorkplace:
    found = influence_place
    found.config["engine"] = {"dtype": "float64"}
    return found


def part(place: InfluenceWorkplace, number: int, count: int, *options: str, code: int = 0) -> str:
    outcome = place.influence("--part", f"{number}/{count}", "--output", "parts", *options)
    assert outcome.code == code, outcome.err
    return outcome.err


def merged(place: InfluenceWorkplace) -> str:
    outcome = place.command("merge", "parts", "--no-report")
    assert outcome.code == 0, outcome.err
    assert outcome.out.splitlines()[-1].endswith("parts")
    return outcome.err


def in_parts(place: InfluenceWorkplace, count: int, *options: str) -> None:
    order = list(range(1, count + 1))
    random.Random(count).shuffle(order)
    for number in order:
        part(place, number, count, *options)
    merged(place)


def assert_same_scores(place: InfluenceWorkplace) -> None:
    one, other = place.folder / "out", place.folder / "parts"
    for name in ("scores", "self_influence", "queries"):
        wanted, found = (pd.read_parquet(folder / f"{name}.parquet") for folder in (one, other))
        pd.testing.assert_frame_equal(found, wanted, rtol=1e-9, atol=1e-12)
    then, now = place.manifest("out"), place.manifest("parts")
    assert now["counts"] == then["counts"]
    assert {**now["influence"], "warnings": [], "check": None} == {
        **then["influence"],
        "warnings": [],
        "check": None,
    }
    assert now["state"] == "finished"
    assert not (other / "parts").exists()


@pytest.mark.long
@pytest.mark.every(3)
@pytest.mark.parametrize("count", [1, 3, 7])
def test_parts_in_any_order_equal_one_run(place: InfluenceWorkplace, count: int) -> None:
    """Seven parts of five queries: two of them have none."""
    in_parts(place, count)
    place.ranked("--no-report")
    assert_same_scores(place)


@pytest.mark.long
def test_parts_that_were_made_in_folders_of_their_own_equal_one_run(place: InfluenceWorkplace) -> None:
    part(place, 1, 2)
    shutil.move(place.folder / "parts", place.folder / "elsewhere")
    part(place, 2, 2)
    name = "parts/part-1-of-2"
    shutil.copytree(place.folder / "elsewhere" / name, place.folder / "parts" / name)
    merged(place)
    place.ranked("--no-report")
    assert_same_scores(place)


SECTIONS: dict[str, dict[str, Any]] = {
    "a solve": {"method": {"name": "influence", "damping": 0.1}},
    "layers": {"layers": "parameter"},
    "wrong queries": {"queries": {"where": "not correct"}},
    "normalized": {"normalize": "self_influence"},
}


@pytest.mark.long
@pytest.mark.every(2)
@pytest.mark.parametrize("changed", SECTIONS.values(), ids=SECTIONS)
def test_parts_equal_one_run(place: InfluenceWorkplace, changed: dict[str, Any]) -> None:
    place.config["influence"] |= changed
    in_parts(place, 2)
    place.ranked("--no-report")
    assert_same_scores(place)


@pytest.mark.long
def test_parts_of_several_checkpoints_equal_one_run(place: InfluenceWorkplace) -> None:
    """With the spread of scores over checkpoints, of all queries together, too."""
    for seed in range(3):
        place.save_checkpoint(f"{seed}.safetensors", seed)
    place.config["influence"]["checkpoints"] = [{"path": f"{seed}.safetensors"} for seed in range(3)]
    in_parts(place, 3)
    scores = place.ranked("--no-report")
    assert {"score_std", "rank_stability"} <= set(scores)
    assert_same_scores(place)


@pytest.mark.long
def test_parts_leave_out_a_query_that_is_not_finite(place: InfluenceWorkplace) -> None:
    inputs = place.queries["x"].copy()
    inputs[1] = np.nan
    place.save_queries(x=inputs)
    in_parts(place, 2)
    place.ranked("--no-report")
    assert_same_scores(place)
    assert place.manifest("parts")["counts"]["queries_nonfinite"] == 1
    assert any("excluded 1 of" in each for each in place.manifest("parts")["influence"]["warnings"])


@pytest.mark.long
@pytest.mark.parametrize("broken", [False, True], ids=["finite rows", "a row with NaN"])
def test_parts_are_answered_from_an_index(place: InfluenceWorkplace, broken: bool) -> None:
    if broken:
        inputs = place.arrays["x"].copy()
        inputs[3] = np.nan
        place.save(x=inputs)
    place.config["influence"] |= {"index": {"path": "index", "dimension": 8}, "method": "projected_influence"}
    assert place.index().code == 0
    in_parts(place, 2)
    place.ranked("--no-report")
    assert_same_scores(place)


@pytest.mark.long
def test_parts_write_the_matrix_of_all_queries(place: InfluenceWorkplace) -> None:
    in_parts(place, 3, "--matrix")
    place.ranked("--no-report", "--matrix")
    one, other = (load_file(place.folder / name / "matrix.safetensors") for name in ("out", "parts"))
    assert one["scores"].shape[1] == QUERIES
    for name, value in one.items():
        np.testing.assert_allclose(other[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.sweep
def test_merged_parts_have_a_report(place: InfluenceWorkplace) -> None:
    part(place, 1, 2)
    part(place, 2, 2)
    outcome = place.command("merge", "parts")
    assert outcome.code == 0, outcome.err
    assert "query-" in (place.folder / "parts" / "report.html").read_text()


@pytest.mark.long
def test_merge_names_missing_parts(place: InfluenceWorkplace) -> None:
    part(place, 2, 4)
    place.command("merge", "parts").refused(
        3, "3 of 4 parts are missing: 1, 3, 4", "psgrad influence CONFIG --part 1/4"
    )
    for number in (1, 3, 4):
        part(place, number, 4)
    merged(place)


def test_part_that_is_finished_is_not_computed_again(place: InfluenceWorkplace) -> None:
    part(place, 1, 2)
    file = place.folder / "parts" / "parts" / "part-1-of-2" / "pairs.parquet"
    before = file.stat().st_mtime_ns
    part(place, 1, 2)
    assert file.stat().st_mtime_ns == before


@pytest.mark.long
def test_part_that_ended_early_is_computed_again(place: InfluenceWorkplace) -> None:
    part(place, 1, 2)
    folder = place.folder / "parts" / "parts" / "part-1-of-2"
    (folder / "part.json").unlink()  # which is written last
    (folder / "pairs.parquet").write_bytes(b"half of a file")
    part(place, 1, 2)
    part(place, 2, 2)
    merged(place)
    place.ranked("--no-report")
    assert_same_scores(place)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"method": "gradient_cosine"}, "influence.method.name"),
        ({"top": 3}, "influence.top was"),
        ({"queries": {"worst": 2}}, "influence.queries"),
    ],
)
def test_part_of_another_config_is_refused(
    place: InfluenceWorkplace, change: dict[str, Any], named: str
) -> None:
    part(place, 1, 2)
    place.config["influence"] |= change
    assert named in part(place, 2, 2, code=2)


def test_part_of_another_division_is_refused(place: InfluenceWorkplace) -> None:
    part(place, 1, 2)
    assert "number of parts was 2 and is 3" in part(place, 2, 3, code=2)
    assert "--matrix was false and is true" in part(place, 2, 2, "--matrix", code=2)


def test_merge_refuses_other_queries_than_the_parts_had(place: InfluenceWorkplace) -> None:
    part(place, 1, 1)
    place.save_queries(x=place.queries["x"] + 1)
    place.command("merge", "parts").refused(2, "queries (their content)")


@pytest.mark.long
def test_merge_refuses_a_part_of_another_run(place: InfluenceWorkplace) -> None:
    """It has the shape of the right one."""
    part(place, 2, 2)
    shutil.move(place.folder / "parts", place.folder / "first")
    place.config["influence"]["method"] = "gradient_cosine"
    part(place, 1, 2)
    other = "parts/part-2-of-2"
    shutil.copytree(place.folder / "first" / other, place.folder / "parts" / other)
    place.command("merge", "parts", "--no-report").refused(
        3, "part-2-of-2/part.json is of another run", "run that part again"
    )
    shutil.rmtree(place.folder / "parts" / other)
    part(place, 2, 2)
    merged(place)


@pytest.mark.long
def test_merged_parts_take_no_part_more(place: InfluenceWorkplace) -> None:
    in_parts(place, 2)
    assert "are merged already" in part(place, 1, 2, code=2)
    place.command("merge", "parts").refused(2, "the parts in parts are merged already")


@pytest.mark.parametrize("option", ["--overwrite", "--processes=2", "--evaluate=loo"])
def test_part_refuses_options_that_go_with_a_whole_run(place: InfluenceWorkplace, option: str) -> None:
    name = option.partition("=")[0]
    assert f"--part was given together with {name}" in part(place, 1, 2, option, code=2)


def test_merge_of_another_folder_is_refused(place: InfluenceWorkplace) -> None:
    place.ranked("--no-report")
    place.command("merge", "out").refused(2, "out is not the folder of a run in parts", "--part K/N")
