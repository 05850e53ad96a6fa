"""Several processes for one command: started by `--processes`, or by torchrun or srun.

They have RANK and WORLD_SIZE in the environment.
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from psgrad.cli.boundary import Terminated
from psgrad.cli.progress import PlainDisplay, ProgressDisplay, ProgressStyle, progress_display
from psgrad.errors import EXIT_INTERRUPTED, EXIT_RUNTIME, EXIT_TERMINATED, ConfigError, PsgradError

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
    """Whether the environment says that this process is one of several."""
    take_slurm(os.environ)
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE") or 1) > 1


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
    }
    for name, value in found.items():
        environment.setdefault(name, value)


def first_host(hosts: str) -> str:
    """The first of a list of hosts as SLURM writes it: node01 of node[01-04,07],other."""
    name, bracket, rest = hosts.partition("[")
    if not bracket or "," in name:
        return hosts.partition(",")[0]
    inside, _, after = rest.partition("]")
    return name + inside.partition(",")[0].partition("-")[0] + after.partition(",")[0]


def require_one(command: str) -> None:
    """Raises ConfigError for a command that can't share its work yet, where this process is one of several:
    each would do all of it, and write the same files.
    """
    if in_a_group():
        raise ConfigError(
            f"psgrad {command} was started in {os.environ['WORLD_SIZE']} processes",
            expected="one process",
            cause="torchrun or srun started it, and it can't share its rows yet",
            next_step="run it in one process, without torchrun; or unset RANK and WORLD_SIZE",
        )


def start(count: int) -> None:
    """Run this process's command in `count` processes, and leave with the exit code of the first that failed.
    Returns if the command is to run here: for one process, and in a process that was started so.

    Raises DistributedError where a process was killed, and Terminated or KeyboardInterrupt after a signal.
    """
    if count == 1 or in_a_group():
        return
    from psgrad.engine.execution.launcher import Signalled, launch

    try:
        exit_code = launch(count, ["-m", "psgrad", *_without_option(sys.argv[1:])])
    except Signalled as ended:
        raise (Terminated if ended.number == signal.SIGTERM else KeyboardInterrupt) from None
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
    count: int, style: ProgressStyle, output: Path
) -> Iterator[tuple[Processes | None, ProgressDisplay]]:
    """Run the block in `count` processes, or in those that torchrun or srun started: the processes (None for
    this one alone), and the progress of a run in the folder `output`.
    """
    start(count)
    with joined() as processes, _progress_of(processes, style, output) as progress:
        yield processes, progress


@contextmanager
def joined() -> Iterator[Processes | None]:
    """The processes that run this command; None for this one alone. An error is printed by the rank that
    failed first.
    """
    if not in_a_group():
        yield None
        return
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a rank says in its own words what was lost
    from psgrad.engine.execution.process_group import RankGroup
    from psgrad.inputs.sources.host_files import shared_on_host

    group = RankGroup.join(_STARTED_BY if "TORCHELASTIC_RUN_ID" in os.environ else None)
    try:
        (run,) = group.agreed("host files", lambda: [secrets.randbits(62)])
        with shared_on_host(str(run), removes=os.environ.get("LOCAL_RANK", "0") == "0"):
            yield group
    except (KeyboardInterrupt, typer.Exit) as ended:
        if group.rank == 0 or isinstance(ended, typer.Exit):
            raise
        raise typer.Exit(EXIT_TERMINATED if isinstance(ended, Terminated) else EXIT_INTERRUPTED) from None
    except Exception as error:
        message = error.arrived if isinstance(error, PsgradError) else f"{type(error).__name__}: {error}"
        if group.fail(message):
            raise
        raise typer.Exit(error.exit_code if isinstance(error, PsgradError) else EXIT_RUNTIME) from None
    finally:
        group.leave()


def _progress_of(processes: Processes | None, style: ProgressStyle, output: Path) -> ProgressDisplay:
    """The progress of the first rank on stderr; that of each other one in logs/ of the run folder."""
    if processes is None or processes.rank == 0:
        return progress_display(style)
    return PlainDisplay(_LogFile(output / "logs" / f"rank-{processes.rank}.log"))


class _LogFile:
    """A text file that is made when its folder is there: the first rank makes the run folder."""

    def __init__(self, path: Path) -> None:
        self._path, self._waiting = path, ""

    def write(self, text: str, /) -> None:
        self._waiting += text

    def flush(self) -> None:
        if self._waiting and self._path.parent.parent.is_dir():
            self._path.parent.mkdir(exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(self._waiting)
            self._waiting = ""
