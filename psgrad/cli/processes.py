"""Several processes for one command: started by `--processes`, or by torchrun or srun.

They have RANK and WORLD_SIZE in the environment.
"""

from __future__ import annotations

import gc
import os
import secrets
import signal
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from psgrad.cli.command import Terminated
from psgrad.cli.progress import ProgressDisplay, ProgressStyle, display, with_last_lines
from psgrad.errors import (
    EXIT_INTERRUPTED,
    EXIT_RUNTIME,
    EXIT_TERMINATED,
    ConfigError,
    DistributedError,
    PsgradError,
)

if TYPE_CHECKING:
    from psgrad.engine.execution.ranks import Processes

ProcessesOption = Annotated[
    int,
    typer.Option(
        "--processes",
        metavar="N",
        min=1,
        help="Start N processes on this machine that share the work; torchrun does the same on several.",
    ),
]
OPTION = "--processes"
_STARTED_BY = os.getppid()  # now: once that process has ended, the system names another one


def in_a_group() -> bool:
    """Whether the environment says that this process is one of several. Raises ConfigError where it says what
    can't be.
    """
    take_slurm(os.environ)
    if "RANK" not in os.environ:
        return False
    rank, size = os.environ["RANK"], os.environ.get("WORLD_SIZE") or "1"
    if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
        raise ConfigError(
            f"the environment says RANK={rank} and WORLD_SIZE={size}",
            expected="two whole numbers, RANK from 0 and below WORLD_SIZE, as torchrun sets them",
            next_step="start with torchrun, or with --processes; or unset both variables for one process",
        )
    return int(size) > 1


def require_free(folder: Path, overwrite: bool) -> None:
    """Raises OutputExistsError for a folder that a new run can't be written to, before anything slow is
    imported. Of several processes the first one looks, later: it makes the folder for all.
    """
    if not in_a_group():
        from psgrad.run.folders import RunFolder

        RunFolder.require_free(folder, overwrite)


# Ports from here on are for users' programs, and as many are tried by a job's number.
_FIRST_PORT, _PORTS = 20_000, 10_000


def take_slurm(environment: MutableMapping[str, str]) -> None:
    """Where srun started this process as one of several, say so as torchrun does.

    Source: https://slurm.schedmd.com/srun.html, output environment variables.
    """
    tasks = environment.get("SLURM_STEP_NUM_TASKS", "1")
    if "RANK" in environment or "SLURM_PROCID" not in environment or tasks == "1":
        return
    hosts = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "localhost")
    here = environment.get("SLURM_STEP_TASKS_PER_NODE", tasks).partition(",")[0].partition("(")[0]
    job = int(environment.get("SLURM_JOB_ID", 0)) + int(environment.get("SLURM_STEP_ID", 0))
    found = {
        "RANK": environment["SLURM_PROCID"],
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": environment.get("SLURM_LOCALID", "0"),
        "LOCAL_WORLD_SIZE": here,
        "MASTER_ADDR": first_host(hosts),
        "MASTER_PORT": str(_FIRST_PORT + job % _PORTS),
        **_threads_of_srun(environment, int(here)),
    }
    for name, value in found.items():
        environment.setdefault(name, value)


