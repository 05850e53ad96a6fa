"""Faults of one rank or of what it stands on: a full disk, a folder that is not shared, a port that is taken.
The run ends with a named error, and goes on with `--resume` by any number of processes.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from psgrad.engine.execution.loading import Loader
from psgrad.run import durable_files
from tests.commands.same_runs import assert_same_runs
from tests.forked_ranks import Plant, die, hasty, run_ranks, slow_chunks
from tests.influence_workplace import InfluenceWorkplace

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


@pytest.mark.long
@pytest.mark.parametrize("full", [pytest.param(0, marks=pytest.mark.sweep), 1])
def test_full_disk_of_a_rank_ends_all_and_is_resumed(
    place: InfluenceWorkplace, monkeypatch: pytest.MonkeyPatch, full: int
) -> None:
    written = durable_files.write_all

    def write(descriptor: int, data: bytes | memoryview) -> None:
        if bytes(data[:4]) == b"PAR1":  # the first shard
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written(descriptor, data)

    def plant(rank: int) -> None:
        if rank == full:
            monkeypatch.setattr(durable_files, "write_all", write)

    said = refused(place, plant, *ANALYZE)
    assert "No space left on device" in said[full]
    ended = run_ranks(place.folder, 3, *ANALYZE, "--resume")
    assert [rank.code for rank in ended] == [0, 0, 0], ended
    place.succeeded("--no-report", "--output", "one")
    assert_same_runs(place.folder / "one", place.folder / "out")


@pytest.mark.long
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
    assert "another program uses the port MASTER_PORT" in first.err
    assert "Traceback" not in first.err


@pytest.mark.long
def test_port_that_is_taken_ends_all_ranks_of_srun(
    place: InfluenceWorkplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --kill-on-bad-exit nobody ends the ranks that would wait for the first one."""
    monkeypatch.setenv("PSGRAD_RANK_SILENCE", "2")
    with socket.socket() as taken:
        job = next(job for job in range(1, 10_000) if is_free(taken, 20_000 + job))
        taken.listen()

        def plant(rank: int) -> None:
            for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
                del os.environ[name]
            os.environ |= {
                "SLURM_JOB_ID": str(job),
                "SLURM_STEP_ID": "0",
                "SLURM_STEP_NUM_TASKS": "2",
                "SLURM_STEP_NODELIST": "127.0.0.1",
                "SLURM_STEP_TASKS_PER_NODE": "2",
                "SLURM_PROCID": str(rank),
                "SLURM_LOCALID": str(rank),
            }

        first, other = refused(place, plant, *ANALYZE)
    assert "EADDRINUSE" in first
    where = f"127.0.0.1, port {20_000 + job}"
    assert f"what listens at {where} has given no answer for 2 seconds" in other
    assert "another program uses that port" in other


@pytest.mark.long
def test_host_without_an_address_is_a_named_error(
    place: InfluenceWorkplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PSGRAD_RANK_EXCHANGE", "2")

    def plant(rank: int) -> None:
        os.environ["MASTER_ADDR"] = "no-such-host.invalid"

    for said in refused(place, plant, *ANALYZE):
        assert said.startswith("error: the host of MASTER_ADDR, 'no-such-host.invalid', has had no address")
        assert "c10d" not in said


@pytest.mark.long
def test_first_rank_that_does_not_start_is_a_named_error(
    place: InfluenceWorkplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PSGRAD_RANK_EXCHANGE", "2")
    _, other = run_ranks(place.folder, 2, *ANALYZE, plant=lambda rank: None if rank else die())
    assert other.code == 3, other
    assert "nothing has listened at 127.0.0.1, port" in other.err
    assert "for 2 seconds" in other.err
    assert "rank 0 has failed before it could say so" in other.err


def is_free(taken: socket.socket, port: int) -> bool:
    """Whether the port was free; the socket has it now."""
    try:
        taken.bind(("127.0.0.1", port))
    except OSError:
        return False
    return True


@pytest.mark.sweep
def test_first_rank_that_is_stopped_ends_the_others(
    place: InfluenceWorkplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds the key-value store. When it goes on it finds that the other one is gone."""
    hasty(monkeypatch)

    def stop() -> None:
        subprocess.Popen(["sh", "-c", f"sleep 12; kill -CONT {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)

    def plant(rank: int) -> None:
        if rank == 0:
            monkeypatch.setattr(Loader, "to_device", lambda *args: stop())

    ended = run_ranks(place.folder, 2, *ANALYZE, plant=plant)
    assert [rank.code for rank in ended] == [3, 3], ended
    assert "has given no answer for 3 seconds" in ended[1].err
    assert ended[1].seconds < ended[0].seconds


@pytest.mark.sweep
def test_rank_with_a_slow_disk_or_clock_is_not_taken_for_dead(
    place: InfluenceWorkplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its disk needs longer for a write than a rank may be silent, and its clock is a day ahead and runs at a
    tenth of the speed.
    """
    hasty(monkeypatch)
    written, clock = durable_files.write_all, time.monotonic

    def write(descriptor: int, data: bytes | memoryview) -> None:
        time.sleep(5)
        written(descriptor, data)

    def plant(rank: int) -> None:
        if rank:
            monkeypatch.setattr(durable_files, "write_all", write)
            monkeypatch.setattr(time, "monotonic", lambda: 86_400 + clock() / 10)
        else:
            slow_chunks(monkeypatch, 0.5)

    ended = run_ranks(place.folder, 2, *ANALYZE, plant=plant)
    assert [rank.code for rank in ended] == [0, 0], ended
    assert ended[0].seconds > 5
