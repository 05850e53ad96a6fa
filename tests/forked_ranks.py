"""A command in several ranks: children forked from this process, which has everything imported already, so
that a run takes about a second.

They meet in a store that rank 0 holds: no agent ends the others when one has died.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path

import torch
import torch.nn.functional as F

from psgrad.cli import main
from psgrad.engine.execution.process_group import RankGroup
from psgrad.engine.gradients import per_sample_gradients
from psgrad.engine.privacy.accounting import StepEvent, epsilon_rdp
from psgrad.engine.privacy.sampling import Sampling

_SECONDS = 150  # a child that takes longer hangs, however busy the machine is
Plant = Callable[[int], None]
"""Called in each child with its rank, before the command: plants a mistake, or its death."""


@dataclass(frozen=True)
class EndedRank:
    """How a rank ended: its exit code, minus the number of the signal that killed it; what it printed; after
    how many seconds.
    """

    code: int
    out: str
    err: str
    seconds: float


def run_ranks(folder: Path, size: int, *arguments: str, plant: Plant = lambda rank: None) -> list[EndedRank]:
    """`psgrad` with these arguments in so many ranks. folder: for what they print."""

    def command(rank: int) -> None:
        sys.argv = ["psgrad", *arguments]
        plant(rank)
        main()

    return fork_ranks(folder, size, command)


def run_in_group(folder: Path, size: int, work: Callable[[RankGroup], None]) -> list[EndedRank]:
    """A function in so many ranks of one group."""

    def run(rank: int) -> None:
        group = RankGroup.join(60)
        work(group)
        group.leave()

    return fork_ranks(folder, size, run)


def fork_ranks(folder: Path, size: int, run: Callable[[int], None]) -> list[EndedRank]:
    """A function of the rank in so many processes. folder: for what they print."""
    _import_everything()
    sys.stdout.flush()
    sys.stderr.flush()
    port, began = _free_port(), time.monotonic()
    children: dict[int, int] = {}
    for rank in range(size):
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", DeprecationWarning
            )  # of forks beside threads: the child uses none
            child = os.fork()
        if child == 0:
            _be_the_rank(rank, size, port, folder, run)
        children[child] = rank
    codes: dict[int, tuple[int, float]] = {}
    for _ in range(size):
        child, status = _next_of(set(children) - set(codes))
        codes[child] = os.waitstatus_to_exitcode(status), time.monotonic() - began
    return [
        EndedRank(
            codes[child][0],
            (folder / f"stdout-{rank}").read_text(),
            (folder / f"stderr-{rank}").read_text(),
            codes[child][1],
        )
        for child, rank in children.items()
    ]


def die() -> None:
    """The death of this process, at once."""
    os.kill(os.getpid(), signal.SIGKILL)


@cache
def _import_everything() -> None:
    """Else each child would take seconds for it: rules, kernels and accountants are imported at their first
    use.
    """
    for name in ("analyze", "influence", "influence_index", "dp_step"):
        import_module(f"psgrad.commands.{name}")
    params = {"weight": torch.ones(3, 4), "bias": torch.ones(3)}

    def loss(params: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.linear(x, params["weight"], params["bias"]).tanh(), y)

    per_sample_gradients(loss, params, torch.ones(2, 4), torch.tensor([0, 1])).square_norms()
    epsilon_rdp([(StepEvent(2.0, Sampling("poisson", sample_rate=0.5), "add_or_remove_one"), 1)], 0.01)


def _next_of(children: set[int]) -> tuple[int, int]:
    while True:
        for child in children:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return ended, status
        time.sleep(0.01)


def _be_the_rank(rank: int, size: int, port: int, folder: Path, run: Callable[[int], None]) -> None:
    """Never returns: the child must not go on with the tests of its parent."""
    code = 99
    try:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # pytest has a handler of its own
        signal.alarm(_SECONDS)
        torch.set_num_threads(1)  # the parent's other threads were not forked
        for name, descriptor in (("stdout", 1), ("stderr", 2)):
            file = os.open(folder / f"{name}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(file, descriptor)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        faulthandler.register(signal.SIGALRM, chain=True)  # a child that hangs says where
        os.environ |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "GLOO_SOCKET_IFNAME": "lo",
        }
        try:
            run(rank)
            code = 0
        except SystemExit as leave:
            code = leave.code if isinstance(leave.code, int) else 98
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException as error:
        os.write(2, "".join(traceback.format_exception(error)).encode())
    finally:
        os._exit(code)


def _free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port
