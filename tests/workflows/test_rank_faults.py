"""Faults of one rank or of what it stands on: a full disk, a folder that is not shared, a port that is taken.
The run ends with a named error, and goes on with `--resume` by any number of processes.
"""

from __future__ import annotations

import errno
import os
import shutil
import socket
from pathlib import Path

import pytest
import yaml

from psgrad.storage import files
from tests.forked_ranks import Plant, die, run_ranks
from tests.influence_workplace import InfluenceWorkplace
from tests.workflows.same_runs import assert_same_runs

ANALYZE = ("analyze", "config.yaml", "--no-report")


@pytest.fixture
def place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> InfluenceWorkplace:
    (tmp_path / "first").mkdir()
    found = InfluenceWorkplace(tmp_path / "first", monkeypatch, capfd)
    found.prepare()
    found.config["engine"] = {"chunk_size": 4}
    found.config["analyze"] = {"measures": ["relative_norm", "cosine_to_mean"]}
    index = {"path": "index", "dimension": 8, "rows_per_shard": 4}
    found.config["influence"] |= {"method": "projected_influence", "index": index}
    (found.folder / "config.yaml").write_text(yaml.safe_dump(found.config))
    return found


def refused(place: InfluenceWorkplace, plant: Plant, *words: str) -> list[str]:
    """What both ranks print on stderr, once it is seen that they end with exit code 3 and no traceback."""
    ended = run_ranks(place.folder, 2, *words, plant=plant)
    said = [rank.err for rank in ended]
    assert [rank.code for rank in ended] == [3, 3], said
    assert "Traceback" not in "".join(said)
    assert [rank.out for rank in ended] == ["", ""]
    return said


@pytest.mark.parametrize("full", [pytest.param(0, marks=pytest.mark.sweep), 1])
def test_full_disk_of_a_rank_ends_all_and_is_resumed(
    place: InfluenceWorkplace, monkeypatch: pytest.MonkeyPatch, full: int
) -> None:
    written = files.write_all

    def write(descriptor: int, data: bytes | memoryview) -> None:
        if bytes(data[:4]) == b"PAR1":  # the first shard
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written(descriptor, data)

    def plant(rank: int) -> None:
        if rank == full:
            monkeypatch.setattr(files, "write_all", write)

    said = refused(place, plant, *ANALYZE)
    assert "No space left on device" in said[full]
    ended = run_ranks(place.folder, 3, *ANALYZE, "--resume")
    assert [rank.code for rank in ended] == [0, 0, 0], ended
    place.succeeded("--no-report", "--output", "one")
    assert_same_runs(place.folder / "one", place.folder / "out")


@pytest.mark.parametrize(
    ("words", "folder"), [(ANALYZE, "run folder"), (("influence", "index", "config.yaml"), "index")]
)
def test_folder_that_is_not_shared_is_named(
    place: InfluenceWorkplace, words: tuple[str, ...], folder: str
) -> None:
    other = place.folder.parent / "second"
    shutil.copytree(place.folder, other)
    said = refused(place, lambda rank: os.chdir(other) if rank else None, *words)
    assert f"rank 1 does not see the {folder}" in said[1]
    assert "on storage that all machines share" in said[1]


def test_port_that_is_taken_is_a_named_error(place: InfluenceWorkplace) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()

        def plant(rank: int) -> None:
            if rank:
                die()
            os.environ["MASTER_PORT"] = str(taken.getsockname()[1])

        first, _ = run_ranks(place.folder, 2, *ANALYZE, plant=plant)
    assert first.code == 3, first
    assert "error: the process group can't be made" in first.err
    assert "EADDRINUSE" in first.err
    assert "Traceback" not in first.err