def _threads_of_srun(environment: Mapping[str, str], here: int) -> dict[str, str]:
    """OMP_NUM_THREADS of one of `here` processes of srun on this host: the cores that were asked for; without
    that an equal share of all, where srun has not bound processes to cores. Empty where it has.
    """
    asked, cores = environment.get("SLURM_CPUS_PER_TASK"), usable_cores()
    if asked is None and cores < int(environment.get("SLURM_CPUS_ON_NODE") or os.cpu_count() or 1):
        return {}
    return {"OMP_NUM_THREADS": asked or str(max(1, cores // here))}


def usable_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def first_host(hosts: str) -> str:
    """The first of a list of hosts as SLURM writes it: node01 of node[01-04,07],other."""
    name, bracket, rest = hosts.partition("[")
    if not bracket or "," in name:
        return hosts.partition(",")[0]
    inside, _, after = rest.partition("]")
    return name + inside.partition(",")[0].partition("-")[0] + after.partition(",")[0]


def require_one(command: str) -> None:
    """Raises ConfigError for a command that does not share its work, where this process is one of several:
    each would do all of it, and write the same files.
    """
    if in_a_group():
        raise ConfigError(
            f"psgrad {command} was started in {os.environ['WORLD_SIZE']} processes",
            expected="one process",
            cause="torchrun or srun started it, and each of its processes would do all of the work",
            next_step="run it in one process, without torchrun; or unset RANK and WORLD_SIZE",
        )


def start(count: int, folder: Path) -> None:
    """Run this process's command in `count` processes, and leave with the exit code of the first that failed.
    Returns if the command is to run here: for one process, and in a process that was started so.

    folder: of the run, with what the ranks log.

    Raises DistributedError where a process was killed, and Terminated or KeyboardInterrupt after a signal.
    """
    if count == 1 or in_a_group():
        return
    from psgrad.engine.execution.launcher import Signalled, launch

    try:
        exit_code = launch(count, ["-m", "psgrad", *_without_option(sys.argv[1:])], usable_cores())
    except Signalled as ended:
        raise (Terminated if ended.number == signal.SIGTERM else KeyboardInterrupt) from None
    except DistributedError as error:
        raise with_last_lines(error, folder) from None
    raise typer.Exit(exit_code)


def _without_option(arguments: list[str]) -> list[str]:
    """The arguments without --processes and its value."""
    result, skip = [], False
    for argument in arguments:
        if not skip and argument != OPTION and not argument.startswith(f"{OPTION}="):
            result.append(argument)
        skip = argument == OPTION
    return result


@contextmanager
def shared_run(
    count: int, style: ProgressStyle, folder: Path, *, private: bool = False
) -> Iterator[tuple[Processes | None, ProgressDisplay]]:
    """Run the block in `count` processes, or in those that torchrun or srun started: the processes (None for
    this one alone), and the progress of a run in a folder. private: as of rank_logs.display.
    """
    if not gc.get_freeze_count():
        gc.freeze()  # what is imported by now stays: the collector need not walk over it again and again
    start(count, folder)
    with joined(folder) as processes, display(style, processes, folder, private=private) as progress:
        yield processes, progress


@contextmanager
def joined(folder: Path) -> Iterator[Processes | None]:
    """The processes that run this command; None for this one alone. An error is printed by the rank that
    failed first. folder: of the run, with what the ranks log.
    """
    if not in_a_group():
        yield None
        return
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a rank says in its own words what was lost
    from psgrad.engine.execution.process_group import RankGroup
    from psgrad.run.host_files import shared_on_host

    group = RankGroup.join(_STARTED_BY if "TORCHELASTIC_RUN_ID" in os.environ else None)
    try:
        (run,) = group.agreed("host files", lambda: [secrets.randbits(62)])
        with shared_on_host(
            str(run),
            removes=os.environ.get("LOCAL_RANK", "0") == "0",
            waiting=group.heartbeats.waiting,
        ):
            try:
                yield group
            except typer.Exit:  # a verdict
                group.answer_to_the_end()
                raise
            group.answer_to_the_end()
    except (KeyboardInterrupt, typer.Exit) as ended:
        if group.rank == 0 or isinstance(ended, typer.Exit):
            raise
        raise typer.Exit(EXIT_TERMINATED if isinstance(ended, Terminated) else EXIT_INTERRUPTED) from None
    except Exception as error:
        message = error.arrived if isinstance(error, PsgradError) else f"{type(error).__name__}: {error}"
        if group.fail(message):
            if isinstance(error, DistributedError):
                raise with_last_lines(error, folder) from error.__cause__
            raise
        raise typer.Exit(error.exit_code if isinstance(error, PsgradError) else EXIT_RUNTIME) from None
    finally:
        group.leave()
