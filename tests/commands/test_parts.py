"""`psgrad analyze --part K/N` and `psgrad merge`, against the same run in one piece."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable

import pytest

from tests.commands.same_runs import assert_same_runs
from tests.workplace import Workplace

CHUNK = 5
GATHERING = ["noise_scale", "signal_to_noise", "relative_norm", "ntk"]
TWICE = ["cosine_to_mean", "cosine_to_class_mean"]
PASSES = ["hessian_trace", "gradient_x_input"]


@pytest.fixture
def place(workplace: Workplace) -> Workplace:
    workplace.config["engine"] = {"chunk_size": CHUNK}
    workplace.config["analyze"] = {"measures": [{"name": "noise_scale", "resamples": 0}, "relative_norm"]}
    return workplace


def part(place: Workplace, number: int, count: int, *options: str) -> str:
    outcome = place.succeeded("--part", f"{number}/{count}", "--output", "parts", *options)
    return outcome.err


def merged(place: Workplace) -> None:
    outcome = place.command("merge", "parts", "--no-report").succeeded()
    assert outcome.out.splitlines()[-1].endswith("parts")


def in_any_order(place: Workplace, count: int) -> None:
    order = list(range(1, count + 1))
    random.Random(count).shuffle(order)
    for number in order:
        part(place, number, count)


def one_of_them_twice(place: Workplace, count: int) -> None:
    part(place, 1, count)
    in_any_order(place, count)


def in_folders_of_their_own(place: Workplace, count: int) -> None:
    """On machines without shared storage: one folder is merged, and gets the parts of the others."""
    part(place, 1, 2)
    place.succeeded("--part", "2/2", "--output", "elsewhere")
    name = "parts/samples/part-2-of-2"
    shutil.copytree(place.folder / "elsewhere" / name, place.folder / "parts" / name)


@pytest.mark.long
@pytest.mark.every(1)
@pytest.mark.parametrize(
    ("made", "count"),
    [
        (in_any_order, 1),
        *(pytest.param(in_any_order, count, marks=pytest.mark.sweep) for count in (3, 7)),
        (one_of_them_twice, 2),
        (in_folders_of_their_own, 2),
    ],
)
def test_parts_equal_one_run(place: Workplace, made: Callable[[Workplace, int], None], count: int) -> None:
    made(place, count)
    merged(place)
    place.succeeded("--no-report")
    assert_same_runs(place.folder / "out", place.folder / "parts")


@pytest.mark.sweep
def test_parts_of_measures_that_look_twice_run_again(place: Workplace) -> None:
    place.config["analyze"]["measures"] = [*GATHERING, *TWICE, *PASSES]
    assert "14 samples of other parts are missing; run this part again" in part(place, 1, 2)
    part(place, 2, 2)  # all rows are there by then
    incomplete = place.command("merge", "parts", "--no-report")
    assert incomplete.code == 3
    assert "10 rows of the pass samples-again are missing: 0 to 9" in incomplete.err
    assert "missing; run" not in part(place, 1, 2)
    merged(place)
    place.succeeded("--no-report")
    assert_same_runs(place.folder / "out", place.folder / "parts")


@pytest.mark.long
def test_merge_names_a_missing_part(place: Workplace) -> None:
    part(place, 1, 3)
    part(place, 3, 3)
    outcome = place.command("merge", "parts")
    outcome.refused(3, "rows of the pass samples are missing: 5 to 14", "run that part again")
    part(place, 2, 3)
    merged(place)


def test_parts_of_another_number_of_parts_or_of_another_model_refused(place: Workplace) -> None:
    part(place, 1, 2)
    place.refused(2, "number of parts was 2 and is 3", options=("--part", "2/3", "--output", "parts"))
    place.config["model"] = {"factory": "model.py:mlp", "kwargs": {"hidden": 6}}
    place.refused(2, "rows of two runs can't be mixed", options=("--part", "2/2", "--output", "parts"))


def test_files_of_another_run_refused(place: Workplace) -> None:
    """They have the shape of the right ones."""
    part(place, 2, 2)
    shutil.copytree(place.folder / "parts", place.folder / "first")
    shutil.rmtree(place.folder / "parts")
    place.config["loss"] = {"name": "cross_entropy", "label_smoothing": 0.1}
    part(place, 1, 2)
    other = "parts/samples/part-2-of-2"
    shutil.copytree(place.folder / "first" / other, place.folder / "parts" / other)
    place.command("merge", "parts").refused(3, "part-2-of-2/00000.parquet is of another run")


@pytest.mark.long
def test_rows_that_are_there_twice_refused(place: Workplace) -> None:
    part(place, 1, 2)
    part(place, 2, 2)
    folder = place.folder / "parts/parts/samples"
    shutil.copytree(folder / "part-2-of-2", folder / "part-3-of-2")
    place.command("merge", "parts").refused(3, "the rows 10 to 23 of the pass samples are there twice")


def test_part_after_the_merge_refused(place: Workplace) -> None:
    part(place, 1, 1)
    merged(place)
    place.refused(2, "are merged already", options=("--part", "1/1", "--output", "parts"))


@pytest.mark.parametrize("text", ["0/3", "4/3", "3", "a/b", "1/0", "-1/2", "1/2/3"])
def test_part_that_is_none_refused(place: Workplace, text: str) -> None:
    place.refused(2, f"--part {text}", "K/N", options=("--part", text))


def test_merge_of_a_run_in_one_piece_and_a_part_into_it_refused(place: Workplace) -> None:
    place.succeeded("--no-report")
    for folder in ("out", "nothing"):
        place.command("merge", folder).refused(2, "is not the folder of a run in parts")
    place.refused(2, "number of parts was null and is 2", options=("--part", "1/2"))
