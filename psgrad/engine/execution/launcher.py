"""Starts the ranks of one run on this machine, by the elastic agent of torch.distributed.

Source: https://docs.pytorch.org/docs/stable/elastic/run.html
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from psgrad.errors import EXIT_OK, DistributedError

# How long a rank that a signal asks to end may take for its chunk. PyTorch kills it after 30 by default, and
# PyTorch 2.11 knows no other time.
_SECONDS_TO_END = 600


class Signalled(Exception):
    """SIGTERM or SIGINT arrived here; the ranks have ended."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def launch(count: int, arguments: Sequence[str], cores: int) -> int:
    """The exit code of `count` processes of this Python with these arguments: that of the first that failed.

    cores: those that the processes divide, unless OMP_NUM_THREADS is set.

    Raises DistributedError for a rank that a signal ended, and Signalled.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # each rank says what failed
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // count)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(_SECONDS_TO_END))
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id="psgrad",
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        with _signals_as_before():
            elastic_launch(config, sys.executable)(*arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode >= 0:  # an error, which the rank has printed, or a verdict
            return int(failure.exitcode)
        raise DistributedError(
            f"rank {rank} was ended by {signal.Signals(-failure.exitcode).name}",
            hint=(
                "too little memory for so many processes, or somebody ended it; run it again, with"
                " --resume where the command takes that; try fewer --processes"
            ),
        ) from None
    except SignalException as ended:
        raise Signalled(ended.sigval) from None
    return EXIT_OK


@contextmanager
def _signals_as_before() -> Iterator[None]:
    """The agent handles the signals that end a process, and would go on to when its ranks have ended."""
    names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)
