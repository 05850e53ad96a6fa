"""The guide's scripts for SLURM, with a stand-in for srun that starts one process on one machine, and its
jobs for Kubernetes, as the shells of their pods.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from psgrad.cli.processes import in_a_group
from psgrad.errors import ConfigError
from tests.commands.same_runs import assert_same_runs
from tests.workplace import Workplace

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
SRUN = """#!{python}
import os, subprocess, sys
sys.exit(subprocess.run(sys.argv[1:], env={{**os.environ, "SLURM_PROCID": "0"}}).returncode)
"""


@pytest.mark.parametrize(("rank", "size"), [("0", "two"), ("x", "2"), ("2", "2"), ("-1", "2"), ("", "2")])
def test_rank_that_can_not_be_is_refused(monkeypatch: pytest.MonkeyPatch, rank: str, size: str) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(ConfigError, match=f"the environment says RANK={rank} and WORLD_SIZE={size}"):
        in_a_group()


def test_several_processes_of_srun_without_torchrun_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_PROCID", "0")
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "32")
    with pytest.raises(ConfigError, match="srun has started psgrad 32 times"):
        in_a_group()
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "64")  # of torchrun
    assert in_a_group()


def tools(place: Workplace) -> str:
    """A PATH that begins with `psgrad`, torchrun and a stand-in for srun."""
    folder = place.folder / "bin"
    folder.mkdir(exist_ok=True)
    (folder / "srun").write_text(SRUN.format(python=sys.executable))
    for name, module in (("psgrad", "psgrad"), ("torchrun", "torch.distributed.run")):
        (folder / name).write_text(f'#!/bin/bash\nexec {sys.executable} -m {module} "$@"\n')
    for tool in folder.iterdir():
        tool.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def script(place: Workplace, name: str, **variables: str) -> None:
    """Run a script of the guide."""
    ended = subprocess.run(
        ["bash", str(GUIDES / "slurm" / name)],
        capture_output=True,
        text=True,
        env={**os.environ, "PATH": tools(place), **variables},
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr


def pods(place: Workplace, name: str, count: int, changes: dict[str, str]) -> None:
    """Run the shells of a job's pods, all at the same time. changes: of the command, where it is for more."""
    *_, job = yaml.safe_load_all((GUIDES / "kubernetes" / name).read_text(encoding="utf-8"))
    assert job["spec"]["completionMode"] == "Indexed"  # which sets JOB_COMPLETION_INDEX
    (container,) = job["spec"]["template"]["spec"]["containers"]
    *shell, words = container["command"]
    for before, after in changes.items():
        assert before in words
        words = words.replace(before, after)
    environment = {**os.environ, "PATH": tools(place), "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(
            [*shell, words], env={**environment, "JOB_COMPLETION_INDEX": str(index)}, stderr=subprocess.PIPE
        )
        for index in range(count)
    ]
    for pod in running:
        _, said = pod.communicate(timeout=400)
        assert pod.returncode == 0, said.decode()


@pytest.mark.sweep
@pytest.mark.timeout(1200)
def test_the_scripts_of_the_guide_run(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> None:
    workplace.config["engine"] = {"chunk_size": 4}
    workplace.succeeded("--no-report")
    workplace.config["output"] = "together"
    workplace.refused(2, "", options=("--part", "0/1"))  # which writes the config
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    slurm = {"SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "localhost", "SLURM_JOB_ID": "7"}
    script(workplace, "analyze.sbatch", **slurm)
    assert_same_runs(workplace.folder / "out", workplace.folder / "together")
    workplace.config["output"] = "parts"
    workplace.refused(2, "", options=("--part", "0/1"))
    for part in ("2", "1"):
        script(workplace, "array.sbatch", SLURM_ARRAY_TASK_ID=part, SLURM_ARRAY_TASK_COUNT="2")
    assert workplace.command("merge", "parts", "--no-report").code == 0
    assert_same_runs(workplace.folder / "out", workplace.folder / "parts")


@pytest.mark.sweep
@pytest.mark.timeout(1200)
def test_the_jobs_of_the_guide_run(workplace: Workplace) -> None:
    workplace.config["engine"] = {"chunk_size": 4}
    workplace.succeeded("--no-report")
    workplace.config["output"] = "parts"
    workplace.refused(2, "", options=("--part", "0/1"))  # which writes the config
    pods(workplace, "parts.yaml", 2, {"/64": "/2"})
    assert workplace.command("merge", "parts", "--no-report").code == 0
    assert_same_runs(workplace.folder / "out", workplace.folder / "parts")
    workplace.config["output"] = "together"
    workplace.refused(2, "", options=("--part", "0/1"))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    smaller = {"--nnodes 4": "--nnodes 2", "--nproc-per-node 8": "--nproc-per-node 1"}
    pods(workplace, "torchrun.yaml", 2, {**smaller, "psgrad-0.psgrad": "localhost", "29500": port})
    assert_same_runs(workplace.folder / "out", workplace.folder / "together")
