"""Processes that srun starts: SLURM's variables. The guide's scripts for SLURM, with a stand-in for srun, and
its jobs for Kubernetes, as the shells of their pods.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from psgrad.cli import processes
from psgrad.cli.processes import first_host, in_a_group, take_slurm
from psgrad.errors import ConfigError
from tests.commands.same_runs import assert_same_runs
from tests.workplace import Workplace

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
STEP = {
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "32",
    "SLURM_STEP_TASKS_PER_NODE": "8(x4)",
    "SLURM_STEP_NODELIST": "gpu[07-10]",
    "SLURM_JOB_ID": "1234567",
    "SLURM_STEP_ID": "2",
}
SRUN = """#!{python}
import os, subprocess, sys
count = int(os.environ["STAND_IN_TASKS"])
known = {{"SLURM_STEP_NUM_TASKS": str(count), "SLURM_STEP_NODELIST": "localhost"}}
known["SLURM_JOB_ID"] = str(os.getpid())
ranks = [
    subprocess.Popen(
        sys.argv[1:], env={{**os.environ, **known, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}}
    )
    for rank in range(count)
]
sys.exit(max(rank.wait() for rank in ranks))
"""


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("one", "one"),
        ("one,two", "one"),
        ("node[01-04,07],other", "node01"),
        ("node[3,5-6]", "node3"),
        ("rack[2-3]-a,b", "rack2-a"),
        ("first,node[01-04]", "first"),
        ("10.0.0.[1-9]", "10.0.0.1"),
    ],
)
def test_first_host_of_a_list(hosts: str, first: str) -> None:
    assert first_host(hosts) == first


@pytest.mark.parametrize(("rank", "size"), [("0", "two"), ("x", "2"), ("2", "2"), ("-1", "2"), ("", "2")])
def test_rank_that_can_not_be_is_refused(monkeypatch: pytest.MonkeyPatch, rank: str, size: str) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(ConfigError, match=f"the environment says RANK={rank} and WORLD_SIZE={size}"):
        in_a_group()


def test_a_process_of_srun_is_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "usable_cores", lambda: 4)
    environment = {**STEP, "SLURM_CPUS_ON_NODE": "32"}  # each process is bound to its cores
    take_slurm(environment)
    assert {name: environment[name] for name in environment.keys() - {*STEP, "SLURM_CPUS_ON_NODE"}} == {
        "RANK": "9",
        "WORLD_SIZE": "32",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "8",
        "MASTER_ADDR": "gpu07",
        "MASTER_PORT": "24569",
    }


@pytest.mark.parametrize(
    ("change", "threads"),
    [
        ({"SLURM_CPUS_ON_NODE": "64"}, "8"),
        ({"SLURM_CPUS_ON_NODE": "64", "SLURM_CPUS_PER_TASK": "3"}, "3"),
        ({"SLURM_CPUS_ON_NODE": "64", "OMP_NUM_THREADS": "5"}, "5"),
        ({"SLURM_CPUS_ON_NODE": "4", "SLURM_STEP_TASKS_PER_NODE": "128"}, "1"),
    ],
    ids=["not bound", "cores asked for", "user's own", "more processes than cores"],
)
def test_processes_of_srun_that_are_not_bound_divide_the_cores(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, str], threads: str
) -> None:
    monkeypatch.setattr(processes, "usable_cores", lambda: 64)
    environment = {**STEP, **change}
    take_slurm(environment)
    assert environment["OMP_NUM_THREADS"] == threads


@pytest.mark.parametrize(
    "change", [{"RANK": "3", "WORLD_SIZE": "4"}, {"SLURM_STEP_NUM_TASKS": "1"}], ids=["torchrun", "one task"]
)
def test_variables_that_are_set_stay(change: dict[str, str]) -> None:
    environment = {**STEP, **change}
    before = dict(environment)
    take_slurm(environment)
    assert environment == before


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
    script(workplace, "analyze.sbatch", STAND_IN_TASKS="2", SLURM_CPUS_PER_TASK="3")
    assert_same_runs(workplace.folder / "out", workplace.folder / "together")
    assert workplace.manifest("together")["engine"]["threads"] == 3
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
