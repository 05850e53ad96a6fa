"""Commands in several processes that die, fail or are asked to end: they end with one named error, and go on
with any number of processes to the tables of one process that was left alone. Where nobody dies, see
test_all_by_processes.py.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from psgrad.run import durable_files
from psgrad.run.gradient_index import GradientIndex
from psgrad.run.shards import Shards
from tests.commands.same_runs import assert_same_runs
from tests.forked_ranks import EndedRank, Plant, die, run_ranks
from tests.influence_workplace import InfluenceWorkplace
from tests.workplace import Workplace

MEASURES = ["noise_scale", "signal_to_noise", "relative_norm", "cosine_to_class_mean"]
# A pass of its own that takes a second for a row, long enough to be killed in.
SLOW = """
from dataclasses import dataclass
import os, time
import torch
from psgrad.engine.execution.chunk_measure import Columns
from psgrad.engine.measures.measure import Measure, OwnPass

@dataclass
class Slow(Measure):
    name = "slow"

    def passes(self):
        def run(rows, size):
            for row in rows:
                time.sleep(float(os.environ.get("SECONDS_A_ROW", 0)))
                yield Columns(row, row + 1, {"slow": torch.tensor([2.0 * row])})

        return [OwnPass("slow", run)]
"""
ANALYZE, INDEX = ("analyze", "config.yaml", "--no-report"), ("influence", "index", "config.yaml")
PASSES = ["samples", "samples-again", "hessian-trace"]


@pytest.fixture
def both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> InfluenceWorkplace:
    """A config for analyze with three passes, and for an index of six shards."""
    (tmp_path / "first").mkdir()
    found = InfluenceWorkplace(tmp_path / "first", monkeypatch, capfd)
    found.prepare()
    found.config["engine"] = {"chunk_size": 4, "verify": 1}
    found.config["analyze"] = {"measures": ["relative_norm", "cosine_to_mean", "hessian_trace"]}
    index = {"path": "index", "dimension": 8, "rows_per_shard": 4}
    found.config["influence"] |= {"method": "projected_influence", "index": index}
    (found.folder / "config.yaml").write_text(yaml.safe_dump(found.config))
    return found


def refused(place: InfluenceWorkplace, plant: Plant, *words: str, size: int = 2) -> list[EndedRank]:
    """How the ranks end, once it is seen that those which were not killed end with exit code 3 and no
    traceback, and have no number.
    """
    ended = run_ranks(place.folder, size, *words, plant=plant)
    assert {rank.code for rank in ended} <= {3, -signal.SIGKILL}, ended
    assert "Traceback" not in "".join(rank.err for rank in ended)
    assert [rank.out for rank in ended] == [""] * size
    return ended


def killed_in(name: str, victim: int, monkeypatch: pytest.MonkeyPatch) -> Plant:
    """The death of a rank when it has stored its first shard of a pass, or of an index."""

    def plant(rank: int) -> None:
        if rank != victim:
            return
        append, write = Shards.append, GradientIndex.write

        def appended(self: Shards, *arguments: object) -> None:
            append(self, *arguments)  # type: ignore[arg-type]
            if self.name == name:
                die()

        def written(self: GradientIndex, *arguments: object) -> None:
            write(self, *arguments)  # type: ignore[arg-type]
            die()

        monkeypatch.setattr(Shards, "append", appended)
        monkeypatch.setattr(GradientIndex, "write", written)

    return plant


@pytest.mark.long
@pytest.mark.every(3)
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(("ranks", "then"), [(2, 1), (2, 2), pytest.param(3, 2, marks=pytest.mark.sweep)])
@pytest.mark.parametrize(("words", "name"), [*((ANALYZE, name) for name in PASSES), (INDEX, "index")])
def test_run_of_ranks_that_is_killed_in_a_pass_goes_on_to_the_tables_of_one_process(
    both: InfluenceWorkplace,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    name: str,
    ranks: int,
    then: int,
    victim: int,
) -> None:
    ended = refused(both, killed_in(name, victim, monkeypatch), *words, size=ranks)
    assert ended[victim].code == -signal.SIGKILL
    assert any("has lost another rank" in rank.err for rank in ended), ended
    if words is ANALYZE:
        resumed = run_ranks(both.folder, then, *words, "--resume") if then > 1 else []
        assert [rank.code for rank in resumed] == [0] * len(resumed), resumed
        if then == 1:
            both.succeeded("--no-report", "--resume")
        both.succeeded("--no-report", "--output", "one")
        assert_same_runs(both.folder / "one", both.folder / "out")
        return
    resumed = run_ranks(both.folder, then, *words, "--resume")
    assert [rank.code for rank in resumed] == [0] * then, resumed
    both.command(*words, "--set", "influence.index.path=alone").succeeded()
    files = sorted((both.folder / "alone").rglob("*.safetensors"))
    assert len(files) == len(both.arrays["x"]) // 4 + 1  # and the sums
    for file in files:
        other = both.folder / "index" / file.relative_to(both.folder / "alone")
        assert file.name == "sums.safetensors" or file.read_bytes() == other.read_bytes()


@pytest.mark.long
@pytest.mark.parametrize("full", [pytest.param(0, marks=pytest.mark.sweep), 1])
def test_full_disk_of_a_rank_ends_all_and_is_resumed(
    both: InfluenceWorkplace, monkeypatch: pytest.MonkeyPatch, full: int
) -> None:
    written = durable_files.write_all

    def write(descriptor: int, data: bytes | memoryview) -> None:
        if bytes(data[:4]) == b"PAR1":  # the first shard
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written(descriptor, data)

    def plant(rank: int) -> None:
        if rank == full:
            monkeypatch.setattr(durable_files, "write_all", write)

    ended = refused(both, plant, *ANALYZE)
    assert "No space left on device" in ended[full].err
    if full:  # else the key-value store is gone with rank 0
        assert "error:" not in ended[0].err  # one rank alone says what is wrong
    resumed = run_ranks(both.folder, 3, *ANALYZE, "--resume")
    assert [rank.code for rank in resumed] == [0, 0, 0], resumed
    both.succeeded("--no-report", "--output", "one")
    assert_same_runs(both.folder / "one", both.folder / "out")


@pytest.mark.long
@pytest.mark.parametrize(("words", "folder"), [(ANALYZE, "run folder"), (INDEX, "index")])
def test_folder_that_is_not_shared_is_named(
    both: InfluenceWorkplace, words: tuple[str, ...], folder: str
) -> None:
    other = both.folder.parent / "second"
    shutil.copytree(both.folder, other)
    ended = refused(both, lambda rank: os.chdir(other) if rank else None, *words)
    assert f"rank 1 does not see the {folder}" in ended[1].err
    assert "that all machines share" in ended[1].err


def test_port_that_is_taken_is_a_named_error(both: InfluenceWorkplace) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()

        def plant(rank: int) -> None:
            if rank:
                die()
            os.environ["MASTER_PORT"] = str(taken.getsockname()[1])

        first, _ = refused(both, plant, *ANALYZE)
    assert "error: the process group can't be made" in first.err
    assert "EADDRINUSE" in first.err
    assert "set MASTER_PORT to a free one" in first.err


# -- processes that torchrun, or psgrad with --processes, starts --------------------------------------------


def command(place: Workplace, *options: str) -> list[str]:
    (place.folder / "config.yaml").write_text(yaml.safe_dump(place.config))
    return [sys.executable, "-m", "psgrad", "analyze", "config.yaml", "--no-report", *options]


def run(place: Workplace, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(place, *options), capture_output=True, text=True, timeout=500, check=False)


@pytest.fixture
def place(workplace: Workplace) -> Workplace:
    workplace.config["engine"] = {"chunk_size": 4}
    return workplace


@pytest.mark.long
@pytest.mark.timeout(600)
def test_two_processes_equal_one(place: Workplace) -> None:
    place.config["analyze"] = {"measures": MEASURES}
    outcome = run(place, "--processes", "2", "--output", "two")
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout.count("two\n") == 1  # one process alone prints
    place.succeeded("--no-report")
    assert_same_runs(place.folder / "out", place.folder / "two")


@pytest.mark.sweep
@pytest.mark.timeout(600)
def test_gate_exit_code_of_several_processes(place: Workplace) -> None:
    place.config["gate"] = {"rules": [{"id": "loss", "where": "loss > 0.001", "max_count": 0}]}
    alone = run(place, "--check", "--output", "one")
    together = run(place, "--check", "--processes", "2", "--output", "two")
    assert alone.returncode == together.returncode != 0, together.stderr


@pytest.mark.sweep
@pytest.mark.timeout(600)
def test_config_error_of_several_processes_is_printed_once(place: Workplace) -> None:
    place.config["data"]["target"] = "nothing"
    outcome = run(place, "--processes", "2")
    assert outcome.returncode == 2
    assert outcome.stderr.count("error:") == 1, outcome.stderr
    assert "Traceback" not in outcome.stderr


@pytest.mark.sweep
@pytest.mark.timeout(600)
def test_error_of_one_process_ends_all(place: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    (place.folder / "own.py").write_text(
        SLOW.replace("time.sleep", "assert os.environ['RANK'] == '0', 'rank 1 fails'; time.sleep")
    )
    place.config["analyze"] = {"measures": ["own.py:Slow"]}
    monkeypatch.setenv("SECONDS_A_ROW", "0.5")  # so that rank 0 leaves rows to the other
    outcome = run(place, "--processes", "2")
    assert outcome.returncode == 3
    assert outcome.stderr.count("rank 1 fails") == 1, outcome.stderr


@pytest.mark.sweep
@pytest.mark.timeout(600)
def test_sigterm_to_the_launcher_ends_the_run_with_143(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank has finished and kept the chunk that it was in; the run goes on from there."""
    begun = "open(f'begun-{os.environ.get(\"RANK\")}', 'w').close()"
    (place.folder / "own.py").write_text(SLOW.replace("time.sleep", f"{begun}; time.sleep"))
    place.config["analyze"] = {"measures": ["own.py:Slow"]}
    monkeypatch.setenv("SECONDS_A_ROW", "5")
    launcher = subprocess.Popen(command(place, "--processes", "2", "--output", "two"))
    ranks = wait_for_ranks(launcher, place.folder / "two/parts/samples")
    wait_for(*(place.folder / f"begun-{rank}" for rank in range(2)))
    launcher.terminate()
    assert launcher.wait(timeout=150) == 143
    assert not any(alive(rank) for rank in ranks)
    kept = sorted((place.folder / "two/parts/slow").glob("rank-*/*.parquet"))
    assert len({file.parent for file in kept}) == 2, kept
    monkeypatch.setenv("SECONDS_A_ROW", "0")
    place.succeeded("--no-report")
    place.succeeded("--no-report", "--output", "two", "--resume")
    assert_same_runs(place.folder / "out", place.folder / "two")


