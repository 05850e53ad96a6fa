"""`psgrad analyze --processes N` in real processes, against the same run in one."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml

from psgrad.commands.analyze import analyze
from psgrad.config import load_config
from psgrad.engine.execution.ranks import OneProcess
from tests.commands.same_runs import assert_same_runs
from tests.workplace import ROWS, Workplace

MEASURES = ["noise_scale", "signal_to_noise", "relative_norm", "cosine_to_class_mean", "loo_mean_change"]
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
    place.config["analyze"] = {"measures": [*MEASURES, {"name": "covariance_spectrum", "exact_up_to": 0}]}
    outcome = run(place, "--processes", "2", "--output", "two", "-v")
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout.count("two\n") == 1  # one process alone prints
    assert (place.folder / "two/logs/rank-1.log").exists()
    ranks = json.loads((place.folder / "two/manifest.json").read_text())["ranks"]
    assert (ranks["processes"], ranks["backend"]) == (2, "gloo")
    assert 0 < ranks["balance"] <= 1
    assert [each["rank"] for each in ranks["each"]] == [0, 1]
    assert sum(each["rows"] for each in ranks["each"]) == 2 * ROWS  # in two passes
    assert [line.split()[:2] for line in outcome.stderr.splitlines() if line.startswith("rank ")] == [
        ["rank", "0"],
        ["rank", "1"],
    ]
    place.succeeded("--no-report")
    assert_same_runs(place.folder / "out", place.folder / "two")


class CountedProcess(OneProcess):
    """A process that counts what it does together with others."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = Counter[str]()

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if callable(found) and not name.startswith("_"):
            self.calls[name] += 1
        return found


@pytest.mark.long
def test_nothing_is_sent_for_a_chunk_but_the_progress(place: Workplace) -> None:
    """Twelve chunks in two passes, and three: the same calls, beside those of the progress."""
    place.config["analyze"] = {"measures": MEASURES}
    found = []
    assert ROWS == 24
    for chunk in (2, 10):
        place.config["engine"] = {"chunk_size": chunk}
        place.config["output"] = f"chunk-{chunk}"
        (place.folder / "config.yaml").write_text(yaml.safe_dump(place.config))
        process = CountedProcess()
        analyze(load_config(place.folder / "config.yaml"), report=False, processes=process)
        del process.calls["own"]  # which asks nobody
        found.append(process.calls)
    assert found[0].pop("progress") - found[1].pop("progress") == 2 * (12 - 3)
    assert found[0] == found[1]
    assert {"meet", "ranges", "agreed"} <= set(found[0])


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
def test_stopped_agent_ends_the_ranks_and_a_pause_of_it_does_not(
    place: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent holds the key-value store: a request has no answer while it is stopped."""
    (place.folder / "own.py").write_text(SLOW)
    place.config["analyze"] = {"measures": ["own.py:Slow"]}
    monkeypatch.setenv("SECONDS_A_ROW", "2")
    monkeypatch.setenv("PSGRAD_RANK_SILENCE", "5")
    agent = subprocess.Popen(
        command(place, "--processes", "2", "--output", "two"), stderr=subprocess.PIPE, text=True
    )
    ranks = wait_for_ranks(agent, place.folder / "two/parts/samples")
    for pause in (2.0, 60.0):
        agent.send_signal(signal.SIGSTOP)
        end = time.monotonic() + pause
        while any(map(alive, ranks)) and time.monotonic() < end:
            time.sleep(0.1)
        left = [alive(rank) for rank in ranks]
        agent.send_signal(signal.SIGCONT)
        assert left == [pause == 2.0] * 2
        time.sleep(1)
    _, words = agent.communicate(timeout=60)
    assert agent.returncode == 3, words
    assert "has given no answer for 5 seconds" in words
    assert "rank 0, or the agent of torchrun on the first machine, is stopped" in words
    assert "Traceback" not in words


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


AGENT = """
import subprocess, sys, time
print(subprocess.Popen(sys.argv[1:]).pid, flush=True)
time.sleep(100)
"""


@pytest.mark.sweep
@pytest.mark.timeout(300)
def test_rank_ends_where_the_agent_is_killed_before_the_ranks_have_met(place: Workplace) -> None:
    """It would wait for ten minutes for the store, which the agent of torchrun holds."""
    group = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    elastic = {"TORCHELASTIC_RUN_ID": "a run", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    agent = subprocess.Popen(
        [sys.executable, "-c", AGENT, *command(place)],
        env={**os.environ, **group, **elastic},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert agent.stdout is not None
    rank = int(agent.stdout.readline())
    time.sleep(0.5)  # the rank knows its agent
    agent.kill()
    agent.wait()
    end = time.monotonic() + 30
    while alive(rank) and time.monotonic() < end:
        time.sleep(0.1)
    assert not alive(rank)


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
