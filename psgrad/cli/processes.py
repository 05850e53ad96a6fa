"""Several processes for one command: started by `--processes`, or by torchrun.

They have RANK and WORLD_SIZE in the environment.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from psgrad.cli.command import Terminated
from psgrad.cli.progress import ProgressDisplay, ProgressStyle, progress_display
from psgrad.errors import (
    EXIT_INTERRUPTED,
    EXIT_RUNTIME,
    EXIT_TERMINATED,
    ConfigError,
    PsgradError,
)

if TYPE_CHECKING:
    from psgrad.config import Config
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


def in_a_group() -> bool:
    """Whether the environment says that this process is one of several. Raises ConfigError where it says what
    can't be, and where srun has started several that do not know of each other.
    """
    if "RANK" not in os.environ:
        tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
        if "SLURM_PROCID" in os.environ and tasks != "1":
            raise ConfigError(
                f"srun has started psgrad {tasks} times, and each would do all of the work",
                hint="let srun start torchrun once on each machine, and torchrun start psgrad",
            )
        return False
    rank, size = os.environ["RANK"], os.environ.get("WORLD_SIZE") or "1"
    if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
        raise ConfigError(
            f"the environment says RANK={rank} and WORLD_SIZE={size}; expected two whole numbers, RANK"
            " from 0 and below WORLD_SIZE, as torchrun sets them",
            hint="start with torchrun, or with --processes; or unset both variables for one process",
        )
    return int(size) > 1


def require_free(folder: Path, overwrite: bool) -> None:
    """Raises OutputExistsError for a folder that a new run can't be written to, before anything slow is
    imported. Of several processes the first one looks, later: it makes the folder for all.
    """
    if not in_a_group():
        from psgrad.run.folders import RunFolder

        RunFolder.require_free(folder, overwrite)


def usable_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def require_one(command: str) -> None:
    """Raises ConfigError for a command that does not share its work, where this process is one of several:
    each would do all of it, and write the same files.
    """
    if in_a_group():
        raise ConfigError(
            f"psgrad {command} was started in {os.environ['WORLD_SIZE']} processes; expected one process",
            hint=(
                "torchrun started it, and each of its processes would do all of the work; run it in one"
                " process, without torchrun; or unset RANK and WORLD_SIZE"
            ),
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
        arguments = ["-m", "psgrad", *_without_option(sys.argv[1:])]
        if not _imports_from_here():  # else `-m` would: a json.py there would be taken for Python's
            arguments.insert(0, "-P")
        exit_code = launch(count, arguments, usable_cores())
    except Signalled as ended:
        raise (Terminated if ended.number == signal.SIGTERM else KeyboardInterrupt) from None
    raise typer.Exit(exit_code)


def _imports_from_here() -> bool:
    """Whether this process looks for modules in the current folder first, as `python -m` does."""
    return sys.path[0] in ("", str(Path.cwd()))


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
    count: int, style: ProgressStyle, config: Config
) -> Iterator[tuple[Processes | None, ProgressDisplay]]:
    """Run the block in `count` processes, or in those that torchrun started: the processes (None for this one
    alone), and the display of the progress, which the first of them has.
    """
    if not gc.get_freeze_count():
        gc.freeze()  # what is imported by now stays: the collector need not walk over it again and again
    start(count)
    with joined(config.engine.process_timeout) as processes:
        own = style if processes is None or processes.leads else ProgressStyle.none
        with progress_display(own) as progress:
            yield processes, progress


@contextmanager
def joined(seconds: float) -> Iterator[Processes | None]:
    """The processes that run this command; None for this one alone. An error is printed by the rank that
    failed first. seconds: the time limit of each wait for other ranks.
    """
    if not in_a_group():
        yield None
        return
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a rank says in its own words what was lost
    from psgrad.engine.execution.process_group import RankGroup

    group = RankGroup.join(seconds)
    try:
        yield group
    except typer.Exit:  # a verdict of the first rank, when all others are done
        group.leave()
        raise
    except KeyboardInterrupt as ended:
        own = EXIT_TERMINATED if isinstance(ended, Terminated) else EXIT_INTERRUPTED
        group.failed(own)  # the others end with this code, too, and say nothing
        if group.leads:
            raise
        raise typer.Exit(own) from None
    except Exception as error:
        own = error.exit_code if isinstance(error, PsgradError) else EXIT_RUNTIME
        of_first = group.failed(own)
        if of_first is None:
            raise
        raise typer.Exit(of_first) from None
    else:
        group.leave()