@pytest.mark.sweep
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(2))
def test_killed_rank_is_started_again_by_torchrun(
    place: Workplace, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place.folder / "own.py").write_text(SLOW)
    place.config["analyze"] = {"measures": [*MEASURES, "own.py:Slow"]}
    monkeypatch.setenv("SECONDS_A_ROW", "0.4")
    random_source = random.Random(seed)
    python, *arguments = command(place, "--output", "two", "--resume")
    torchrun = [python, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "2"]
    rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    agent = subprocess.Popen([*torchrun, *rendezvous, *arguments], stderr=subprocess.PIPE, text=True)
    ranks = wait_for_ranks(agent, place.folder / "two/parts/slow")
    time.sleep(random_source.random() * 3)
    os.kill(random_source.choice(ranks), signal.SIGKILL)
    _, words = agent.communicate(timeout=400)
    assert agent.returncode == 0, words
    monkeypatch.setenv("SECONDS_A_ROW", "0")
    place.succeeded("--no-report")
    assert_same_runs(place.folder / "out", place.folder / "two")


def wait_for_ranks(launcher: subprocess.Popen[str], reached: Path) -> list[int]:
    """The process ids of the ranks, once the run has reached this pass's folder, or the pass before it."""
    end = time.monotonic() + 300
    while time.monotonic() < end and launcher.poll() is None:
        children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        if len(children) >= 2 and (reached.exists() or (reached.parent / "samples").exists()):
            return [int(child) for child in children]
        time.sleep(0.1)
    raise AssertionError("the ranks did not begin")


def wait_for(*files: Path) -> None:
    end = time.monotonic() + 100
    while not all(file.exists() for file in files):
        assert time.monotonic() < end, f"{files} were not all made"
        time.sleep(0.05)


def alive(process: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
