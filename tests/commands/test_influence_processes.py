"""`psgrad influence`, its index and its evaluation in several processes and in parts, against one process."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml
from safetensors.numpy import load_file

from tests.forked_ranks import run_ranks
from tests.influence_workplace import InfluenceWorkplace

PARTS = 3


@pytest.fixture
def place(influence_place: InfluenceWorkplace) -> InfluenceWorkplace:
    found = influence_place
    found.config["engine"] = {"chunk_size": 4, "dtype": "float64"}
    return found


def with_index(place: InfluenceWorkplace, name: str) -> None:
    index = {"path": name, "dimension": 8, "rows_per_shard": 4, "dtype": "float64"}
    place.config["influence"] |= {"index": index, "method": "projected_influence"}


def write(place: InfluenceWorkplace) -> None:
    (place.folder / "config.yaml").write_text(yaml.safe_dump(place.config))


def run(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "psgrad", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert ended.returncode == code, ended.stderr
    return ended


def assert_same_scores(one: Path, other: Path) -> None:
    """But for rounding: sums over rows are added in another order."""
    for name in ("scores", "self_influence", "queries"):
        wanted, found = (pd.read_parquet(folder / f"{name}.parquet") for folder in (one, other))
        pd.testing.assert_frame_equal(found, wanted, rtol=1e-6, atol=1e-9)


@pytest.mark.long
def test_two_processes_rank_as_one(place: InfluenceWorkplace) -> None:
    place.config["influence"] |= {"method": {"name": "ekfac", "damping": 0.1}, "queries": {"worst": 3}}
    write(place)
    options = ["influence", "config.yaml", "--no-report", "--matrix", "--output"]
    ended = run_ranks(place.folder, 2, *options, "two")
    assert [rank.code for rank in ended] == [0, 0], ended
    assert [rank.out.count("two\n") for rank in ended] == [1, 0]  # one process alone prints
    assert place.command(*options, "one").code == 0
    assert_same_scores(place.folder / "one", place.folder / "two")
    one, two = (load_file(place.folder / name / "matrix.safetensors")["scores"] for name in ("one", "two"))
    np.testing.assert_allclose(two, one, rtol=1e-5, atol=1e-7)


@pytest.mark.sweep
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("count", [3])
def test_index_by_processes_answers_as_that_of_one(place: InfluenceWorkplace, count: int) -> None:
    for name, processes in (("one", 1), ("several", count)):
        with_index(place, f"index-{name}")
        write(place)
        run("influence", "index", "config.yaml", "--processes", str(processes))
        run("influence", "config.yaml", "--no-report", "--output", name, "--processes", str(processes))
    folders = [place.folder / f"index-{name}" for name in ("one", "several")]
    shards = sorted(path.relative_to(folders[0]) for path in folders[0].rglob("gradients*"))
    assert len(shards) > count
    for shard in shards:
        assert (folders[0] / shard).read_bytes() == (folders[1] / shard).read_bytes()
    assert_same_scores(place.folder / "one", place.folder / "several")


@pytest.mark.sweep
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("count", [2])
@pytest.mark.parametrize("kind", ["lds", "loo", "removal"])
def test_evaluation_by_processes_is_that_of_one(place: InfluenceWorkplace, kind: str, count: int) -> None:
    train = {"optimizer": "sgd", "epochs": 3, "learning_rate": 0.1}
    place.config["influence"]["evaluate"] = {"subsets": 6, "seeds": 2, "ks": [2, 4], "train": train}
    write(place)
    options = ["influence", "config.yaml", "--evaluate", kind, "--output"]
    assert place.command(*options, "one").code == 0
    ended = run_ranks(place.folder, count, *options, "several")
    assert [rank.code for rank in ended] == [0] * count, ended
    one, several = (pd.read_csv(place.folder / name / "evaluation.csv") for name in ("one", "several"))
    pd.testing.assert_frame_equal(several, one, rtol=1e-6, atol=1e-9)


# -- parts ---------------------------------------------------------------------------------------------------


def build_part(place: InfluenceWorkplace, number: int, count: int = PARTS) -> None:
    outcome = place.command("influence", "index", "config.yaml", "--part", f"{number}/{count}").succeeded()
    assert outcome.out.strip() == str(place.config["influence"]["index"]["path"])


@pytest.mark.long
@pytest.mark.parametrize("count", [1, 3, 40])
def test_parts_of_an_index_in_any_order_are_the_whole(place: InfluenceWorkplace, count: int) -> None:
    """More parts than shards, too: some have nothing to do."""
    with_index(place, "parts")
    write(place)
    order = list(range(1, count + 1))
    random.Random(count).shuffle(order)
    for number in order:
        build_part(place, number, count)
    place.command("merge", "parts").succeeded()
    with_index(place, "whole")
    write(place)
    assert place.command("influence", "index", "config.yaml").code == 0
    files = list((place.folder / "whole").rglob("*.safetensors"))
    for file in files:
        assert (
            file.read_bytes()
            == (place.folder / "parts" / file.relative_to(place.folder / "whole")).read_bytes()
        )


def test_missing_part_of_an_index_is_named(place: InfluenceWorkplace) -> None:
    with_index(place, "parts")
    write(place)
    for number in (1, 3):
        build_part(place, number)
    outcome = place.command("merge", "parts")
    outcome.refused(3, "lacks", "shards, the first one that of the rows", "run that part again")
    build_part(place, 2)
    build_part(place, 2)  # once more changes nothing
    assert place.command("merge", "parts").code == 0


def test_part_of_another_index_is_refused(place: InfluenceWorkplace) -> None:
    with_index(place, "parts")
    write(place)
    build_part(place, 1)
    place.config["influence"]["index"]["dimension"] = 4
    write(place)
    outcome = place.command("influence", "index", "config.yaml", "--part", "2/3")
    outcome.refused(3, "is of something else: dimension")


def test_part_that_is_no_part_is_refused(place: InfluenceWorkplace) -> None:
    with_index(place, "parts")
    write(place)
    for given in ("4/3", "0/3", "one"):
        place.command("influence", "index", "config.yaml", "--part", given).refused(2, f"--part {given}")
    outcome = place.command("influence", "index", "config.yaml", "--part", "1/2", "--processes", "2")
    outcome.refused(2, "--part was given together with --processes")
