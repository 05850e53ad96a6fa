"""A rank, or the process that has started the ranks, is killed at a random time: no process is left after 30
seconds, the exit code is 3 where nobody starts the rank again, and the tables are those of an undisturbed
run.

Each kill is of a process that runs. The cases go through all jobs, starters and victims in turn:
`PSGRAD_KILLS=50 pytest -m sweep tests/commands/test_kill_ranks.py` kills 50 times.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import yaml

from tests.commands.same_runs import assert_same_runs
from tests.commands.test_processes import alive
from tests.influence_workplace import InfluenceWorkplace

ROWS, CHUNK = 64, 4
SECONDS_LEFT = 30.0  # after a death
SECONDS_TO_START = 400.0  # on a machine that has much else to do
SECONDS_A_CHUNK = 0.15
TRIES = 5  # of one kill, where the process had ended before the signal
STARTERS = ("--processes", "torchrun", "torchrun that restarts")
TORCHRUN = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d")
NAMED = (
    "was ended by SIGKILL",
    "has sent no heartbeat",
    "a connection to another rank is lost",
    "Signal 9 (SIGKILL) received by PID",  # of torchrun, which may end the other rank before that notices
)
# Slow enough to be killed in the middle.
MODEL = """
import os, time

class Model(nn.Sequential):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Linear(4, 3))

    def forward(self, x):
        time.sleep(float(os.environ.get("SECONDS_A_CHUNK", 0)))
        return super().forward(x)
"""


@dataclass(frozen=True)
class Job:
    """A command of psgrad. setting: of the config, which names the folder that it makes."""

    words: tuple[str, ...]
    setting: str

    def arguments(self, folder: str, *options: str) -> list[str]:
        return [*self.words, "config.yaml", "--set", f"{self.setting}={folder}", *options]

    def assert_same(self, one: Path, other: Path) -> None:
        if self.setting == "output":
            assert_same_runs(one, other)
            return
        files = sorted(one.rglob("gradients*"))
        assert len(files) == ROWS // CHUNK
        for file in files:
            assert file.read_bytes() == (other / file.relative_to(one)).read_bytes()


JOBS = {
    "analyze": Job(("analyze", "--no-report"), "output"),
    "index": Job(("influence", "index"), "influence.index.path"),
}


CASES = list(product(JOBS, STARTERS, ("agent", "rank")))
KILLS = int(os.environ.get("PSGRAD_KILLS", len(CASES)))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config, and what one process makes of it: a run of analyze, and an index."""
    folder = tmp_path_factory.mktemp("kills")
    with pytest.MonkeyPatch.context() as monkeypatch:
        place = InfluenceWorkplace(folder, monkeypatch, None)  # type: ignore[arg-type]  # it prints nothing
    source = np.random.default_rng(0)
    place.save(
        x=source.normal(size=(ROWS, 4)).astype(np.float32),
        y=source.integers(0, 3, ROWS),
        uid=np.array([f"row-{row:02d}" for row in range(ROWS)]),
    )
    place.prepare()
    place.use_model(MODEL)
    place.config["engine"] = {"chunk_size": CHUNK, "verify": 1}
    place.config["analyze"] = {"measures": ["relative_norm", "cosine_to_mean", "hessian_trace"]}
    index = {"path": "none", "dimension": 8, "rows_per_shard": CHUNK}
    place.config["influence"] |= {"index": index, "method": "projected_influence"}
    (folder / "config.yaml").write_text(yaml.safe_dump(place.config))
    for name, job in JOBS.items():
        psgrad(folder, *job.arguments(f"{name}-undisturbed"))
    return folder


def psgrad(folder: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", "psgrad", *arguments]
    ended = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=300, check=False, env=environment(0)
    )
    assert ended.returncode == 0, ended.stderr


def environment(seconds: float) -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "SECONDS_A_CHUNK": str(seconds)}


def started(folder: Path, job: Job, name: str, starter: str) -> subprocess.Popen[bytes]:
    """The agent: psgrad with --processes, or torchrun. What it says is in a file."""
    if starter == "--processes":
        command = ["-m", "psgrad", *job.arguments(name, "--processes", "2")]
    else:
        resumes = ["--resume"] if "restarts" in starter else []
        restarts = f"--max-restarts={2 * len(resumes)}"
        command = [*TORCHRUN, "--rdzv-endpoint=localhost:0", restarts]
        command += ["-m", "psgrad", *job.arguments(name, *resumes)]
    with (folder / f"{name}.err").open("wb") as said:
        return subprocess.Popen(
            [sys.executable, *command],
            cwd=folder,
            stdout=subprocess.DEVNULL,
            stderr=said,
            env=environment(SECONDS_A_CHUNK),
        )


def children(agent: int) -> list[int]:
    try:
        return [int(each) for each in Path(f"/proc/{agent}/task/{agent}/children").read_text().split()]
    except OSError:
        return []


@dataclass(frozen=True)
class Killed:
    """How a run went on after one of its processes was killed.

    name: of the folder that it made. code: of the agent. said: by all processes.
    """

    name: str
    code: int
    said: str


def killed(
    folder: Path, name: str, job: Job, starter: str, victim: str, choice: random.Random
) -> Killed | None:
    """A run of which one process is killed at a random time; None where that had ended by then."""
    agent = started(folder, job, name, starter)
    began, ranks = time.monotonic(), list[int]()
    while len(ranks) < 2 and agent.poll() is None and time.monotonic() - began < SECONDS_TO_START:
        ranks = children(agent.pid)
        time.sleep(0.05)
    assert len(ranks) == 2, (folder / f"{name}.err").read_text()
    time.sleep(choice.random() * (time.monotonic() - began + SECONDS_A_CHUNK * ROWS / CHUNK))
    process = agent.pid if victim == "agent" else choice.choice(ranks)
    there = alive(process)
    if there:
        os.kill(process, signal.SIGKILL)
    restarts = victim == "rank" and "restarts" in starter
    code = agent.wait(timeout=300 if restarts or not there else SECONDS_LEFT)
    ended = time.monotonic()
    while any(map(alive, ranks)) and time.monotonic() - ended < SECONDS_LEFT:
        time.sleep(0.1)
    assert not any(map(alive, ranks))
    return Killed(name, code, (folder / f"{name}.err").read_text()) if there else None


@pytest.mark.sweep
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(KILLS))
def test_kill_leaves_no_process_and_no_other_number(undisturbed: Path, seed: int) -> None:
    choice = random.Random(seed)
    kind, starter, victim = CASES[seed % len(CASES)]
    job = JOBS[kind]
    tries = (killed(undisturbed, f"{kind}-{seed}-{k}", job, starter, victim, choice) for k in range(TRIES))
    found = next((each for each in tries if each is not None), None)
    assert found is not None, f"no process was left to kill in {TRIES} runs"
    about = f"{kind}, {starter}, {victim}, exit code {found.code}: {found.said[-1500:]}"
    if victim == "agent":
        assert found.code == -signal.SIGKILL, about
    elif "restarts" in starter:
        assert found.code == 0, about
        job.assert_same(undisturbed / f"{kind}-undisturbed", undisturbed / found.name)
    else:
        assert found.code == (3 if starter == "--processes" else 1), about  # torchrun has one of its own
        assert any(words in found.said for words in NAMED), about
    assert starter != "--processes" or "Traceback" not in found.said, about
    options = ("--resume", "--processes", str(choice.choice((1, 2, 3))))
    psgrad(undisturbed, *job.arguments(found.name, *options))
    job.assert_same(undisturbed / f"{kind}-undisturbed", undisturbed / found.name)
